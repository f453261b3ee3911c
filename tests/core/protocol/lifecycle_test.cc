// SPDX-License-Identifier: Apache-2.0
// Lifecycle: every transition, and quit and restart under threads.
#include "core/protocol/lifecycle.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "core/protocol/bounded_queue.h"
#include "tests/core/protocol/stress.h"

namespace dfccl {
namespace {

using State = Lifecycle::State;

TEST(LifecycleTest, ScheduleRunPark) {
  Lifecycle lifecycle;
  EXPECT_EQ(lifecycle.state(), State::kParked);
  EXPECT_TRUE(lifecycle.Schedule());
  EXPECT_EQ(lifecycle.state(), State::kScheduled);
  EXPECT_FALSE(lifecycle.Schedule()) << "it is on the run queue already";
  EXPECT_TRUE(lifecycle.TryBeginRun());
  EXPECT_EQ(lifecycle.state(), State::kRunning);
  EXPECT_TRUE(lifecycle.TryPark());
  EXPECT_EQ(lifecycle.state(), State::kParked);
}

TEST(LifecycleTest, ScheduleWhileRunningMakesTheDriverLookAgain) {
  Lifecycle lifecycle;
  ASSERT_TRUE(lifecycle.TryClaim());
  EXPECT_FALSE(lifecycle.Schedule());
  EXPECT_EQ(lifecycle.state(), State::kRunningDirty);
  EXPECT_FALSE(lifecycle.TryPark());
  EXPECT_EQ(lifecycle.state(), State::kRunning);
  EXPECT_TRUE(lifecycle.TryPark());
}

TEST(LifecycleTest, FailedClaimMakesTheDriverLookAgain) {
  Lifecycle lifecycle;
  ASSERT_TRUE(lifecycle.TryClaim());
  EXPECT_FALSE(lifecycle.TryClaim());
  EXPECT_FALSE(lifecycle.TryPark());
  EXPECT_TRUE(lifecycle.TryPark());
}

TEST(LifecycleTest, RescheduleGoesThroughTheRunQueue) {
  Lifecycle lifecycle;
  ASSERT_TRUE(lifecycle.TryClaim());
  EXPECT_TRUE(lifecycle.Reschedule());
  EXPECT_EQ(lifecycle.state(), State::kScheduled);
  EXPECT_TRUE(lifecycle.TryBeginRun());
  EXPECT_FALSE(lifecycle.Schedule());
  EXPECT_TRUE(lifecycle.Reschedule()) << "dirty or not, it has left the run queue";
}

TEST(LifecycleTest, ClaimWhileOnTheRunQueueLeavesAStaleEntry) {
  Lifecycle lifecycle;
  ASSERT_TRUE(lifecycle.Schedule());
  EXPECT_TRUE(lifecycle.TryClaim());
  EXPECT_EQ(lifecycle.state(), State::kRunning);
  EXPECT_FALSE(lifecycle.TryBeginRun()) << "somebody drives: the entry is dropped";
  EXPECT_TRUE(lifecycle.TryPark());
  EXPECT_TRUE(lifecycle.Schedule()) << "the entry is gone";
}

TEST(LifecycleTest, StaleEntryServesTheNextSchedule) {
  Lifecycle lifecycle;
  ASSERT_TRUE(lifecycle.Schedule());
  ASSERT_TRUE(lifecycle.TryClaim());
  ASSERT_TRUE(lifecycle.TryPark());
  EXPECT_FALSE(lifecycle.Schedule()) << "the old entry is still on the run queue";
  EXPECT_EQ(lifecycle.state(), State::kScheduled);
  EXPECT_TRUE(lifecycle.TryBeginRun());
  EXPECT_TRUE(lifecycle.TryPark());
}

TEST(LifecycleTest, StaleEntryServesReschedule) {
  Lifecycle lifecycle;
  ASSERT_TRUE(lifecycle.Schedule());
  ASSERT_TRUE(lifecycle.TryClaim());
  EXPECT_FALSE(lifecycle.Reschedule());
  EXPECT_TRUE(lifecycle.TryBeginRun());
}

TEST(LifecycleTest, StaleEntryOfAParkedDaemonIsDropped) {
  Lifecycle lifecycle;
  ASSERT_TRUE(lifecycle.Schedule());
  ASSERT_TRUE(lifecycle.TryClaim());
  ASSERT_TRUE(lifecycle.TryPark());
  EXPECT_FALSE(lifecycle.TryBeginRun());
  EXPECT_EQ(lifecycle.state(), State::kParked);
  EXPECT_TRUE(lifecycle.Schedule());
}

// Two submitters, one of them willing to drive, and a worker; the test ends only
// if no submission is lost. `sum` has no lock: only the lifecycle guards it.
TEST(LifecycleStress, NoSubmissionIsLost) {
  constexpr uint64_t kEach = 20000;
  constexpr uint64_t kTotal = 2 * kEach;
  const uint32_t seed = StressSeed();
  Lifecycle lifecycle;
  BoundedQueue<uint64_t> submissions(64);
  BoundedQueue<Lifecycle*> run_queue(1);
  uint64_t sum = 0;
  std::atomic<uint64_t> handled{0};
  std::atomic<bool> run_queue_was_full{false};

  const auto put_on_run_queue = [&] {
    if (!run_queue.TryPush(&lifecycle)) run_queue_was_full = true;
  };
  const auto drive = [&] {
    for (int budget = 8;;) {
      uint64_t value;
      if (submissions.TryPop(&value)) {
        sum += value;
        ++handled;
        if (--budget == 0) {
          if (lifecycle.Reschedule()) put_on_run_queue();
          return;
        }
      } else if (lifecycle.TryPark()) {
        return;
      }
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t submitter = 0; submitter < 2; ++submitter) {
    threads.emplace_back([&, submitter] {
      RandomPause pause(seed + static_cast<uint32_t>(submitter));
      for (uint64_t i = 0; i < kEach; ++i) {
        while (!submissions.TryPush(kEach * submitter + i)) std::this_thread::yield();
        if (submitter == 0) {
          if (lifecycle.Schedule()) put_on_run_queue();
        } else if (lifecycle.TryClaim()) {
          drive();
        }
        pause();
      }
    });
  }
  threads.emplace_back([&] {
    while (handled.load() < kTotal) {
      Lifecycle* popped;
      if (!run_queue.TryPop(&popped)) {
        std::this_thread::yield();
      } else if (popped->TryBeginRun()) {
        drive();
      }
    }
  });
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(run_queue_was_full.load());
  EXPECT_EQ(sum, kTotal * (kTotal - 1) / 2);
}

}  // namespace
}  // namespace dfccl
