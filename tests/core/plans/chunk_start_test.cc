// SPDX-License-Identifier: Apache-2.0
// Chunks of a message: they cover it without gaps, aligned and balanced, for
// any count, and no product in between overflows.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "core/protocol/step.h"

namespace dfccl {
namespace {

constexpr int64_t kMaxCount = std::numeric_limits<int64_t>::max();

const int64_t kAligns[] = {1, 3, 16, 64};

// Chunks to look at: all of few, the ends and some between of many.
std::vector<uint32_t> Samples(uint32_t chunk_count) {
  std::vector<uint32_t> chunks;
  const uint32_t stride = chunk_count / 400 + 1;
  for (uint64_t chunk = 0; chunk < chunk_count; chunk += stride) {
    chunks.push_back(static_cast<uint32_t>(chunk));
  }
  if (chunks.back() != chunk_count - 1) chunks.push_back(chunk_count - 1);
  return chunks;
}

void Check(int64_t count, uint32_t chunk_count, int64_t align) {
  SCOPED_TRACE(::testing::Message()
               << count << " elements, " << chunk_count << " chunks, aligned " << align);
  ASSERT_EQ(ChunkStart(count, 0, chunk_count, align), 0);
  ASSERT_EQ(ChunkStart(count, chunk_count, chunk_count, align), count);
  const int64_t blocks = count / align + (count % align != 0);
  for (const uint32_t chunk : Samples(chunk_count)) {
    const int64_t begin = ChunkStart(count, chunk, chunk_count, align);
    const int64_t end = ChunkStart(count, chunk + 1, chunk_count, align);
    ASSERT_LE(0, begin) << chunk;
    ASSERT_LE(begin, end) << chunk;
    ASSERT_LE(end, count) << chunk;
    ASSERT_TRUE(begin % align == 0 || begin == count) << chunk;
    // Balanced: no chunk has more than one block above the average, and only
    // the message's last block may be cut.
    const int64_t size_blocks = (end - begin) / align + ((end - begin) % align != 0);
    ASSERT_GE(size_blocks, blocks / chunk_count) << chunk;
    ASSERT_LE(size_blocks - 1, blocks / chunk_count) << chunk;
  }
}

TEST(ChunkStartTest, CoversSmallCounts) {
  for (int64_t count = 0; count <= 200; ++count) {
    for (const uint32_t chunk_count : {1u, 2u, 3u, 5u, 8u, 64u, 320u}) {
      for (const int64_t align : kAligns) Check(count, chunk_count, align);
    }
  }
}

TEST(ChunkStartTest, CoversHugeCounts) {
  const int64_t two = 2;
  for (const int64_t count :
       {(two << 30) - 1, two << 30, (two << 30) + 5, (two << 31) + 1, (two << 39) + 3,
        (two << 61) - 1, kMaxCount - 64, kMaxCount - 1, kMaxCount}) {
    for (const uint32_t chunk_count :
         {1u, 2u, 3u, 7u, 64u, 320u, 65534u, 0x80000001u, 0xffffffffu}) {
      for (const int64_t align : kAligns) Check(count, chunk_count, align);
    }
  }
}

TEST(ChunkStartTest, LeavesChunksEmptyWhenThereAreMoreThanBlocks) {
  // Two blocks of 16 over five chunks: the third and the last get one.
  const int64_t starts[] = {0, 0, 0, 16, 16, 20};
  for (uint32_t chunk = 0; chunk <= 5; ++chunk) {
    EXPECT_EQ(ChunkStart(20, chunk, 5, 16), starts[chunk]) << chunk;
  }
}

}  // namespace
}  // namespace dfccl
