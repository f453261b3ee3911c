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
//  * every block of every member's result ends as its kind has it: the right
//    blocks of the right sources, each once, folded in rank order (all_reduce: in
//    one order that is the same on all members), finalized exactly once, or zeros;
//  * every wait is reached by a signal of its very value (no deadlock), signals
//    only grow, and no signal or scratch write is without a reader;
//  * no buffer range is written while another member may read or write it, and
//    none is read before it is written (happens-before from signals and waits);
//  * no member's buffer is touched after that member may have finished;
//  * a member has waited for whom it needs (core/collective.h) and for nobody else;
//  * nobody leaves a ragged exchange before all have checked their index arrays, and
//    no such array is used unchecked.
// With `in_place`, every member's result is the memory of its source. What holds
// then holds also if it is so for some members only: fewer accesses conflict.
VerifierReport VerifyPlan(const Plan& plan, bool in_place = false);

}  // namespace dfccl

#endif  // DFCCL_CORE_PLANS_VERIFIER_H_
