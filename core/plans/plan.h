// SPDX-License-Identifier: Apache-2.0
// A plan: what each member of a collective does, as data. Plans depend only on
// their key, not on the message, and are made once.
#ifndef DFCCL_CORE_PLANS_PLAN_H_
#define DFCCL_CORE_PLANS_PLAN_H_

#include <cstdint>
#include <vector>

#include "core/collective.h"
#include "core/group.h"
#include "core/protocol/step.h"

namespace dfccl {

enum class Algorithm : uint8_t {
  // For kinds in which everyone needs everyone.
  kDirectFlat = 0,     // member 0 does all: least latency where one thread runs all members
  kDirectOneShot,      // all_reduce: every member folds all for itself
  kDirectTwoShot,      // all_reduce: every member folds a share for all
  kRing,               // all_reduce
  kRecursiveDoubling,  // all_reduce
  kDirect,             // every member moves its share at once; waits for whom it touches
  kChain,              // scans: from neighbour to neighbour
  kLowLatency,         // for GPUs: every member folds for itself what all have posted
  // For groups that are spread over processes.
  kEager,              // data goes along with the news that a member has come
  kRendezvous,         // data goes when a reader has come, of movers into its result
  kRendezvousTwoShot,  // all_reduce: every member folds a share for all
  kHostByHost,         // all_reduce: folds go from host to host, and results back
};
constexpr int kAlgorithmCount = 12;
constexpr int kMaxPlanMembers = 64;  // of rings and recursive doubling
// Waits for every member to reach kArrived + i are counted for i below this.
constexpr uint32_t kCountedLevels = 2;

struct PlanKey {
  Kind kind = Kind::kAllReduce;
  Algorithm algorithm = Algorithm::kDirectTwoShot;
  int members = 1;
  int root = 0;                          // for kinds that have one
  const Pairs* pairs = nullptr;          // for kPermute
  int chunks_per_member = 1;             // pipelining of rings, chains and hosts
  const Placement* placement = nullptr;  // nullptr: all in one process

  bool operator==(const PlanKey& other) const {
    return kind == other.kind && algorithm == other.algorithm && members == other.members &&
           root == other.root && pairs == other.pairs &&
           chunks_per_member == other.chunks_per_member && placement == other.placement;
  }
};

struct MemberPlan {
  std::vector<Step> steps;
};

struct Plan {
  PlanKey key;
  int members = 0;
  uint32_t chunk_count = 1;
  uint32_t scratch_slots = 0;
  bool in_place = false;           // right, too, where results are the memory of sources
  bool waits_for_one = false;      // it has waits for a single member, or uncounted ones;
  bool waits_for_every = false;    // it has counted ones
  uint32_t most_refs = 1;          // of a data step
  std::vector<MemberPlan> member;  // [members]
  // Shared by the members, so that direct plans stay linear in them.
  std::vector<BufferRef> refs;

  StepList List(int index) const {
    return {member[index].steps.data(), refs.data(),
            static_cast<uint32_t>(member[index].steps.size()), chunk_count, scratch_slots};
  }
};

const char* AlgorithmName(Algorithm algorithm);

// Whether there are plans of this kind by this algorithm; what is largest.
bool HasPlans(Kind kind, Algorithm algorithm, const Placement* placement = nullptr);
int MostMembers(Kind kind, Algorithm algorithm);

// Builds a plan for a key that HasPlans and MostMembers allow. Pure.
Plan MakePlan(const PlanKey& key);

// The same, made once per process and shared. Thread-safe; never freed.
const Plan& CachedPlan(const PlanKey& key);

}  // namespace dfccl

#endif  // DFCCL_CORE_PLANS_PLAN_H_
