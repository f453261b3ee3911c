// SPDX-License-Identifier: Apache-2.0
// The ring between one producer and one consumer: empty, full, wrapped, and under load.
#include "core/protocol/spsc_queue.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <thread>

#include "tests/core/protocol/stress.h"

namespace dfccl {
namespace {

constexpr uint64_t kCapacity = 4;

struct Ring {
  explicit Ring(uint64_t first) {
    ends.pushed.StoreRelaxed(first);
    ends.popped.StoreRelaxed(first);
  }
  SpscEnds ends;
  Plain<uint64_t> slots[kCapacity];
};

TEST(SpscQueueTest, IsFullAndEmptyWhereItSaysSo) {
  for (uint64_t first : {uint64_t{0}, ~uint64_t{0} - 1, uint64_t{1} << 32}) {
    Ring ring(first);
    SpscProducer<uint64_t> producer(&ring.ends, ring.slots, kCapacity);
    SpscConsumer<uint64_t> consumer(&ring.ends, ring.slots, kCapacity);
    uint64_t entry = 77;
    for (int lap = 0; lap < 3; ++lap) {
      EXPECT_FALSE(consumer.TryPop(&entry));
      for (uint64_t i = 0; i < kCapacity; ++i) EXPECT_TRUE(producer.TryPush(~i));
      EXPECT_FALSE(producer.TryPush(5));
      for (uint64_t i = 0; i < kCapacity; ++i) {
        ASSERT_TRUE(consumer.TryPop(&entry));
        EXPECT_EQ(entry, ~i);
      }
    }
    EXPECT_FALSE(consumer.TryPop(&entry));
  }
}

TEST(SpscQueueTest, AConsumerMadeAnewGoesOn) {
  Ring ring(0);
  SpscProducer<uint64_t> producer(&ring.ends, ring.slots, kCapacity);
  for (uint64_t i = 0; i < 20; ++i) {
    ASSERT_TRUE(producer.TryPush(i));
    SpscConsumer<uint64_t> consumer(&ring.ends, ring.slots, kCapacity);
    uint64_t entry = 77;
    ASSERT_TRUE(consumer.TryPop(&entry));
    EXPECT_EQ(entry, i);
  }
}

TEST(SpscQueueTest, KeepsOrderUnderLoad) {
  constexpr uint64_t kEntries = 200'000;
  Ring ring(~uint64_t{0} - 1000);
  const uint32_t seed = StressSeed();
  std::thread pushing([&] {
    RandomPause pause(seed);
    SpscProducer<uint64_t> producer(&ring.ends, ring.slots, kCapacity);
    for (uint64_t i = 0; i < kEntries; ++i) {
      while (!producer.TryPush(i)) std::this_thread::yield();
      pause();
    }
  });
  RandomPause pause(seed + 1);
  SpscConsumer<uint64_t> consumer(&ring.ends, ring.slots, kCapacity);
  for (uint64_t i = 0; i < kEntries; ++i) {
    uint64_t entry = ~i;
    while (!consumer.TryPop(&entry)) std::this_thread::yield();
    ASSERT_EQ(entry, i);
    pause();
  }
  pushing.join();
}

}  // namespace
}  // namespace dfccl
