// SPDX-License-Identifier: Apache-2.0
// The words of a ring of bytes: what is whose, who must ring, what is refused.
#include "core/protocol/byte_ring.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "tests/core/protocol/stress.h"

namespace dfccl {
namespace {

constexpr uint64_t kCapacity = 8;

TEST(ByteRingTest, BytesGoRound) {
  RingWords words;
  RingWriter writer(&words, kCapacity);
  RingReader reader(&words, kCapacity);
  for (int lap = 0; lap < 10; ++lap) {
    ASSERT_TRUE(writer.Look());
    EXPECT_EQ(writer.room(), kCapacity);
    EXPECT_FALSE(writer.Publish(5));
    EXPECT_EQ(writer.room(), 3u);
    EXPECT_EQ(reader.available(), 0u);
    ASSERT_TRUE(reader.Look());
    EXPECT_EQ(reader.available(), 5u);
    EXPECT_EQ(words.Used(), 5u);
    EXPECT_FALSE(reader.Release(5));
    EXPECT_EQ(writer.room(), 3u);  // until it looks
  }
}

TEST(ByteRingTest, OnlyAnArmedBellIsRungAndOnce) {
  RingWords words;
  RingWriter writer(&words, kCapacity);
  words.reader.Arm();
  EXPECT_TRUE(words.reader.Armed());
  EXPECT_TRUE(writer.Publish(1));
  EXPECT_FALSE(writer.Publish(1));
  words.reader.Arm();
  words.reader.Disarm();
  EXPECT_FALSE(writer.Publish(1));
}

TEST(ByteRingTest, RoomIsRungForFromHalfOn) {
  RingWords words;
  RingWriter writer(&words, kCapacity);
  RingReader reader(&words, kCapacity);
  writer.Publish(kCapacity);
  ASSERT_TRUE(reader.Look());
  words.writer.Arm();
  EXPECT_FALSE(reader.Release(3));
  EXPECT_TRUE(reader.Release(1));
}

TEST(ByteRingTest, PositionsThatCannotBeAreRefused) {
  for (const uint64_t wrong : {uint64_t{2}, uint64_t{12}, ~uint64_t{0}, uint64_t{1} << 63}) {
    RingWords words;
    RingWriter writer(&words, kCapacity);
    RingReader reader(&words, kCapacity);
    writer.Publish(7);
    ASSERT_TRUE(reader.Look());
    reader.Release(3);
    ASSERT_TRUE(writer.Look());
    words.read.StoreRelaxed(wrong);  // behind what was read, or beyond what was written
    EXPECT_FALSE(writer.Look()) << wrong;
    EXPECT_EQ(writer.room(), 4u);
    words.written.StoreRelaxed(wrong);  // behind what was written, or more than fits
    EXPECT_FALSE(reader.Look()) << wrong;
    EXPECT_EQ(reader.available(), 4u);
  }
}

// The socket that a bell goes over.
class Bell {
 public:
  void Ring() {
    std::lock_guard<std::mutex> lock(mutex_);
    rung_ = true;
    condition_.notify_one();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    condition_.wait(lock, [this] { return rung_; });
    rung_ = false;
  }

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  bool rung_ = false;
};

// A lost bell ends the test by the test runner's limit.
TEST(ByteRingStress, NoBellIsLost) {
  constexpr uint64_t kBytes = 200'000;
  const uint32_t seed = StressSeed();
  RingWords words;
  unsigned char bytes[kCapacity];
  Bell data, room;
  std::thread thread([&] {
    RandomPause pause(seed);
    RingWriter writer(&words, kCapacity);
    for (uint64_t written = 0; written < kBytes;) {
      ASSERT_TRUE(writer.Look());
      if (writer.room() > 0) {
        bytes[written % kCapacity] = static_cast<unsigned char>(written * 7);
        ++written;
        pause();
        if (writer.Publish(1)) data.Ring();
        continue;
      }
      words.writer.Arm();
      if (words.Used() == kCapacity) room.Wait();
      words.writer.Disarm();
    }
  });
  RandomPause pause(seed + 1);
  RingReader reader(&words, kCapacity);
  uint64_t wrong = 0;
  for (uint64_t read = 0; read < kBytes;) {
    EXPECT_TRUE(reader.Look());
    if (reader.available() > 0) {
      wrong += bytes[read % kCapacity] != static_cast<unsigned char>(read * 7);
      ++read;
      pause();
      if (reader.Release(1)) room.Ring();
      continue;
    }
    words.reader.Arm();
    if (words.Used() == 0) data.Wait();
    words.reader.Disarm();
  }
  thread.join();
  EXPECT_EQ(wrong, 0u);
}

}  // namespace
}  // namespace dfccl
