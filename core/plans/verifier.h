// SPDX-License-Identifier: Apache-2.0
// Runs a plan symbolically and proves it, or says what is wrong with it.
#ifndef DFCCL_CORE_PLANS_VERIFIER_H_
#define DFCCL_CORE_PLANS_VERIFIER_H_

#include <string>
#include <vector>

#include "core/plans/plan.h"

namespace dfccl {

struct VerifierReport {
  std::vector<std::string> faults;  // empty: the plan is proven
  bool ok() const { return faults.empty(); }
};

// Proves that, for every interleaving the waits allow:
//  * every member's result holds every member's source exactly once, in one
//    fold order that is the same on all members, and is finalized exactly once;
//  * every wait is reached by a signal of its very value (no deadlock), signals
//    only grow, and no signal or scratch write is without a reader;
//  * no buffer range is written while another member may read or write it, and
//    none is read before it is written (happens-before from signals and waits);
//  * no member's buffer is touched after that member may have finished.
// With `in_place`, every member's result is the memory of its source. What holds
// then holds also if it is so for some members only: fewer accesses conflict.
VerifierReport VerifyAllReduce(const Plan& plan, bool in_place = false);

}  // namespace dfccl

#endif  // DFCCL_CORE_PLANS_VERIFIER_H_
