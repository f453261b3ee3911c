// SPDX-License-Identifier: Apache-2.0
// Which plans there are, and the one copy of each.
#include "core/plans/plan.h"

#include <algorithm>
#include <cassert>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "core/plans/planners.h"

namespace dfccl {
namespace {

enum class Family : uint8_t { kAllReduce, kTogether, kAmongPeers };

Family FamilyOf(Kind kind) {
  switch (kind) {
    case Kind::kAllReduce:
      return Family::kAllReduce;
    case Kind::kAllGather:
    case Kind::kReduceScatter:
    case Kind::kAllToAll:
    case Kind::kReduce:
    case Kind::kBarrier:
    case Kind::kRaggedAllToAll:
      return Family::kTogether;
    case Kind::kPermute:
    case Kind::kBroadcast:
    case Kind::kGather:
    case Kind::kScatter:
    case Kind::kScan:
    case Kind::kExscan:
      break;
  }
  return Family::kAmongPeers;
}

}  // namespace

const char* AlgorithmName(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kDirectFlat:
      return "direct_flat";
    case Algorithm::kDirectOneShot:
      return "direct_one_shot";
    case Algorithm::kDirectTwoShot:
      return "direct_two_shot";
    case Algorithm::kRing:
      return "ring";
    case Algorithm::kRecursiveDoubling:
      return "recursive_doubling";
    case Algorithm::kDirect:
      return "direct";
    case Algorithm::kChain:
      return "chain";
    case Algorithm::kLowLatency:
      return "low_latency";
    case Algorithm::kEager:
      return "eager";
    case Algorithm::kRendezvous:
      return "rendezvous";
    case Algorithm::kRendezvousTwoShot:
      return "rendezvous_two_shot";
    case Algorithm::kHostByHost:
      return "host_by_host";
  }
  return "unknown";
}

bool HasPlans(Kind kind, Algorithm algorithm, const Placement* placement) {
  switch (algorithm) {
    case Algorithm::kEager:
      return placement != nullptr && kind != Kind::kRaggedAllToAll;
    case Algorithm::kRendezvous:
      return placement != nullptr;
    case Algorithm::kRendezvousTwoShot:
      return placement != nullptr && kind == Kind::kAllReduce;
    case Algorithm::kHostByHost:
      return placement != nullptr && kind == Kind::kAllReduce && placement->even_hosts > 0;
    case Algorithm::kLowLatency:  // those without data, or of unknown size, have none
      return placement == nullptr && kind != Kind::kBarrier && kind != Kind::kRaggedAllToAll;
    default:
      if (placement != nullptr) return false;
  }
  switch (kind) {
    case Kind::kAllReduce:
      return algorithm != Algorithm::kDirect && algorithm != Algorithm::kChain;
    case Kind::kScan:
    case Kind::kExscan:
      return algorithm == Algorithm::kChain;
    case Kind::kAllGather:
    case Kind::kReduceScatter:
    case Kind::kAllToAll:
    case Kind::kReduce:
      return algorithm == Algorithm::kDirectFlat || algorithm == Algorithm::kDirect;
    default:
      return algorithm == Algorithm::kDirect;
  }
}

int MostMembers(Kind kind, Algorithm algorithm) {
  if (algorithm == Algorithm::kEager || algorithm == Algorithm::kRendezvous ||
      algorithm == Algorithm::kRendezvousTwoShot || algorithm == Algorithm::kHostByHost) {
    return 256;  // their plans grow with the square of the members
  }
  if (algorithm == Algorithm::kRing || algorithm == Algorithm::kRecursiveDoubling) {
    return kMaxPlanMembers;
  }
  switch (kind) {
    // Their plans grow with the square of the members.
    case Kind::kAllGather:
    case Kind::kReduceScatter:
    case Kind::kAllToAll:
    case Kind::kGather:
    case Kind::kRaggedAllToAll:
      return 256;
    default:
      return kEveryMember - 1;
  }
}

Plan MakePlan(const PlanKey& key) {
  assert(HasPlans(key.kind, key.algorithm, key.placement) && key.chunks_per_member >= 1);
  assert(key.members >= 1 && key.members <= MostMembers(key.kind, key.algorithm));
  Plan plan;
  plan.key = key;
  plan.members = key.members;
  plan.member.resize(key.members);
  if (key.placement != nullptr) {
    PlanAcross(&plan);
  } else if (key.algorithm == Algorithm::kLowLatency) {
    PlanPosted(&plan);
  } else {
    switch (FamilyOf(key.kind)) {
      case Family::kAllReduce:
        PlanAllReduce(&plan);
        break;
      case Family::kTogether:
        PlanTogether(&plan);
        break;
      case Family::kAmongPeers:
        PlanAmongPeers(&plan);
        break;
    }
  }
  for (const MemberPlan& member : plan.member) {
    for (const Step& step : member.steps) {
      if (step.kind == StepKind::kWait) {
        const bool counted = step.member == kEveryMember && step.value - kArrived < kCountedLevels;
        (counted ? plan.waits_for_every : plan.waits_for_one) = true;
      } else if (step.kind == StepKind::kReduce) {
        plan.most_refs =
            std::max(plan.most_refs, step.source_end - step.source_begin + step.destination_end -
                                         step.destination_begin);
      }
    }
  }
  return plan;
}

const Plan& CachedPlan(const PlanKey& key) {
  using Order = std::tuple<Kind, Algorithm, int, int, const Pairs*, int, const Placement*>;
  struct Cache {
    std::mutex mutex;
    std::map<Order, std::unique_ptr<const Plan>> plans;
  };
  // Leaked: operations may outlive static destructors.
  static Cache& cache = *new Cache;
  std::lock_guard<std::mutex> lock(cache.mutex);
  std::unique_ptr<const Plan>& plan =
      cache.plans[{key.kind, key.algorithm, key.members, key.root, key.pairs, key.chunks_per_member,
                   key.placement}];
  if (plan == nullptr) plan = std::make_unique<const Plan>(MakePlan(key));
  return *plan;
}

}  // namespace dfccl
