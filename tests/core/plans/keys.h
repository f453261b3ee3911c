// SPDX-License-Identifier: Apache-2.0
// The plans that are tested.
#ifndef DFCCL_TESTS_CORE_PLANS_KEYS_H_
#define DFCCL_TESTS_CORE_PLANS_KEYS_H_

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/plans/plan.h"

namespace dfccl {

inline Plan PlanAllReduce(Algorithm algorithm, int members, int chunks_per_member = 1) {
  return MakePlan({Kind::kAllReduce, algorithm, members, 0, nullptr, chunks_per_member});
}

// A shift, a shift that lacks members, exchanges beside members that keep theirs,
// one pair, and none.
inline std::set<const Pairs*> SomePairs(int members) {
  std::vector<std::pair<int, int>> shift, open, exchange;
  for (int r = 0; r < members; ++r) {
    shift.emplace_back(r, (r + 1) % members);
    if (r % 3 != 1) open.emplace_back(r, (r + 2) % members);
    const int partner = r % 3 == 2 || (r % 3 == 0 && r + 1 == members) ? r
                        : r % 3 == 0                                   ? r + 1
                                                                       : r - 1;
    exchange.emplace_back(r, partner);
  }
  return {InternPairs(shift), InternPairs(open), InternPairs(exchange),
          InternPairs({{members - 1, 0}}), InternPairs({})};
}

// Every kind and algorithm for so many members, with some roots and pairs.
inline std::vector<PlanKey> Keys(int members, const std::vector<int>& chunks_per_member) {
  std::vector<PlanKey> keys;
  for (int k = 0; k < kKindCount; ++k) {
    const auto kind = static_cast<Kind>(k);
    for (int a = 0; a < kAlgorithmCount; ++a) {
      const auto algorithm = static_cast<Algorithm>(a);
      if (!HasPlans(kind, algorithm)) continue;
      const bool pipelined = algorithm == Algorithm::kRing || algorithm == Algorithm::kChain;
      std::set<int> roots{0};
      if (HasRoot(kind)) roots.insert({members / 2, members - 1});
      std::set<const Pairs*> pairs{nullptr};
      if (kind == Kind::kPermute) pairs = SomePairs(members);
      for (const int chunks : pipelined ? chunks_per_member : std::vector<int>{1}) {
        for (const int root : roots) {
          for (const Pairs* each : pairs) {
            keys.push_back({kind, algorithm, members, root, each, chunks});
          }
        }
      }
    }
  }
  return keys;
}

// Ways to spread so many members over several processes: all of them for up to
// five members, some for more.
inline std::set<const Placement*> Placements(int members) {
  std::set<const Placement*> placements;
  const auto add = [&](auto process_of) {
    std::vector<uint16_t> process;
    std::vector<int> met;
    for (int r = 0; r < members; ++r) {
      const int own = process_of(r);
      auto found = std::find(met.begin(), met.end(), own);
      if (found == met.end()) found = met.insert(met.end(), own);
      process.push_back(static_cast<uint16_t>(found - met.begin()));
    }
    if (met.size() > 1) placements.insert(InternPlacement(process));
  };
  if (members <= 5) {
    int ways = 1;
    for (int r = 0; r < members; ++r) ways *= members;
    for (int way = 0; way < ways; ++way) {
      add([=](int r) {
        int rest = way;
        for (int i = 0; i < r; ++i) rest /= members;
        return rest % members;
      });
    }
  } else {
    add([](int r) { return r; });
    add([](int r) { return r % 2; });
    add([](int r) { return r / 2; });
    add([=](int r) { return 2 * r / members; });
    add([](int r) { return r < 5 ? 0 : r; });
    add([](int r) { return r * r % 3; });
  }
  return placements;
}

// Ways to spread so many members evenly over hosts, and there over processes.
inline std::set<const Placement*> PlacementsOnHosts(int members) {
  std::set<const Placement*> placements;
  for (int each = 2; each <= members / 2; ++each) {
    if (members % each != 0) continue;
    const auto add = [&](auto process_of) {
      std::vector<uint16_t> process, host;
      std::vector<std::pair<int, int>> met;
      for (int r = 0; r < members; ++r) {
        const std::pair<int, int> own{r / each, process_of(r / each, r % each)};
        auto found = std::find(met.begin(), met.end(), own);
        process.push_back(static_cast<uint16_t>(found - met.begin()));
        if (found != met.end()) continue;
        met.push_back(own);
        host.push_back(static_cast<uint16_t>(own.first));
      }
      placements.insert(InternPlacement(process, host));
    };
    add([](int, int) { return 0; });
    add([](int, int i) { return i; });
    add([](int, int i) { return i % 2; });
    add([](int, int i) { return i / 2; });
    add([](int host, int i) { return host % 2 == 0 ? i : 0; });
    add([](int host, int i) { return (host + i) * i % 3; });
  }
  return placements;
}

// The same for groups that are spread over processes.
inline std::vector<PlanKey> KeysAcross(int members) {
  std::vector<PlanKey> keys;
  std::set<const Placement*> placements = Placements(members);
  placements.merge(PlacementsOnHosts(members));
  for (const Placement* placement : placements) {
    for (int k = 0; k < kKindCount; ++k) {
      const auto kind = static_cast<Kind>(k);
      for (int a = 0; a < kAlgorithmCount; ++a) {
        const auto algorithm = static_cast<Algorithm>(a);
        if (!HasPlans(kind, algorithm, placement)) continue;
        const bool by_hosts = algorithm == Algorithm::kHostByHost;
        if (!by_hosts && placement->even_hosts > 0) continue;  // hosts don't matter there
        std::set<int> roots{0};
        if (HasRoot(kind)) roots.insert(members - 1);
        std::set<const Pairs*> pairs{nullptr};
        if (kind == Kind::kPermute) pairs = SomePairs(members);
        for (const int root : roots) {
          for (const Pairs* each : pairs) {
            for (const int pieces : by_hosts ? std::vector<int>{1, 3} : std::vector<int>{1}) {
              keys.push_back({kind, algorithm, members, root, each, pieces, placement});
            }
          }
        }
      }
    }
  }
  return keys;
}

inline std::string Text(const PlanKey& key) {
  std::string text = std::string(KindName(key.kind)) + ", " + AlgorithmName(key.algorithm) + ", " +
                     std::to_string(key.members) + " members, root " + std::to_string(key.root) +
                     ", " + std::to_string(key.chunks_per_member) + " chunks per member";
  if (key.placement != nullptr) {
    text += ", in processes";
    for (const uint16_t process : key.placement->process) text += " " + std::to_string(process);
  }
  if (key.pairs == nullptr) return text;
  text += ", pairs";
  for (const auto& [from, to] : key.pairs->list) {
    text += " " + std::to_string(from) + ">" + std::to_string(to);
  }
  return text;
}

}  // namespace dfccl

#endif  // DFCCL_TESTS_CORE_PLANS_KEYS_H_
