// SPDX-License-Identifier: Apache-2.0
// Every planner's plans are proven for all group sizes, keep their promised
// size, and are made once when asked for through the cache.
#include "core/plans/plan.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/plans/verifier.h"
#include "tests/core/plans/keys.h"

namespace dfccl {
namespace {

constexpr Algorithm kDirect[] = {Algorithm::kDirectFlat, Algorithm::kDirectOneShot,
                                 Algorithm::kDirectTwoShot};
constexpr Algorithm kAlgorithms[] = {Algorithm::kDirectFlat, Algorithm::kDirectOneShot,
                                     Algorithm::kDirectTwoShot, Algorithm::kRing,
                                     Algorithm::kRecursiveDoubling};

std::string Faults(const VerifierReport& report) {
  std::string text;
  for (const std::string& fault : report.faults) text += fault + "\n";
  return text;
}

TEST(PlanTest, EveryPlanIsProvenForEveryGroupSize) {
  std::vector<int> sizes{31, 32, 33, 63, 64};
  for (int members = 1; members <= 16; ++members) sizes.push_back(members);
  for (const int members : sizes) {
    for (const PlanKey& key : Keys(members, {1, 2, 3, 5})) {
      const Plan plan = MakePlan(key);
      EXPECT_TRUE(plan.key == key);
      EXPECT_EQ(plan.members, members);
      const VerifierReport report = VerifyPlan(plan);
      EXPECT_TRUE(report.ok()) << Text(key) << ":\n" << Faults(report);
      if (!plan.in_place) continue;
      const VerifierReport in_place = VerifyPlan(plan, /*in_place=*/true);
      EXPECT_TRUE(in_place.ok()) << Text(key) << ", in place:\n" << Faults(in_place);
    }
  }
}

TEST(PlanTest, EveryPlanAcrossProcessesIsProven) {
  for (const int members : {2, 3, 4, 5, 6, 8, 9, 16}) {
    for (const PlanKey& key : KeysAcross(members)) {
      const Plan plan = MakePlan(key);
      const VerifierReport report = VerifyPlan(plan);
      EXPECT_TRUE(report.ok()) << Text(key) << ":\n" << Faults(report);
      if (!plan.in_place) continue;
      const VerifierReport in_place = VerifyPlan(plan, /*in_place=*/true);
      EXPECT_TRUE(in_place.ok()) << Text(key) << ", in place:\n" << Faults(in_place);
    }
  }
}

// What a member needs can be had at once.
TEST(PlanTest, PostedSourcesOfAMemberFollowEachOther) {
  for (const int members : {1, 2, 3, 8}) {
    for (const PlanKey& key : Keys(members, {1})) {
      if (key.algorithm != Algorithm::kLowLatency) continue;
      const Plan plan = MakePlan(key);
      EXPECT_EQ(plan.chunk_count, 1u);
      for (const MemberPlan& member : plan.member) {
        ASSERT_FALSE(member.steps.empty()) << Text(key);
        uint32_t next = member.steps.front().source_begin;
        for (const Step& step : member.steps) {
          ASSERT_EQ(step.kind, StepKind::kReduce) << Text(key);
          EXPECT_EQ(step.source_begin, next) << Text(key);
          next = step.source_end;
        }
      }
    }
  }
}

TEST(PlanTest, InPlace) {
  EXPECT_TRUE(PlanAllReduce(Algorithm::kDirectFlat, 8).in_place);
  EXPECT_TRUE(PlanAllReduce(Algorithm::kDirectTwoShot, 8).in_place);
  // A member's result is written while its source is still read by others.
  const Plan one_shot = PlanAllReduce(Algorithm::kDirectOneShot, 8);
  EXPECT_FALSE(one_shot.in_place);
  EXPECT_FALSE(VerifyPlan(one_shot, /*in_place=*/true).ok());
}

TEST(PlanTest, LargerDirectPlansAreProven) {
  for (const Algorithm algorithm : kDirect) {
    for (const int members : {65, 255, 256}) {
      const VerifierReport report = VerifyPlan(PlanAllReduce(algorithm, members));
      EXPECT_TRUE(report.ok()) << AlgorithmName(algorithm) << " " << members << ":\n"
                               << Faults(report);
    }
  }
}

TEST(PlanTest, DirectPlansStayLinearInTheirMembers) {
  constexpr int kMembers = 65534;
  for (const Algorithm algorithm : {Algorithm::kDirectOneShot, Algorithm::kDirectTwoShot}) {
    const Plan plan = PlanAllReduce(algorithm, kMembers);
    EXPECT_EQ(plan.refs.size(), 2u * kMembers);
    for (const int member : {0, 1, kMembers - 1}) {
      const StepList list = plan.List(member);
      ASSERT_EQ(list.step_count, 4u);
      const Step& reduce = list.steps[1];
      ASSERT_EQ(reduce.kind, StepKind::kReduce);
      ASSERT_EQ(reduce.source_end - reduce.source_begin, static_cast<uint32_t>(kMembers));
      for (int i = 0; i < kMembers; ++i) {
        const BufferRef ref = list.refs[reduce.source_begin + i];
        ASSERT_TRUE(ref.kind == BufferKind::kSource && ref.member == i) << i;
      }
      EXPECT_EQ(reduce.chunk_begin,
                algorithm == Algorithm::kDirectTwoShot ? static_cast<uint32_t>(member) : 0u);
    }
  }
}

TEST(PlanTest, AGroupOfOneTakesOneStep) {
  for (const Algorithm algorithm : kAlgorithms) {
    EXPECT_EQ(PlanAllReduce(algorithm, 1).member[0].steps.size(), 1u) << AlgorithmName(algorithm);
  }
}

TEST(PlanTest, TheRingPipelinesItsShares) {
  EXPECT_EQ(PlanAllReduce(Algorithm::kRing, 5).chunk_count, 5u);
  EXPECT_EQ(PlanAllReduce(Algorithm::kRing, 5, 3).chunk_count, 15u);
}

TEST(PlanTest, AlgorithmsHaveNamesOfTheirOwn) {
  std::set<std::string> names;
  for (int a = 0; a < kAlgorithmCount; ++a) {
    names.insert(AlgorithmName(static_cast<Algorithm>(a)));
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(kAlgorithmCount));
}

// Threads that ask for the same plans at once all get the same ones.
TEST(PlanTest, CachedPlansAreMadeOnce) {
  constexpr int kThreads = 4;
  constexpr int kMaxMembers = 12;
  std::vector<std::vector<const Plan*>> seen(kThreads);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&seen, thread] {
      for (const Algorithm algorithm : kAlgorithms) {
        for (int members = 1; members <= kMaxMembers; ++members) {
          seen[thread].push_back(&CachedPlan({Kind::kAllReduce, algorithm, members}));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int thread = 1; thread < kThreads; ++thread) EXPECT_EQ(seen[thread], seen[0]);

  EXPECT_EQ(std::set<const Plan*>(seen[0].begin(), seen[0].end()).size(), seen[0].size());
  size_t i = 0;
  for (const Algorithm algorithm : kAlgorithms) {
    for (int members = 1; members <= kMaxMembers; ++members) {
      EXPECT_EQ(seen[0][i]->key.algorithm, algorithm);
      EXPECT_EQ(seen[0][i]->members, members);
      EXPECT_TRUE(VerifyPlan(*seen[0][i]).ok());
      ++i;
    }
  }
}

}  // namespace
}  // namespace dfccl
