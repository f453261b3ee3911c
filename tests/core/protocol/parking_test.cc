// SPDX-License-Identifier: Apache-2.0
// ParkingSpot: calls to its sleeper, and, with the condition variable that the
// daemon uses, workers that sleep and wake.
#include "core/protocol/parking.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "core/daemon/condvar_sleeper.h"
#include "core/protocol/bounded_queue.h"
#include "tests/core/protocol/stress.h"

namespace dfccl {
namespace {

struct Calls {
  int sleeps = 0;  // that would have blocked
  int returns = 0;
  int wakes = 0;
} calls;

struct CountingSleeper {
  void SleepUntilEqual(const Atomic<uint32_t>& word, uint32_t value) {
    ++(word.LoadSeqCst() != value ? calls.sleeps : calls.returns);
  }
  void Wake() { ++calls.wakes; }
};

TEST(ParkingSpotTest, NobodyCanBeClaimedWhoIsAwake) {
  ParkingSpot<CountingSleeper> spot;
  EXPECT_FALSE(spot.TryClaim());
  spot.Prepare();
  spot.Cancel();
  EXPECT_FALSE(spot.TryClaim());
  spot.Prepare();
  EXPECT_TRUE(spot.TryClaim());
  spot.Wake();
  spot.SleepUntilWoken();
  EXPECT_FALSE(spot.TryClaim());
}

TEST(ParkingSpotTest, AWakeAfterPrepareEndsTheSleep) {
  calls = {};
  ParkingSpot<CountingSleeper> spot;
  spot.Prepare();
  spot.SleepUntilWoken();
  EXPECT_EQ(calls.sleeps, 1);
  EXPECT_TRUE(spot.TryClaim());
  spot.SleepUntilWoken();
  EXPECT_EQ(calls.sleeps, 2);
  spot.Wake();
  EXPECT_EQ(calls.wakes, 1);
  spot.SleepUntilWoken();
  EXPECT_EQ(calls.returns, 1);
}

TEST(ParkingSpotTest, WhoFindsWorkAfterAllWaitsForItsClaimer) {
  calls = {};
  ParkingSpot<CountingSleeper> spot;
  spot.Prepare();
  spot.Cancel();
  EXPECT_EQ(calls.sleeps, 0);
  spot.Prepare();
  EXPECT_TRUE(spot.TryClaim());
  spot.Cancel();
  EXPECT_EQ(calls.sleeps, 1);
}

TEST(ParkingSpotTest, OneClaimsAThread) {
  ParkingSpot<CountingSleeper> spot;
  spot.Prepare();
  EXPECT_TRUE(spot.TryClaim());
  EXPECT_FALSE(spot.TryClaim());
  spot.Wake();
  spot.SleepUntilWoken();
  spot.Prepare();
  EXPECT_TRUE(spot.TryClaim());
}

// One producer, two workers. A lost wake-up ends the test by the test runner's
// limit: the producer waits for each burst to be handled.
TEST(ParkingSpotStress, NoWakeUpIsLost) {
  constexpr int kBursts = 2000;
  const uint32_t seed = StressSeed();
  constexpr int kWorkers = 2;
  ParkingSpot<CondvarSleeper> spots[kWorkers];
  const auto wake_one = [&spots] {
    for (ParkingSpot<CondvarSleeper>& spot : spots) {
      if (!spot.TryClaim()) continue;
      spot.Wake();
      return true;
    }
    return false;
  };
  BoundedQueue<int> queue(8);
  std::atomic<int> handled{0};
  Atomic<uint32_t> stop;
  std::vector<std::thread> workers;
  for (ParkingSpot<CondvarSleeper>& spot : spots) {
    workers.emplace_back([&] {
      const auto try_handle = [&] {
        int entry;
        if (!queue.TryPop(&entry)) return false;
        ++handled;
        return true;
      };
      for (;;) {
        if (try_handle()) continue;
        spot.Prepare();
        if (try_handle()) {
          spot.Cancel();
        } else if (stop.LoadSeqCst() != 0) {
          return;
        } else {
          spot.SleepUntilWoken();
        }
      }
    });
  }
  std::minstd_rand random(seed);
  int pushed = 0;
  for (int burst = 0; burst < kBursts; ++burst) {
    for (uint32_t i = 0; i <= random() % 3; ++i, ++pushed) {
      while (!queue.TryPush(burst)) std::this_thread::yield();
      wake_one();
    }
    while (handled.load() < pushed) std::this_thread::yield();
  }
  stop.StoreSeqCst(1);
  while (wake_one()) {
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_EQ(handled.load(), pushed);
}

}  // namespace
}  // namespace dfccl
