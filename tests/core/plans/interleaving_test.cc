// SPDX-License-Identifier: Apache-2.0
// A second opinion on the verifier: plans run on real values, under many random
// schedules. Plans that it proves give the same right values under all of them;
// races that it reports do go wrong under some.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "core/plans/plan.h"
#include "core/plans/verifier.h"
#include "tests/core/plans/keys.h"
#include "tests/core/plans/mutation.h"

namespace dfccl {
namespace {

// Values are texts, so that the order of a fold shows. "?" is what memory holds
// that its owner has not lent yet, has taken back, or never wrote.
class Simulation {
 public:
  Simulation(const Plan& plan, uint32_t seed) : plan_(plan), random_(seed), actors_(plan.members) {
    for (int member = 0; member < plan.members; ++member) {
      actors_[member].priority = static_cast<int>(random_() % 1000);
    }
  }

  // Runs to the end; "" or what went wrong.
  std::string Run() {
    for (;;) {
      // A strict priority order with changes now and then finds rare orders
      // sooner than fair choice.
      std::vector<int> ready;
      for (int member = 0; member < plan_.members; ++member) {
        if (Ready(member)) ready.push_back(member);
      }
      if (ready.empty()) break;
      const int member = *std::max_element(ready.begin(), ready.end(), [&](int a, int b) {
        return actors_[a].priority < actors_[b].priority;
      });
      Advance(member);
      if (random_() % 8 == 0) actors_[member].priority = static_cast<int>(random_() % 1000);
    }
    for (int member = 0; member < plan_.members; ++member) {
      if (!actors_[member].finished) return "member " + std::to_string(member) + " is stuck";
    }
    return plan_.key.kind == Kind::kAllReduce ? CheckAllReduce() : CheckOthers();
  }

  // Of all members, one after the other.
  const std::vector<std::vector<std::string>>& results() { return results_; }

 private:
  struct Actor {
    int priority = 0;
    bool arrived = false;
    bool finished = false;
    bool checked = false;
    size_t step = 0;
    uint32_t word = 0;
    std::vector<std::string> values;  // computed by the step, still to be stored
  };

  std::string CheckAllReduce() const {
    for (int member = 1; member < plan_.members; ++member) {
      if (results_[member] != results_[0]) return "member " + std::to_string(member) + " differs";
    }
    for (const std::string& value : results_[0]) {
      if (value.find('?') != std::string::npos) return "ends with " + value;
      if (value.front() != '=') return "not finalized: " + value;
      for (int member = 0; member < plan_.members; ++member) {
        const std::string name = SourceText(member, 0);
        const size_t at = value.find(name);
        if (at == std::string::npos || value.find(name, at + 1) != std::string::npos) {
          return "not every source once: " + value;
        }
      }
    }
    return "";
  }

  std::string CheckOthers() const {
    for (int member = 0; member < plan_.members; ++member) {
      for (size_t i = 0; i < results_[member].size(); ++i) {
        const std::string expected = Expected(member, static_cast<int>(i / plan_.chunk_count));
        if (results_[member][i] == expected) continue;
        return "member " + std::to_string(member) + " ends with " + results_[member][i] +
               " instead of " + expected;
      }
    }
    return "";
  }

  static std::string SourceText(int member, int block) {
    return "<" + std::to_string(member) + "." + std::to_string(block) + ">";
  }
  static std::string FoldText(int end, int block) {
    std::string text = SourceText(0, block);
    for (int member = 1; member < end; ++member) {
      text = "(" + text + SourceText(member, block) + ")";
    }
    return text;
  }

  // As core/collective.h tells it.
  std::string Expected(int member, int block) const {
    const bool is_root = member == plan_.key.root;
    const int n = plan_.members;
    switch (plan_.key.kind) {
      case Kind::kAllReduce:
        break;
      case Kind::kAllGather:
        return SourceText(block, 0);
      case Kind::kReduceScatter:
        return "=" + FoldText(n, member);
      case Kind::kAllToAll:
      case Kind::kRaggedAllToAll:
        return SourceText(block, member);
      case Kind::kPermute:
        for (const auto& [from, to] : plan_.key.pairs->list) {
          if (to == member) return SourceText(from, 0);
        }
        return "0";
      case Kind::kBroadcast:
        return SourceText(plan_.key.root, 0);
      case Kind::kReduce:
        return is_root ? "=" + FoldText(n, 0) : "0";
      case Kind::kGather:
        return is_root ? SourceText(block, 0) : "0";
      case Kind::kScatter:
        return SourceText(plan_.key.root, member);
      case Kind::kScan:
        return FoldText(member + 1, 0);
      case Kind::kExscan:
        return member == 0 ? "0" : FoldText(member, 0);
      case Kind::kBarrier:
        return SourceText(member, 0);
    }
    return "";
  }

  bool Ready(int member) const {
    const Actor& actor = actors_[member];
    if (actor.finished) return false;
    const std::vector<Step>& steps = plan_.member[member].steps;
    if (!actor.arrived || actor.step == steps.size()) return true;
    const Step& step = steps[actor.step];
    if (IsPosted() && step.kind == StepKind::kReduce) {
      const std::vector<BufferRef> sources = Sources(plan_, step);
      return std::all_of(sources.begin(), sources.end(), [this](const BufferRef& source) {
        return actors_[source.member].arrived;
      });
    }
    if (step.kind != StepKind::kWait) return true;
    for (int peer = 0; peer < plan_.members; ++peer) {
      const bool awaited = step.member == kEveryMember || step.member == peer;
      if (awaited && actors_[peer].word < step.value) return false;
    }
    return true;
  }

