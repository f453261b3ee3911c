// SPDX-License-Identifier: Apache-2.0
// BoundedQueue at its boundaries (empty, full, wrapping positions) and under
// threads.
#include "core/protocol/bounded_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "tests/core/protocol/stress.h"

namespace dfccl {
namespace {

struct Entry {
  uint64_t value;
  uint64_t complement;
};

class FirstPosition : public testing::TestWithParam<uint64_t> {};

TEST_P(FirstPosition, FillsAndEmptiesInOrderAcrossTheWrap) {
  for (uint64_t capacity : {1, 2, 8}) {
    BoundedQueue<Entry> queue(capacity, GetParam());
    EXPECT_EQ(queue.capacity(), capacity);
    uint64_t pushed = 0;
    uint64_t popped = 0;
    for (uint64_t round = 0; round < 4 * capacity; ++round) {
      // Different amounts, so that every slot is at some time the first.
      const uint64_t amount = round % (capacity + 1);
      for (uint64_t i = 0; i < amount; ++i, ++pushed) {
        ASSERT_TRUE(queue.TryPush({pushed, ~pushed}));
        EXPECT_EQ(queue.ApproxSize(), i + 1);
      }
      ASSERT_EQ(queue.TryPush({0, 0}), amount < capacity);
      if (amount < capacity) ++pushed;  // the extra entry, all zeros
      Entry entry;
      for (; popped < pushed; ++popped) {
        ASSERT_TRUE(queue.TryPop(&entry));
        const bool extra = amount < capacity && popped + 1 == pushed;
        EXPECT_EQ(entry.value, extra ? 0 : popped);
        EXPECT_EQ(entry.complement, extra ? 0 : ~popped);
      }
      ASSERT_FALSE(queue.TryPop(&entry));
      EXPECT_EQ(queue.ApproxSize(), 0u);
    }
  }
}

// Positions, and the doubled positions in the slots, pass the edges of 32 and
// 64 bits.
INSTANTIATE_TEST_SUITE_P(Edges, FirstPosition,
                         testing::Values(0, (uint64_t{1} << 31) - 2, (uint64_t{1} << 32) - 2,
                                         (uint64_t{1} << 62) - 2, (uint64_t{1} << 63) - 2,
                                         ~uint64_t{0} - 1, ~uint64_t{0}));

TEST(BoundedQueueTest, EveryPayloadValueIsAllowed) {
  BoundedQueue<uint64_t> queue(2);
  for (uint64_t value : {uint64_t{0}, ~uint64_t{0}, uint64_t{1} << 63, uint64_t{1}}) {
    uint64_t popped = ~value;
    ASSERT_TRUE(queue.TryPush(value));
    ASSERT_TRUE(queue.TryPop(&popped));
    EXPECT_EQ(popped, value);
  }
}

// `consumers` threads take what `producers` threads bring: all of it, once, and
// the entries of one producer in order.
void Stress(int producers, int consumers, uint64_t capacity, uint64_t first_position) {
  constexpr uint64_t kEach = 20000;
  const uint64_t total = kEach * static_cast<uint64_t>(producers);
  const uint32_t seed = StressSeed();
  BoundedQueue<Entry> queue(capacity, first_position);
  std::atomic<uint64_t> taken{0};
  std::vector<std::vector<uint64_t>> taken_by(consumers);
  std::vector<std::thread> threads;
  for (int producer = 0; producer < producers; ++producer) {
    threads.emplace_back([&, producer] {
      RandomPause pause(seed + static_cast<uint32_t>(producer));
      for (uint64_t i = 0; i < kEach; ++i) {
        const uint64_t value = kEach * static_cast<uint64_t>(producer) + i;
        while (!queue.TryPush({value, ~value})) std::this_thread::yield();
        pause();
      }
    });
  }
  for (int consumer = 0; consumer < consumers; ++consumer) {
    threads.emplace_back([&, consumer] {
      RandomPause pause(seed - 1 - static_cast<uint32_t>(consumer));
      while (taken.load() < total) {
        Entry entry;
        if (!queue.TryPop(&entry)) {
          std::this_thread::yield();
          continue;
        }
        ++taken;
        taken_by[consumer].push_back(entry.complement == ~entry.value ? entry.value : total);
        pause();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();

  std::vector<int> count(total);
  for (const std::vector<uint64_t>& values : taken_by) {
    std::vector<uint64_t> next(producers);
    for (uint64_t value : values) {
      ASSERT_LT(value, total) << "torn entry";
      ++count[value];
      uint64_t& least = next[value / kEach];
      ASSERT_GE(value % kEach, least);
      least = value % kEach + 1;
    }
  }
  for (uint64_t value = 0; value < total; ++value) ASSERT_EQ(count[value], 1) << value;
  EXPECT_EQ(queue.ApproxSize(), 0u);
}

TEST(BoundedQueueStress, TwoProducersOneConsumer) { Stress(2, 1, 4, 0); }
TEST(BoundedQueueStress, OneProducerTwoConsumers) { Stress(1, 2, 64, 0); }
TEST(BoundedQueueStress, TwoProducersTwoConsumersOneSlot) { Stress(2, 2, 1, 0); }
TEST(BoundedQueueStress, AcrossTheWrapOfPositions) { Stress(2, 2, 8, ~uint64_t{0} - 10000); }

}  // namespace
}  // namespace dfccl
