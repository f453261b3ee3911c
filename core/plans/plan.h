// SPDX-License-Identifier: Apache-2.0
// A plan: what each member of a collective does, as data. Plans depend only on
// (algorithm, members), not on the message, and are made once.
#ifndef DFCCL_CORE_PLANS_PLAN_H_
#define DFCCL_CORE_PLANS_PLAN_H_

#include <cstdint>
#include <vector>

#include "core/protocol/step.h"

namespace dfccl {

enum class Algorithm : uint8_t {
  kDirectFlat = 0,
  kDirectOneShot,
  kDirectTwoShot,
  kRing,
  kRecursiveDoubling,
};
constexpr int kAlgorithmCount = 5;
constexpr int kMaxPlanMembers = 64;  // larger groups: direct plans only (any n up to 65534)

struct MemberPlan {
  std::vector<Step> steps;
};

struct Plan {
  Algorithm algorithm = Algorithm::kDirectOneShot;
  int members = 0;
  uint32_t chunk_count = 1;
  uint32_t scratch_slots = 0;
  bool in_place = false;           // right, too, where results are the memory of sources
  std::vector<MemberPlan> member;  // [members]
  // Shared by the members, so that direct plans stay linear in them.
  std::vector<BufferRef> refs;

  StepList List(int index) const {
    return {member[index].steps.data(), refs.data(),
            static_cast<uint32_t>(member[index].steps.size()), chunk_count, scratch_slots};
  }
};

const char* AlgorithmName(Algorithm algorithm);

// Builds the all-reduce plan for `members` >= 1. Pure. `chunks_per_member`
// splits each member's share further (>= 1) where the algorithm pipelines: in the ring.
Plan PlanAllReduce(Algorithm algorithm, int members, int chunks_per_member = 1);

// The same, made once per process and shared. Thread-safe; never freed.
const Plan& CachedAllReducePlan(Algorithm algorithm, int members);

}  // namespace dfccl

#endif  // DFCCL_CORE_PLANS_PLAN_H_
