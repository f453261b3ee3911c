// SPDX-License-Identifier: Apache-2.0
// Which plan carries out a collective: by rules (forced by the user, or measured
// on this machine), else by a cost model.
//
// The choice is a function of the signature, the group's size and the rules. A
// process has one set of rules at a time, so the members in it agree by
// construction. Between processes no rule is asked, so nothing has to be compared
// there: the choice follows from the signature and from where the members are.
#ifndef DFCCL_CORE_PLANS_CHOICE_H_
#define DFCCL_CORE_PLANS_CHOICE_H_

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "core/collective.h"
#include "core/plans/plan.h"

namespace dfccl {

// What of a PlanKey is free.
struct PlanChoice {
  Algorithm algorithm = Algorithm::kDirect;
  int chunks_per_member = 1;
  bool operator==(const PlanChoice& other) const {
    return algorithm == other.algorithm && chunks_per_member == other.chunks_per_member;
  }
};

// "ring", or "ring:8" in 8 chunks per member.
std::string PlanName(const PlanChoice& choice);

// The plans that a kind has in one process, but for that of low latency, which is not for
// every daemon.
const std::vector<PlanChoice>& PlansOf(Kind kind);

// Whether a plan's results are those of a fold in the order of the members, bit by
// bit. Only such plans are chosen unasked.
bool FoldsInOrder(Algorithm algorithm);

// Collectives of this kind, in groups of this size, up to this size, go by this plan.
struct PlanRule {
  static constexpr int64_t kAnyBytes = std::numeric_limits<int64_t>::max();

  Kind kind = Kind::kAllReduce;
  int members = 0;  // 0: any
  int64_t most_bytes = kAnyBytes;
  PlanChoice choice;
};

// What the members do in all, by a plan that folds in order.
struct PlanCost {
  double steps = 0;       // for chains, about so many
  double bytes = 0;       // read and written, for each byte of the larger buffer of a member
  bool parallel = false;  // members move data at the same time
};
PlanCost CostOf(Kind kind, const PlanChoice& choice, int members);

class PlanRules {
 public:
  explicit PlanRules(const std::vector<PlanRule>& rules = {});

  // By the first rule that fits and whose plan serves so many members, else the
  // plan that the model takes for the fastest. Rules are about groups in one
  // process; others have no choice but the size.
  PlanChoice Choose(const Signature& signature, int members,
                    const Placement* placement = nullptr) const;

  // Equal in processes that choose alike.
  uint64_t hash() const { return hash_; }

 private:
  std::array<std::vector<PlanRule>, kKindCount> rules_;
  uint64_t hash_ = 0;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_PLANS_CHOICE_H_