  void Advance(int member) {
    Actor& actor = actors_[member];
    const std::vector<Step>& steps = plan_.member[member].steps;
    if (!actor.arrived) {
      actor.arrived = true;
      actor.word = kArrived;
      return;
    }
    if (actor.step == steps.size()) {
      results_.resize(plan_.members);
      for (int block = 0; block < ResultBlockCount(); ++block) {
        for (uint32_t chunk = 0; chunk < plan_.chunk_count; ++chunk) {
          results_[member].push_back(Load(
              {BufferKind::kResult, static_cast<uint16_t>(block), static_cast<uint16_t>(member)},
              chunk));
        }
      }
      actor.finished = true;
      return;
    }
    const Step& step = steps[actor.step];
    if (step.kind == StepKind::kSignal) actor.word = step.value;
    if (step.kind == StepKind::kCheck) {
      // It reads what every member brings.
      actor.checked = true;
      for (int peer = 0; peer < plan_.members; ++peer) actor.checked &= Lent(peer);
    }
    if (step.kind == StepKind::kReduce) {
      // Reads one chunk and stores it later, so that others can come between.
      const auto chunk = step.chunk_begin + static_cast<uint32_t>(actor.values.size() / 2);
      if (actor.values.size() % 2 == 0) {
        actor.values.push_back(Fold(member, step, chunk));
        return;
      }
      for (const BufferRef& ref : Destinations(plan_, step)) Store(ref, chunk, actor.values.back());
      actor.values.push_back("");
      if (chunk + 1 < step.chunk_end) return;
      actor.values.clear();
    }
    ++actor.step;
  }

  int ResultBlockCount() const {
    return plan_.key.kind == Kind::kRaggedAllToAll
               ? plan_.members
               : static_cast<int>(ResultBlocks(plan_.key.kind, plan_.members));
  }

  std::string Fold(int member, const Step& step, uint32_t chunk) const {
    if (plan_.key.kind == Kind::kRaggedAllToAll && !actors_[member].checked) return "?";
    if (step.source_begin == step.source_end) return "0";
    std::string value;
    for (const BufferRef& ref : Sources(plan_, step)) {
      const std::string operand = Load(ref, chunk);
      value = value.empty() ? operand : "(" + value + operand + ")";
    }
    return step.finalize ? "=" + value : value;
  }

  // Sources are copied when their members arrive, and data is waited for by itself.
  bool IsPosted() const { return plan_.key.algorithm == Algorithm::kLowLatency; }

  bool Lent(int member) const { return actors_[member].arrived && !actors_[member].finished; }

  std::string Load(const BufferRef& ref, uint32_t chunk) const {
    const bool is_source = ref.kind == BufferKind::kSource;
    if (!Lent(ref.member) && !(is_source && IsPosted())) return "?";
    if (is_source) return SourceText(ref.member, ref.block);
    const auto found = memory_.find({ref.kind, ref.block, ref.member, chunk});
    return found == memory_.end() ? "?" : found->second;
  }

  void Store(const BufferRef& ref, uint32_t chunk, const std::string& value) {
    // A write to memory that is not lent destroys something else: the first
    // result will show it.
    const bool lent = Lent(ref.member);
    memory_[{ref.kind, ref.block, ref.member, chunk}] = lent ? value : "?";
    if (!lent && actors_[ref.member].finished) {
      for (std::string& value : results_[ref.member]) value = "?";
    }
  }

  const Plan& plan_;
  std::mt19937 random_;
  std::vector<Actor> actors_;
  std::map<std::tuple<BufferKind, int, int, uint32_t>, std::string> memory_;
  std::vector<std::vector<std::string>> results_;
};

TEST(InterleavingTest, ProvenPlansGiveTheSameUnderAllSchedules) {
  for (int members = 1; members <= 8; ++members) {
    for (const PlanKey& key : Keys(members, {1, 3})) {
      const Plan plan = MakePlan(key);
      std::vector<std::vector<std::string>> first;
      for (uint32_t seed = 0; seed < 20; ++seed) {
        Simulation simulation(plan, seed);
        ASSERT_EQ(simulation.Run(), "") << Text(key) << ", seed " << seed;
        if (seed == 0) first = simulation.results();
        EXPECT_EQ(simulation.results(), first);
      }
    }
  }
}

int SignalCount(const Plan& plan) {
  int count = 0;
  for (const MemberPlan& member : plan.member) {
    for (const Step& step : member.steps) count += step.kind == StepKind::kSignal;
  }
  return count;
}

// No step is there for the verifier's sake only: without it, some schedule goes
// wrong. Signals apart: without one, its readers may do with the next, later.
TEST(InterleavingTest, RejectedDeletionsGoWrongUnderSomeSchedule) {
  for (const int members : {2, 3, 4, 5}) {
    for (const PlanKey& key : Keys(members, {1})) {
      // That nobody leaves early is no matter of values.
      if (key.kind == Kind::kBarrier) continue;
      const Plan plan = MakePlan(key);
      for (const Mutant& mutant : Deletions(plan)) {
        if (SignalCount(mutant.plan) < SignalCount(plan)) continue;
        ASSERT_FALSE(VerifyPlan(mutant.plan).ok()) << Text(key) << ": " << mutant.name;
        bool wrong = false;
        for (uint32_t seed = 0; seed < 3000 && !wrong; ++seed) {
          wrong = !Simulation(mutant.plan, seed).Run().empty();
        }
        EXPECT_TRUE(wrong) << Text(key) << ": " << mutant.name;
      }
    }
  }
}

}  // namespace
}  // namespace dfccl
