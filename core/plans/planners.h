// SPDX-License-Identifier: Apache-2.0
// The planners, by kind. Each gets a plan with its key, its members and as many
// empty programs.
#ifndef DFCCL_CORE_PLANS_PLANNERS_H_
#define DFCCL_CORE_PLANS_PLANNERS_H_

#include "core/plans/plan.h"

namespace dfccl {

void PlanAllReduce(Plan* plan);   // all_reduce.cc
void PlanTogether(Plan* plan);    // together.cc: kinds in which everyone needs everyone
void PlanAmongPeers(Plan* plan);  // among_peers.cc: kinds in which members need some others
void PlanPosted(Plan* plan);      // posted.cc: every member folds for itself what all have posted
void PlanAcross(Plan* plan);      // across.cc: groups that are spread over processes

}  // namespace dfccl

#endif  // DFCCL_CORE_PLANS_PLANNERS_H_
