// SPDX-License-Identifier: Apache-2.0
// ParkingLot: calls to its sleeper, and, with the condition variable that the
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
  int wakes_of_one = 0;
  int wakes_of_all = 0;
} calls;

struct CountingSleeper {
  void SleepWhileEqual(const Atomic<uint32_t>& word, uint32_t value) {
    ++(word.LoadSeqCst() == value ? calls.sleeps : calls.returns);
  }
  void WakeOne() { ++calls.wakes_of_one; }
  void WakeAll() { ++calls.wakes_of_all; }
};

TEST(ParkingLotTest, NotifyDoesNothingWhenNobodyWaits) {
  calls = {};
  ParkingLot<CountingSleeper> parking;
  parking.NotifyOne();
  parking.NotifyAll();
  parking.PrepareWait();
  parking.CancelWait();
  parking.NotifyOne();
  EXPECT_EQ(calls.wakes_of_one, 0);
  EXPECT_EQ(calls.wakes_of_all, 0);
}

TEST(ParkingLotTest, NotificationAfterPrepareEndsTheWait) {
  calls = {};
  ParkingLot<CountingSleeper> parking;
  parking.CommitWait(parking.PrepareWait());
  EXPECT_EQ(calls.sleeps, 1);
  const uint32_t epoch = parking.PrepareWait();
  parking.NotifyOne();
  EXPECT_EQ(calls.wakes_of_one, 1);
  parking.CommitWait(epoch);
  EXPECT_EQ(calls.returns, 1);
  parking.PrepareWait();
  parking.NotifyAll();
  EXPECT_EQ(calls.wakes_of_all, 1);
}

// One producer, two workers. A lost wake-up ends the test by the test runner's
// limit: the producer waits for each burst to be handled.
TEST(ParkingLotStress, NoWakeUpIsLost) {
  constexpr int kBursts = 2000;
  const uint32_t seed = StressSeed();
  ParkingLot<CondvarSleeper> parking;
  BoundedQueue<int> queue(8);
  std::atomic<int> handled{0};
  Atomic<uint32_t> stop;
  std::vector<std::thread> workers;
  for (int worker = 0; worker < 2; ++worker) {
    workers.emplace_back([&] {
      const auto try_handle = [&] {
        int entry;
        if (!queue.TryPop(&entry)) return false;
        ++handled;
        return true;
      };
      for (;;) {
        if (try_handle()) continue;
        const uint32_t epoch = parking.PrepareWait();
        if (try_handle()) {
          parking.CancelWait();
        } else if (stop.LoadSeqCst() != 0) {
          parking.CancelWait();
          return;
        } else {
          parking.CommitWait(epoch);
        }
      }
    });
  }
  std::minstd_rand random(seed);
  int pushed = 0;
  for (int burst = 0; burst < kBursts; ++burst) {
    for (uint32_t i = 0; i <= random() % 3; ++i, ++pushed) {
      while (!queue.TryPush(burst)) std::this_thread::yield();
      parking.NotifyOne();
    }
    while (handled.load() < pushed) std::this_thread::yield();
  }
  stop.StoreSeqCst(1);
  parking.NotifyAll();
  for (std::thread& worker : workers) worker.join();
  EXPECT_EQ(handled.load(), pushed);
}

}  // namespace
}  // namespace dfccl
