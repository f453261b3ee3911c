// SPDX-License-Identifier: Apache-2.0
// Values: every plan, group size and message size; buffers that the
// runtime owns; queues that are full; counters that pass powers of two.
#include "core/runtime.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/core/daemon/harness.h"

namespace dfccl {
namespace testing {
namespace {

class ForcedPlanTest : public RuntimeTest, public ::testing::WithParamInterface<const char*> {};

TEST_P(ForcedPlanTest, SumsOnEveryMember) {
  Start(Forcing(GetParam()));
  for (int members : {1, 2, 3, 5, 8, 16, 64}) {
    for (int64_t count : {0, 1, 7, 1000, 100003}) {
      if (members == 64 && count > 1000) count = 5003;
      SCOPED_TRACE(std::to_string(members) + " members, " + std::to_string(count) + " elements");
      RunOnce(Make(Devices(members), count));
    }
  }
}

TEST_P(ForcedPlanTest, SumsWithOneThreadPerMember) {
  Start(Forcing(GetParam()));
  for (int members : {2, 5, 8}) {
    for (int64_t count : {1, 1000, 300007}) {
      const Instance instance = Make(Devices(members), count);
      std::vector<std::thread> threads;
      for (int i = 0; i < members; ++i) {
        threads.emplace_back([&instance, i] {
          Part part(instance, i);
          part.Submit();
          part.AwaitValues();
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
  }
}

TEST_P(ForcedPlanTest, SumsInPlaceOnSomeOrAllMembers) {
  Start(Forcing(GetParam()));
  for (int members : {1, 2, 5, 8}) {
    for (int64_t count : {1, 1000, 100003}) {
      for (int every : {1, 2}) {
        const Instance instance = Make(Devices(members), count);
        std::vector<std::unique_ptr<Part>> parts;
        for (int i = 0; i < members; ++i) {
          parts.push_back(std::make_unique<Part>(instance, i));
          Submission submission = parts.back()->MakeSubmission();
          if (i % every == 0) {
            parts.back()->result() = parts.back()->source();
            submission.source = submission.result;
          }
          parts.back()->Submit(submission);
        }
        for (auto& part : parts) part->AwaitValues();
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, ForcedPlanTest,
                         ::testing::Values("", "direct_flat", "direct_one_shot", "direct_two_shot",
                                           "ring", "ring:8", "recursive_doubling"));

// The plan a report tells is the one that rules want; it does not change under members.
TEST_F(RuntimeTest, OtherPlanRules) {
  Start(Forcing("ring"));
  Runtime& runtime = Runtime::Get();
  RunOnce(Make(Devices(4), 1000));
  EXPECT_EQ(runtime.Report().recent.front().plan, "ring");
  const uint64_t hash = runtime.PlanRulesHash();

  const Instance instance = Make(Devices(2), 1000);
  Part a(instance, 0), b(instance, 1);
  a.Submit();
  const std::vector<PlanRule> rules = Forcing("direct_one_shot").plan_rules;
  EXPECT_FALSE(runtime.SetPlanRules(rules));
  EXPECT_EQ(runtime.PlanRulesHash(), hash);
  EXPECT_EQ(runtime.Report().in_flight.front().plan, "ring");
  b.Submit();
  a.AwaitValues();
  b.AwaitValues();

  EXPECT_TRUE(runtime.SetPlanRules(rules));
  EXPECT_NE(runtime.PlanRulesHash(), hash);
  RunOnce(Make(Devices(4), 1000));
  EXPECT_EQ(runtime.Report().recent.front().plan, "direct_one_shot");
  RunOnce(Make(Devices(300), 10));
}

TEST_F(RuntimeTest, LargeGroup) { RunOnce(Make(Devices(300), 1000)); }

TEST_F(RuntimeTest, StagedSourceMayChangeAfterSubmission) {
  const Instance instance = Make(Devices(3), 1000);
  std::vector<std::unique_ptr<Part>> parts;
  for (int i = 0; i < 3; ++i) {
    parts.push_back(std::make_unique<Part>(instance, i));
    Submission submission = parts.back()->MakeSubmission();
    submission.stage_source = true;
    parts.back()->Submit(submission);
    std::fill(parts.back()->source().begin(), parts.back()->source().end(), 1e9f);
  }
  for (auto& part : parts) part->AwaitValues();
}

TEST_F(RuntimeTest, OwnedResultIsCollected) {
  const Instance instance = Make(Devices(4), 1001);
  std::vector<std::unique_ptr<Part>> parts;
  for (int i = 0; i < 4; ++i) {
    parts.push_back(std::make_unique<Part>(instance, i));
    Submission submission = parts.back()->MakeSubmission();
    submission.result = nullptr;
    parts.back()->Submit(submission);
  }
  for (auto& part : parts) {
    ASSERT_TRUE(part->WaitFor(kLimit));
    Runtime::Get().Collect(part->operation(), part->result().data());
    for (int64_t i = 0; i < 1001; ++i) ASSERT_EQ(part->result()[i], instance.Expected(i));
  }
}

TEST_F(RuntimeTest, MeanAndNarrowTypes) {
  // 512 times 1 in bf16: a sum rounded to bf16 on the way would stick at 256.
  const int members = 512;
  const Group* group = Runtime::Get().InternGroup(Devices(members));
  std::vector<uint16_t> source(3, 0x3f80);  // 1.0
  std::vector<std::vector<uint16_t>> results(members, std::vector<uint16_t>(3));
  std::vector<Operation*> operations;
  for (int i = 0; i < members; ++i) {
    Submission submission;
    submission.device = i;
    submission.group = group;
    submission.member = i;
    submission.id = {1, 2};
    submission.signature = {Kind::kAllReduce, ReduceOp::kSum, DType::kBF16, 3};
    submission.source = source.data();
    submission.result = results[i].data();
    operations.push_back(Runtime::Get().Submit(submission));
  }
  for (int i = 0; i < members; ++i) {
    Status status;
    while (!Runtime::Get().Finished(operations[i], &status)) std::this_thread::yield();
    ASSERT_TRUE(status.ok()) << status.message();
    Runtime::Get().Release(operations[i]);
    EXPECT_EQ(results[i], std::vector<uint16_t>(3, 0x4400)) << i;  // 512.0
  }
}

// One thread starts everything on device 0, then on device 1 in reverse: all of
// it is in flight at once, through a queue of four entries.
TEST_F(RuntimeTest, ManyInFlightThroughASmallQueue) {
  InternalOptions internal;
  internal.queue_capacity = 4;
  SetInternalOptions(internal);
  Start(RuntimeOptions());
  const int kOperations = 100'000;
  std::vector<std::unique_ptr<Part>> first, second;
  std::vector<Instance> instances;
  for (int i = 0; i < kOperations; ++i) {
    instances.push_back(Make({0, 1}, 2));
    first.push_back(std::make_unique<Part>(instances.back(), 0));
    first.back()->Submit();
  }
  EXPECT_EQ(Runtime::Get().Report().in_flight.size(), static_cast<size_t>(kOperations));
  for (int i = kOperations - 1; i >= 0; --i) {
    second.push_back(std::make_unique<Part>(instances[i], 1));
    second.back()->Submit();
  }
  for (auto& part : first) part->AwaitValues();
  for (auto& part : second) part->AwaitValues();
  EXPECT_GT(Sum(Runtime::Get().Report()).preemptions, 0u);
}

// The queue stays full because another thread holds the daemon for long.
TEST_F(RuntimeTest, FullQueueWhileTheDaemonIsBusy) {
  InternalOptions internal;
  internal.queue_capacity = 2;
  SetInternalOptions(internal);
  Start(RuntimeOptions());
  std::vector<std::thread> threads;
  const Group* group = Runtime::Get().InternGroup({0, 1});
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t, group] {
      for (int i = 0; i < 200; ++i) {
        const Instance instance = {group, uint64_t{1} << 40 | static_cast<uint64_t>(t) << 20 | i,
                                   i % 20 == 0 ? 200'000 : 3};
        Part a(instance, 0), b(instance, 1);
        a.Submit();
        b.Submit();
        a.AwaitValues();
        b.AwaitValues();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(RuntimeTest, SequencesPassPowersOfTwo) {
  for (uint64_t first : {(uint64_t{1} << 31) - 5, (uint64_t{1} << 32) - 5, (uint64_t{1} << 63) - 5,
                         uint64_t{0} - 5}) {
    RuntimeOptions options;
    options.first_sequence = first;
    InternalOptions internal;
    internal.queue_capacity = 4;
    SetInternalOptions(internal);
    Start(options);
    for (int i = 0; i < 20; ++i) RunOnce(Make(Devices(4), 10));
    const FlightReport report = Runtime::Get().Report();
    ASSERT_FALSE(report.recent.empty());
    EXPECT_EQ(report.recent.front().sequence, first + 19);
    EXPECT_EQ(Sum(report).submitted, 80u);
    EXPECT_EQ(Sum(report).completed, 80u);
  }
}

TEST_F(RuntimeTest, GetAfterShutdownStartsAfresh) {
  RunOnce(Make(Devices(2), 5));
  Runtime::Shutdown();
  RunOnce(Make(Devices(2), 5));
  EXPECT_EQ(Sum(Runtime::Get().Report()).submitted, 2u);
}

TEST_F(RuntimeTest, ShutdownEndsWhatIsPending) {
  Part part(Make(Devices(2), 5), 0);
  part.Submit();
  part.Watch();
  Runtime& runtime = Runtime::Get();
  Runtime::Shutdown();
  ASSERT_TRUE(part.WaitFor(kLimit));
  Status status;
  ASSERT_TRUE(runtime.Finished(part.operation(), &status));
  EXPECT_EQ(status.code(), StatusCode::kAborted);
}

}  // namespace
}  // namespace testing
}  // namespace dfccl
