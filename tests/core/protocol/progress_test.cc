// SPDX-License-Identifier: Apache-2.0
// ProgressWord and SleepWord: who wakes whom, alone and under threads.
#include "core/protocol/progress.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <thread>

#include "tests/core/protocol/stress.h"

namespace dfccl {
namespace {

constexpr uint32_t kMost = ~uint32_t{0};

TEST(ProgressWordTest, ReachesWhatWasSignalled) {
  ProgressWord progress;
  EXPECT_TRUE(progress.Reached(0));
  for (uint32_t value : {uint32_t{1}, (uint32_t{1} << 31) - 1, uint32_t{1} << 31, kMost}) {
    EXPECT_FALSE(progress.Reached(value));
    EXPECT_FALSE(progress.ReachedSeqCst(value));
    progress.Signal(value);
    EXPECT_TRUE(progress.Reached(value));
    EXPECT_TRUE(progress.ReachedSeqCst(value));
    EXPECT_TRUE(progress.Reached(value - 1));
    EXPECT_EQ(progress.value(), value);
  }
}

TEST(SleepWordTest, StaysAwakeWhenTheSecondLookIsReady) {
  SleepWord sleep;
  EXPECT_FALSE(sleep.TrySleep(3, 2, [] { return true; }));
  EXPECT_FALSE(sleep.TryWake(3, 2));
  EXPECT_FALSE(sleep.TryWakeAny());
}

TEST(SleepWordTest, OnlyTheAwaitedProgressWakesAndOnlyOnce) {
  // Members and values at the edges of their fields.
  for (uint16_t member : {uint16_t{0}, uint16_t{1}, uint16_t{0x7fff}, uint16_t{0xfffe}}) {
    for (uint32_t value : {uint32_t{1}, uint32_t{1} << 31, kMost}) {
      SleepWord sleep;
      uint16_t peeked_member;
      uint32_t peeked_value;
      EXPECT_FALSE(sleep.TryWake(member, value)) << "awake";
      EXPECT_FALSE(sleep.Peek(&peeked_member, &peeked_value));
      ASSERT_TRUE(sleep.TrySleep(member, value, [] { return false; }));
      ASSERT_TRUE(sleep.Peek(&peeked_member, &peeked_value));
      EXPECT_EQ(peeked_member, member);
      EXPECT_EQ(peeked_value, value);
      EXPECT_FALSE(sleep.TryWake(static_cast<uint16_t>(member + 1), kMost)) << "another member";
      EXPECT_FALSE(sleep.TryWake(member, value - 1)) << "not yet";
      EXPECT_TRUE(sleep.TryWake(member, value));
      EXPECT_FALSE(sleep.TryWake(member, value)) << "awake again";
      EXPECT_FALSE(sleep.TryWakeAny());
    }
  }
}

TEST(SleepWordTest, AnyoneMayEndTheSleep) {
  SleepWord sleep;
  ASSERT_TRUE(sleep.TrySleep(0, 1, [] { return false; }));
  EXPECT_TRUE(sleep.TryWakeAny());
  EXPECT_FALSE(sleep.TryWake(0, 1));
}

TEST(SleepWordTest, SleepsWhenThePeerTakesTheWordDuringTheSecondLook) {
  SleepWord sleep;
  int wakes = 0;
  EXPECT_TRUE(sleep.TrySleep(0, 1, [&] {
    wakes += sleep.TryWake(0, 1) ? 1 : 0;
    return true;
  }));
  EXPECT_EQ(wakes, 1);
}

// Two threads follow each other step by step, always asleep if they can be; a
// lost wake-up ends the test by the test runner's limit.
TEST(SleepWordStress, NoWakeUpIsLostOrDoubled) {
  constexpr uint32_t kSteps = 20000;
  const uint32_t seed = StressSeed();
  struct Member {
    ProgressWord progress;
    SleepWord sleep;
    std::atomic<int> wakes{0};
    uint64_t data = 0;  // guarded by `progress`
  };
  Member members[2];
  std::atomic<int> faults{0};
  const auto run = [&](uint16_t self) {
    RandomPause pause(seed + self);
    Member& mine = members[self];
    const uint16_t other = 1 - self;
    Member& peer = members[other];
    for (uint32_t step = 1; step <= kSteps; ++step) {
      mine.data += step;
      mine.progress.Signal(2 * step - 1);
      if (peer.sleep.TryWake(self, 2 * step - 1)) ++peer.wakes;
      pause();
      for (uint32_t value : {2 * step - 1, 2 * step}) {
        if (mine.sleep.TrySleep(other, value, [&] { return peer.progress.ReachedSeqCst(value); })) {
          while (mine.wakes.load() == 0) std::this_thread::yield();
          if (mine.wakes.fetch_sub(1) != 1) ++faults;
        }
        if (!peer.progress.Reached(value)) ++faults;
        if (value % 2 == 1) {
          if (peer.data != uint64_t{step} * (step + 1) / 2) ++faults;
          mine.progress.Signal(2 * step);
          if (peer.sleep.TryWake(self, 2 * step)) ++peer.wakes;
        }
      }
    }
  };
  std::thread first(run, uint16_t{0});
  std::thread second(run, uint16_t{1});
  first.join();
  second.join();
  EXPECT_EQ(faults.load(), 0);
  EXPECT_EQ(members[0].wakes.load() + members[1].wakes.load(), 0);
}

}  // namespace
}  // namespace dfccl
