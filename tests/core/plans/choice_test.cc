// SPDX-License-Identifier: Apache-2.0
// Which plan is chosen: what the model counts is what plans do, larger messages
// never lead back to a plan, and rules come first.
#include "core/plans/choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace dfccl {
namespace {

constexpr int kSizes[] = {1, 2, 3, 4, 5, 8, 13, 16, 100, 256, 1000, 60000};

Signature Of(Kind kind, int64_t count, DType dtype = DType::kU8) {
  Signature signature;
  signature.kind = kind;
  signature.count = count;
  signature.dtype = dtype;
  if (kind == Kind::kPermute) signature.pairs = InternPairs({{0, 1}});
  return signature;
}

std::string Where(Kind kind, const PlanChoice& plan, int members) {
  return std::string(KindName(kind)) + " by " + PlanName(plan) + ", " + std::to_string(members) +
         " members";
}

std::vector<Kind> Kinds(bool with_several_plans) {
  std::vector<Kind> kinds;
  for (int k = 0; k < kKindCount; ++k) {
    const auto kind = static_cast<Kind>(k);
    if (!with_several_plans || PlansOf(kind).size() > 1) kinds.push_back(kind);
  }
  return kinds;
}

TEST(PlanChoiceTest, EveryKindHasPlansWithDifferentNames) {
  for (const Kind kind : Kinds(/*with_several_plans=*/false)) {
    std::vector<std::string> names;
    bool unasked = false;
    for (const PlanChoice& plan : PlansOf(kind)) {
      EXPECT_TRUE(HasPlans(kind, plan.algorithm));
      names.push_back(PlanName(plan));
      unasked |= FoldsInOrder(plan.algorithm);
    }
    EXPECT_TRUE(unasked) << KindName(kind);
    std::sort(names.begin(), names.end());
    EXPECT_TRUE(std::unique(names.begin(), names.end()) == names.end()) << KindName(kind);
  }
}

// By plans as they are made.
TEST(PlanChoiceTest, TheModelCountsWhatPlansDo) {
  for (const Kind kind : Kinds(/*with_several_plans=*/true)) {
    for (const int members : {2, 3, 5, 8, 16}) {
      for (const PlanChoice& choice : PlansOf(kind)) {
        if (!FoldsInOrder(choice.algorithm)) continue;
        SCOPED_TRACE(Where(kind, choice, members));
        const Plan plan =
            MakePlan({kind, choice.algorithm, members, 0, nullptr, choice.chunks_per_member});
        double steps = 0;
        double blocks = 0;
        int movers = 0;
        for (const MemberPlan& member : plan.member) {
          bool moves = false;
          for (const Step& step : member.steps) {
            ++steps;
            if (step.kind != StepKind::kReduce) continue;
            moves = true;
            const uint32_t refs =
                step.source_end - step.source_begin + step.destination_end - step.destination_begin;
            blocks +=
                static_cast<double>(refs * (step.chunk_end - step.chunk_begin)) / plan.chunk_count;
          }
          movers += moves ? 1 : 0;
        }
        const int64_t larger = std::max(SourceBlocks(kind, members), ResultBlocks(kind, members));
        const PlanCost cost = CostOf(kind, choice, members);
        EXPECT_NEAR(cost.bytes, blocks / static_cast<double>(larger), 1e-9);
        if (choice.algorithm == Algorithm::kChain) {
          EXPECT_GE(cost.steps, steps / 2);
          EXPECT_LE(cost.steps, steps * 2);
        } else {
          EXPECT_EQ(cost.steps, steps);
          EXPECT_EQ(cost.parallel, movers > 1);
        }
      }
    }
  }
}

TEST(PlanChoiceTest, LargerMessagesNeverLeadBack) {
  const PlanRules rules;
  for (const Kind kind : Kinds(/*with_several_plans=*/true)) {
    for (const int members : kSizes) {
      std::vector<PlanChoice> seen;
      bool parallel = false;
      for (int64_t count = 1; count < int64_t{1} << 32; count += 1 + count / 8) {
        const PlanChoice plan = rules.Choose(Of(kind, count), members);
        EXPECT_TRUE(FoldsInOrder(plan.algorithm));
        if (!seen.empty() && seen.back() == plan) continue;
        EXPECT_TRUE(std::find(seen.begin(), seen.end(), plan) == seen.end())
            << Where(kind, plan, members) << ", " << count << " bytes a block";
        seen.push_back(plan);
        const bool now = CostOf(kind, plan, members).parallel;
        EXPECT_TRUE(now || !parallel);
        parallel = now;
      }
      EXPECT_EQ(parallel, members > 1) << KindName(kind) << ", " << members << " members";
    }
  }
}

// Nothing in which members could differ, or that has no influence on time.
TEST(PlanChoiceTest, OnlyKindSizeAndGroupCount) {
  const PlanRules rules, same;
  EXPECT_EQ(rules.hash(), same.hash());
  for (const Kind kind : Kinds(/*with_several_plans=*/false)) {
    for (const int members : {2, 8}) {
      for (int64_t bytes = 16; bytes < int64_t{1} << 30; bytes *= 4) {
        const PlanChoice plan = rules.Choose(Of(kind, bytes), members);
        for (const DType dtype : {DType::kBF16, DType::kF32, DType::kC128}) {
          Signature other = Of(kind, bytes / DTypeSize(dtype), dtype);
          other.op = ReduceOp::kMax;
          other.root = 1;
          EXPECT_TRUE(same.Choose(other, members) == plan) << Where(kind, plan, members);
        }
      }
    }
  }
}

TEST(PlanRulesTest, TheFirstThatFitsCounts) {
  const PlanChoice ring{Algorithm::kRing}, flat{Algorithm::kDirectFlat},
      doubling{Algorithm::kRecursiveDoubling}, direct{Algorithm::kDirect};
  const PlanRules rules({{Kind::kAllReduce, 8, 1000, ring},
                         {Kind::kAllReduce, 8, PlanRule::kAnyBytes, doubling},
                         {Kind::kAllReduce, 0, 500, flat},
                         {Kind::kAllGather, 0, PlanRule::kAnyBytes, direct}});
  const auto choose = [&](Kind kind, int64_t count, int members) {
    return rules.Choose(Of(kind, count), members);
  };
  EXPECT_TRUE(choose(Kind::kAllReduce, 1000, 8) == ring);
  EXPECT_TRUE(choose(Kind::kAllReduce, 1001, 8) == doubling);
  EXPECT_TRUE(choose(Kind::kAllReduce, 500, 4) == flat);
  EXPECT_TRUE(choose(Kind::kAllGather, 1, 8) == direct);
  const PlanRules none;
  EXPECT_TRUE(choose(Kind::kAllReduce, 1 << 28, 4) ==
              none.Choose(Of(Kind::kAllReduce, 1 << 28), 4));
  EXPECT_TRUE(choose(Kind::kReduce, 1, 8) == none.Choose(Of(Kind::kReduce, 1), 8));
}

TEST(PlanRulesTest, PlansThatCannotServeSoManyAreLeftOut) {
  const PlanRules rules({{Kind::kAllReduce, 0, PlanRule::kAnyBytes, {Algorithm::kRing}}});
  EXPECT_TRUE(rules.Choose(Of(Kind::kAllReduce, 1), kMaxPlanMembers).algorithm == Algorithm::kRing);
  EXPECT_TRUE(rules.Choose(Of(Kind::kAllReduce, 1), kMaxPlanMembers + 1) ==
              PlanRules().Choose(Of(Kind::kAllReduce, 1), kMaxPlanMembers + 1));
}

TEST(PlanRulesTest, OtherRulesHaveAnotherHash) {
  const PlanRule rule{Kind::kAllReduce, 8, 1000, {Algorithm::kRing, 8}};
  std::vector<std::vector<PlanRule>> all = {{}, {rule}, {rule, rule}};
  for (int field = 0; field < 5; ++field) {
    PlanRule other = rule;
    if (field == 0) other.kind = Kind::kReduce;
    if (field == 1) other.members = 4;
    if (field == 2) other.most_bytes = 1001;
    if (field == 3) other.choice.algorithm = Algorithm::kDirectFlat;
    if (field == 4) other.choice.chunks_per_member = 1;
    all.push_back({other});
  }
  std::vector<uint64_t> hashes;
  for (const auto& rules : all) {
    hashes.push_back(PlanRules(rules).hash());
    EXPECT_EQ(PlanRules(rules).hash(), hashes.back());
  }
  std::sort(hashes.begin(), hashes.end());
  EXPECT_TRUE(std::unique(hashes.begin(), hashes.end()) == hashes.end());
}

}  // namespace
}  // namespace dfccl
