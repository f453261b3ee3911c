// SPDX-License-Identifier: Apache-2.0
// The verifier rejects what is wrong: planted faults with a message that names
// them, and every small edit of a right plan.
#include "core/plans/verifier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/core/plans/keys.h"
#include "tests/core/plans/mutation.h"

namespace dfccl {
namespace {

std::string Faults(const VerifierReport& report) {
  std::string text;
  for (const std::string& fault : report.faults) text += fault + "\n";
  return text;
}

void ExpectFault(const Plan& plan, const std::string& fault) {
  const VerifierReport report = VerifyPlan(plan);
  const bool found =
      std::any_of(report.faults.begin(), report.faults.end(),
                  [&](const std::string& text) { return text.find(fault) != std::string::npos; });
  EXPECT_TRUE(found) << "no fault says: " << fault << "\nfaults:\n" << Faults(report);
}

std::vector<Step>& Steps(Plan* plan, int member) { return plan->member[member].steps; }

void Delete(Plan* plan, int member, size_t step) {
  Steps(plan, member).erase(Steps(plan, member).begin() + step);
}

// Steps of a direct plan, on every member.
constexpr size_t kWaitArrived = 0;
constexpr size_t kReduceAll = 1;
constexpr size_t kSignalDone = 2;
constexpr size_t kWaitDone = 3;

class OneShotTest : public ::testing::Test {
 protected:
  Plan plan_ = PlanAllReduce(Algorithm::kDirectOneShot, 4);
};
class TwoShotTest : public ::testing::Test {
 protected:
  Plan plan_ = PlanAllReduce(Algorithm::kDirectTwoShot, 4);
};
// Member r of a ring of four: wait 1, [reduce, signal, wait] x 6; the first
// share is r-1.
class RingTest : public ::testing::Test {
 protected:
  Plan plan_ = PlanAllReduce(Algorithm::kRing, 4);
};
// Four blocks, the first of two members: 0 and 1. Heads: 0, 2, 3, 4.
class RecursiveDoublingTest : public ::testing::Test {
 protected:
  Plan plan_ = PlanAllReduce(Algorithm::kRecursiveDoubling, 5);
};

TEST_F(OneShotTest, ReadsASourceBeforeItsMemberArrived) {
  Delete(&plan_, 2, kWaitArrived);
  ExpectFault(plan_,
              "member 2, step 0 (reduce chunks [0, 1)): touches a buffer of member 0, which "
              "may not have arrived");
}

TEST_F(OneShotTest, FinishesWhileItsSourceIsRead) {
  Delete(&plan_, 2, kWaitDone);
  ExpectFault(plan_,
              "member 3, step 1 (reduce chunks [0, 1)): touches a buffer of member 2, which "
              "may have finished");
}

TEST_F(OneShotTest, WaitsTooEarly) {
  Steps(&plan_, 1)[kWaitDone].value = kArrived;
  ExpectFault(plan_,
              "member 0, step 1 (reduce chunks [0, 1)): touches a buffer of member 1, which "
              "may have finished");
}

TEST_F(OneShotTest, WaitsForASignalThatNeverComes) {
  Delete(&plan_, 3, kSignalDone);
  ExpectFault(plan_,
              "member 0, step 3 (wait for every member to reach 2): waits for ever: member "
              "3 stays at 1, in its step 2");
}

TEST_F(OneShotTest, WaitsForNothing) {
  Steps(&plan_, 0)[kWaitArrived].value = 0;
  ExpectFault(plan_, "member 0, step 0 (wait for every member to reach 0): words begin at 1");
}

TEST_F(OneShotTest, WaitsForItself) {
  Steps(&plan_, 0)[kWaitArrived].member = 0;
  ExpectFault(plan_, "member 0, step 0 (wait for member 0 to reach 1): waits for itself");
}

TEST_F(OneShotTest, SignalsBeforeItHasRead) {
  std::swap(Steps(&plan_, 1)[kReduceAll], Steps(&plan_, 1)[kSignalDone]);
  ExpectFault(plan_,
              "member 1, step 2 (reduce chunks [0, 1)): touches a buffer of member 0, which "
              "may have finished");
}

TEST_F(OneShotTest, SignalDoesNotGrow) {
  Steps(&plan_, 1).insert(Steps(&plan_, 1).begin() + kWaitDone, Steps(&plan_, 1)[kSignalDone]);
  ExpectFault(plan_, "member 1, step 3 (signal 2): does not grow: the word is 2 already");
}

TEST_F(OneShotTest, SignalHasNoReader) {
  Step signal = Steps(&plan_, 1)[kSignalDone];
  signal.value = 3;
  Steps(&plan_, 1).push_back(signal);
  ExpectFault(plan_, "member 1, step 4 (signal 3): nobody waits for this signal");
}

TEST_F(OneShotTest, SignalSkipsTheValueThatIsWaitedFor) {
  Steps(&plan_, 1)[kSignalDone].value = 3;
  ExpectFault(plan_, "member 1 never signals that value, only the later 3");
}

TEST_F(OneShotTest, FoldsInAnotherOrder) {
  Step* step = &Steps(&plan_, 2)[kReduceAll];
  std::vector<BufferRef> sources = Sources(plan_, *step);
  std::swap(sources[1], sources[3]);
  SetSources(&plan_, step, sources);
  ExpectFault(plan_,
              "member 2's result ends as round[final[(((s0 s3) s2) s1)]]: another fold than "
              "member 0's round[final[(((s0 s1) s2) s3)]]");
}

TEST_F(OneShotTest, CountsAContributionTwice) {
  Step* step = &Steps(&plan_, 2)[kReduceAll];
  std::vector<BufferRef> sources = Sources(plan_, *step);
  sources[3] = sources[1];
  SetSources(&plan_, step, sources);
  ExpectFault(plan_,
              "member 2, step 1 (reduce chunks [0, 1)): counts a contribution twice: folds "
              "((s0 s1) s2) with chunk 0 of member 1's source, which holds s1");
  ExpectFault(plan_,
              "member 2's result ends as round[final[(((s0 s1) s2) s1)]]: lacks the "
              "contribution of member 3");
}

TEST_F(OneShotTest, NeverFinalizes) {
  Steps(&plan_, 0)[kReduceAll].finalize = false;
  ExpectFault(plan_, "member 0's result ends as round[(((s0 s1) s2) s3)]: never finalized");
}

TEST_F(OneShotTest, WritesASource) {
  SetDestinations(&plan_, &Steps(&plan_, 0)[kReduceAll],
                  {{BufferKind::kResult, 0, 0}, {BufferKind::kSource, 0, 0}});
  ExpectFault(plan_,
              "member 0, step 1 (reduce chunks [0, 1)): writes a source: chunk 0 of member "
              "0's source");
}

TEST_F(OneShotTest, WritesTheSameTwice) {
  SetDestinations(&plan_, &Steps(&plan_, 0)[kReduceAll],
                  {{BufferKind::kResult, 0, 0}, {BufferKind::kResult, 0, 0}});
  ExpectFault(plan_, "overwrites chunk 0 of member 0's result, which nobody has read");
}

TEST_F(TwoShotTest, WritesAResultBeforeItsMemberArrived) {
  Steps(&plan_, 0)[kWaitArrived].member = 1;
  ExpectFault(plan_,
              "member 0, step 1 (reduce chunks [0, 1)): touches a buffer of member 3, which "
              "may not have arrived");
}

TEST_F(TwoShotTest, ForgetsAChunk) {
  Delete(&plan_, 3, kReduceAll);
  ExpectFault(plan_, "chunk 3 of member 1's result ends as nothing");
}

TEST_F(TwoShotTest, TakesAnothersChunk) {
  Steps(&plan_, 3)[kReduceAll].chunk_begin = 2;
  ExpectFault(plan_,
              "member 3, step 1 (reduce chunks [2, 4)): writes chunk 2 of member 0's result "
              "while it may be written by member 2, step 1 (reduce chunks [2, 3))");
}

TEST_F(TwoShotTest, ChunksBeyondTheLast) {
  Steps(&plan_, 3)[kReduceAll].chunk_end = 5;
  ExpectFault(plan_, "member 3, step 1 (reduce chunks [3, 5)): not a range of the 4 chunks");
}

TEST_F(TwoShotTest, FinalizesTwice) {
  // Member 0 finalizes its finished chunk again, in place.
  Step step = Steps(&plan_, 0)[kReduceAll];
  SetSources(&plan_, &step, {{BufferKind::kResult, 0, 0}});
  SetDestinations(&plan_, &step, {{BufferKind::kResult, 0, 0}});
  Steps(&plan_, 0).insert(Steps(&plan_, 0).begin() + kSignalDone, step);
  ExpectFault(plan_,
              "member 0, step 2 (reduce chunks [0, 1)): finalizes twice: "
              "round[final[(((s0 s1) s2) s3)]]");
}

TEST_F(RingTest, ReadsAPartialSumTooEarly) {
  // Round 2 of member 1 waits for the left's arrival instead of its round 1.
  ASSERT_EQ(Steps(&plan_, 1)[3].kind, StepKind::kWait);
  Steps(&plan_, 1)[3].value = kArrived;
  ExpectFault(plan_,
              "member 1, step 4 (reduce chunks [3, 4)): reads chunk 3 of member 0's scratch "
              "0 while it may be written by member 0, step 1 (reduce chunks [3, 4))");
}

TEST_F(RingTest, RoundsAPartialSum) {
  // Member 0 keeps its first partial sum in its result; its neighbour reads it there.
  SetDestinations(&plan_, &Steps(&plan_, 0)[1], {{BufferKind::kResult, 0, 0}});
  SetSources(&plan_, &Steps(&plan_, 1)[4],
             {{BufferKind::kResult, 0, 0}, {BufferKind::kSource, 0, 1}});
  ExpectFault(plan_,
              "member 1, step 4 (reduce chunks [3, 4)): folds a rounded or finalized value: "
              "chunk 3 of member 0's result, which holds round[(s3 s0)]");
}

TEST_F(RingTest, FinalizesAPartialSum) {
  Steps(&plan_, 0)[1].finalize = true;
  ExpectFault(plan_,
              "folds a rounded or finalized value: chunk 3 of member 0's scratch 0, which "
              "holds final[(s3 s0)]");
}

TEST_F(RingTest, ReadsWhatNobodyWrites) {
  SetSources(&plan_, &Steps(&plan_, 1)[4],
             {{BufferKind::kScratch, 0, 2}, {BufferKind::kSource, 0, 1}});
  ExpectFault(plan_,
              "member 1, step 4 (reduce chunks [3, 4)): reads chunk 3 of member 2's scratch "
              "0, which may not be written yet");
  ExpectFault(plan_,
              "member 0, step 1 (reduce chunks [3, 4)): nobody reads chunk 3 of member 0's "
              "scratch 0");
}

TEST_F(RingTest, WaitsInACircle) {
  // Everyone waits for its neighbour before the first signal.
  for (int member = 0; member < 4; ++member) Steps(&plan_, member)[0].value = kArrived + 1;
  ExpectFault(plan_,
              "member 2, step 0 (wait for member 1 to reach 2): waits for ever: member 1 "
              "stays at 1, in its step 0");
}

TEST_F(RecursiveDoublingTest, ReusesScratchWhileItIsRead) {
  // With eight blocks there are two slots; every member uses the first for both.
  plan_ = PlanAllReduce(Algorithm::kRecursiveDoubling, 8);
  for (BufferRef& ref : plan_.refs) ref.block = 0;
  ExpectFault(plan_, "writes chunk 0 of member 0's scratch 0 while it may be read by member 2");
}

TEST_F(RecursiveDoublingTest, PartnersFoldInOppositeOrder) {
  // Heads 0 and 3 are partners in the last round.
  std::vector<Step>& steps = Steps(&plan_, 3);
  const auto last = std::find_if(steps.begin(), steps.end(), [](const Step& step) {
    return step.kind == StepKind::kReduce && step.finalize;
  });
  ASSERT_NE(last, steps.end());
  std::vector<BufferRef> sources = Sources(plan_, *last);
  std::reverse(sources.begin(), sources.end());
  SetSources(&plan_, &*last, sources);
  ExpectFault(plan_,
              "member 3's result ends as round[final[((s3 s4) ((s0 s1) s2))]]: another fold "
              "than member 0's round[final[(((s0 s1) s2) (s3 s4))]]");
}

TEST_F(RecursiveDoublingTest, SecondOfABlockFinishesWhileItsResultIsWritten) {
  Delete(&plan_, 1, 0);
  ExpectFault(plan_, "touches a buffer of member 1, which may have finished");
}

TEST(VerifierTest, RefusesWhatIsNoPlan) {
  const Plan right = PlanAllReduce(Algorithm::kDirectOneShot, 3);
  Plan plan = right;
  plan.members = 0;
  ExpectFault(plan, "a plan for 0 members");
  plan = right;
  plan.member.pop_back();
  ExpectFault(plan, "a plan for 3 members with 2 programs");
  plan = right;
  plan.chunk_count = 0;
  ExpectFault(plan, "no chunks");
  plan = right;
  plan.refs[1].member = 3;
  ExpectFault(plan, "ref 1 names no buffer");
  plan = right;
  plan.refs[1].kind = BufferKind::kScratch;
  ExpectFault(plan, "ref 1 names no buffer");
  plan = right;
  plan.member[1].steps[kWaitDone].member = 3;
  ExpectFault(plan, "member 1, step 3 (wait for member 3 to reach 2): no such member");
  plan = right;
  plan.member[1].steps[kReduceAll].source_end = 100;
  ExpectFault(
      plan,
      "member 1, step 1 (reduce chunks [0, 1)): has no destination, or refs that the plan lacks");
  plan = right;
  plan.member[1].steps[0].kind = static_cast<StepKind>(5);
  ExpectFault(plan, "member 1, step 0: of no known kind");
}

TEST(VerifierTest, ListsABoundedNumberOfFaults) {
  Plan plan = PlanAllReduce(Algorithm::kDirectTwoShot, 16);
  for (int member = 0; member < plan.members; ++member) Delete(&plan, member, kWaitArrived);
  const VerifierReport report = VerifyPlan(plan);
  EXPECT_LT(report.faults.size(), 50u);
  EXPECT_NE(report.faults.back().find("more faults"), std::string::npos) << report.faults.back();
}

// A plan that still holds after losing something had a step too many.
TEST(MutationTest, EveryDeletionIsRejected) {
  for (int members = 1; members <= 9; ++members) {
    for (const PlanKey& key : Keys(members, {1, 2})) {
      for (const Mutant& mutant : Deletions(MakePlan(key))) {
        EXPECT_FALSE(VerifyPlan(mutant.plan).ok()) << Text(key) << ": " << mutant.name;
      }
    }
  }
}

// Where processes hold several members, or sends wait for readers, one member
// learns of another in several ways, so that some waits can be spared.
bool SparesNoWait(const PlanKey& key) {
  return key.placement->processes == key.members && key.algorithm != Algorithm::kRendezvous;
}

void RejectAcross(std::vector<Mutant> (*mutants)(const Plan&)) {
  for (int members = 2; members <= 4; ++members) {
    for (const PlanKey& key : KeysAcross(members)) {
      for (const Mutant& mutant : mutants(MakePlan(key))) {
        const bool about_waits = mutant.kind == StepKind::kWait ||
                                 mutant.name.find("after the next") != std::string::npos;
        if (about_waits && !SparesNoWait(key)) continue;
        EXPECT_FALSE(VerifyPlan(mutant.plan).ok()) << Text(key) << ": " << mutant.name;
      }
    }
  }
}

TEST(MutationTest, EveryDeletionAcrossProcessesIsRejected) { RejectAcross(Deletions); }

TEST(MutationTest, EveryAlterationAcrossProcessesIsRejected) { RejectAcross(Alterations); }

TEST(MutationTest, EveryAlterationIsRejected) {
  for (int members = 2; members <= 6; ++members) {
    for (const PlanKey& key : Keys(members, {1, 2})) {
      for (const Mutant& mutant : Alterations(MakePlan(key))) {
        EXPECT_FALSE(VerifyPlan(mutant.plan).ok()) << Text(key) << ": " << mutant.name;
      }
    }
  }
}

}  // namespace
}  // namespace dfccl
