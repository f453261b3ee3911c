// SPDX-License-Identifier: Apache-2.0
// A writer and a reader that sleep when there is no room or no data. A lost bell is a
// deadlock, and bytes that are written or read too early are a race.
#include "core/protocol/byte_ring.h"
#include "tests/core/protocol/bell.h"
#include "tests/core/protocol/model.h"

namespace dfccl {
namespace {

// The writer wants room for kChunk at once; the reader gives it back one by one.
template <uint64_t kCapacity, uint64_t kChunk, uint64_t kChunks>
struct ByteRingModel : rl::test_suite<ByteRingModel<kCapacity, kChunk, kChunks>, 2> {
  RingWords words;
  Plain<uint64_t> bytes[kCapacity];
  ModelBell data;
  ModelBell room;

  void thread(unsigned index) { index == 0 ? Write() : Read(); }

  void Write() {
    RingWriter writer(&words, kCapacity);
    uint64_t written = 0;
    while (written < kChunk * kChunks) {
      RL_ASSERT(writer.Look());
      if (writer.room() >= kChunk) {
        for (uint64_t i = 0; i < kChunk; ++i) bytes[(written + i) % kCapacity].Store(written + i);
        written += kChunk;
        if (writer.Publish(kChunk)) data.Ring();
        continue;
      }
      words.writer.Arm();
      if (kCapacity - words.Used() < kChunk) room.Wait();
      words.writer.Disarm();
    }
  }

  void Read() {
    RingReader reader(&words, kCapacity);
    uint64_t read = 0;
    while (read < kChunk * kChunks) {
      RL_ASSERT(reader.Look());
      if (reader.available() > 0) {
        RL_ASSERT(bytes[read % kCapacity].Load() == read);
        ++read;
        if (reader.Release(1)) room.Ring();
        continue;
      }
      words.reader.Arm();
      if (words.Used() == 0) data.Wait();
      words.reader.Disarm();
    }
  }
};

}  // namespace
}  // namespace dfccl

int main(int argc, char** argv) {
  using namespace dfccl;
  const bool no_fault = ExploreRandom<ByteRingModel<2, 1, 4>>(30000) &&
                        ExploreRandom<ByteRingModel<4, 2, 4>>(30000) &&
                        ExploreBounded<ByteRingModel<2, 1, 3>>(2);
  return ModelExit(argc, argv, no_fault);
}
