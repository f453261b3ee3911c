// SPDX-License-Identifier: Apache-2.0
// The cost model and the rules that come before it.
#include "core/plans/choice.h"

#include <algorithm>

#include "core/hash.h"

namespace dfccl {
namespace {

// The model: the time of a step, of threads' beginning and ending together, and
// of a byte that is read or written by one thread, of which so many work at once.
// In nanoseconds; docs/plans.md says how they were measured.
constexpr int kStepNs = 100;
constexpr int kTogetherNs = 26000;
constexpr int kBytesPerNs = 40;
constexpr int kThreads = 2;

constexpr int kPieces = 8;      // of a chunk that is passed on in pieces
constexpr int kHostPieces = 4;  // the same, from host to host
// Messages between processes up to this size go along with the news of a member.
constexpr int64_t kEagerBytes = int64_t{64} << 10;

double TimeNs(const PlanCost& cost, int64_t bytes) {
  const double threads = cost.parallel ? kThreads : 1;
  return kStepNs * cost.steps + (cost.parallel ? kTogetherNs : 0) +
         cost.bytes * static_cast<double>(bytes) / (kBytesPerNs * threads);
}

// Of one member, of the larger of its buffers; of a ragged exchange one row, as
// the sizes of its buffers are not in the signature.
int64_t MessageBytes(const Signature& signature, int members) {
  return signature.count * DTypeSize(signature.dtype) *
         std::max(SourceBlocks(signature.kind, members), ResultBlocks(signature.kind, members));
}

bool Passes(Algorithm algorithm) {
  return algorithm == Algorithm::kRing || algorithm == Algorithm::kChain;
}

}  // namespace

std::string PlanName(const PlanChoice& choice) {
  std::string name = AlgorithmName(choice.algorithm);
  if (choice.chunks_per_member > 1) name += ":" + std::to_string(choice.chunks_per_member);
  return name;
}

const std::vector<PlanChoice>& PlansOf(Kind kind) {
  using Plans = std::array<std::vector<PlanChoice>, kKindCount>;
  static const Plans& plans = *new Plans([] {
    Plans all;
    for (int k = 0; k < kKindCount; ++k) {
      for (int a = 0; a < kAlgorithmCount; ++a) {
        const auto algorithm = static_cast<Algorithm>(a);
        if (algorithm == Algorithm::kLowLatency) continue;
        if (!HasPlans(static_cast<Kind>(k), algorithm)) continue;
        all[k].push_back({algorithm});
        if (Passes(algorithm)) all[k].push_back({algorithm, kPieces});
      }
    }
    return all;
  }());
  return plans[static_cast<size_t>(kind)];
}

bool FoldsInOrder(Algorithm algorithm) {
  return algorithm != Algorithm::kRing && algorithm != Algorithm::kRecursiveDoubling;
}

PlanCost CostOf(Kind kind, const PlanChoice& choice, int members) {
  const double n = members;
  const double pieces = choice.chunks_per_member;
  PlanCost cost;
  const bool flat = choice.algorithm == Algorithm::kDirectFlat;
  double shares = n;  // data steps, whoever does them
  switch (kind) {
    case Kind::kAllReduce:
      shares = flat ? 1 : n;
      cost.bytes = choice.algorithm == Algorithm::kDirectOneShot ? n * (n + 1) : 2 * n;
      break;
    case Kind::kAllGather:
    case Kind::kReduceScatter:
      cost.bytes = n + 1;
      break;
    case Kind::kAllToAll:
      shares = n * n;
      cost.bytes = 2 * n;
      break;
    case Kind::kReduce:
      shares = flat ? n : 2 * n - 1;
      cost.bytes = 2 * n;
      break;
    case Kind::kScan:
      cost.bytes = 4 * n - 3;
      break;
    case Kind::kExscan:
      cost.bytes = 5 * n - 7;
      break;
    default:  // one plan only
      break;
  }
  switch (choice.algorithm) {
    case Algorithm::kDirectFlat:
      cost.steps = shares + n + 1;
      break;
    case Algorithm::kChain:
      cost.steps = 3 * (n - 1) * pieces;
      cost.parallel = members > 1 && pieces > 1;
      break;
    default:
      cost.steps = shares + 3 * n;
      cost.parallel = members > 1;
      break;
  }
  return cost;
}

PlanRules::PlanRules(const std::vector<PlanRule>& rules) {
  Hash128 hash;
  for (const int constant : {kStepNs, kTogetherNs, kBytesPerNs, kThreads, kPieces}) {
    hash.Add(static_cast<uint64_t>(constant));
  }
  for (const PlanRule& rule : rules) {
    rules_[static_cast<size_t>(rule.kind)].push_back(rule);
    hash.Add(static_cast<uint64_t>(rule.kind))
        .Add(static_cast<uint64_t>(rule.members))
        .Add(static_cast<uint64_t>(rule.most_bytes))
        .Add(static_cast<uint64_t>(rule.choice.algorithm))
        .Add(static_cast<uint64_t>(rule.choice.chunks_per_member));
  }
  hash_ = hash.hi;
}

PlanChoice PlanRules::Choose(const Signature& signature, int members,
                             const Placement* placement) const {
  const Kind kind = signature.kind;
  const int64_t bytes = MessageBytes(signature, members);
  if (placement != nullptr) {
    if (bytes <= kEagerBytes && kind != Kind::kRaggedAllToAll) return {Algorithm::kEager, 1};
    if (HasPlans(kind, Algorithm::kHostByHost, placement)) {
      return {Algorithm::kHostByHost, kHostPieces};
    }
    return {kind == Kind::kAllReduce ? Algorithm::kRendezvousTwoShot : Algorithm::kRendezvous, 1};
  }
  for (const PlanRule& rule : rules_[static_cast<size_t>(kind)]) {
    if ((rule.members == 0 || rule.members == members) && bytes <= rule.most_bytes &&
        members <= MostMembers(kind, rule.choice.algorithm)) {
      return rule.choice;
    }
  }
  const std::vector<PlanChoice>& plans = PlansOf(kind);
  PlanChoice best = plans.front();
  if (plans.size() == 1) return best;
  double least_ns = std::numeric_limits<double>::infinity();
  for (const PlanChoice& plan : plans) {
    if (!FoldsInOrder(plan.algorithm)) continue;
    const double ns = TimeNs(CostOf(kind, plan, members), bytes);
    if (ns >= least_ns) continue;
    least_ns = ns;
    best = plan;
  }
  return best;
}

}  // namespace dfccl
