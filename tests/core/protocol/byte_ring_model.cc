// SPDX-License-Identifier: Apache-2.0
// A writer and a reader that sleep when there is no room or no data: a lost bell is a
// deadlock, and bytes that are written or read too early are a race. And a writer that
// lends its memory, takes it back, and writes something else there.
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

// The words of what is lent are atomic, as the reader may copy them while they change;
// nothing but the protocol orders them.
struct LendingModel : rl::test_suite<LendingModel, 2> {
  static constexpr uint64_t kCapacity = 4, kFrame = 2;
  static constexpr uint32_t kLent = 1, kOther = 2;
  RingWords words;
  Atomic<uint32_t> lent[2];

  void thread(unsigned index) { index == 0 ? Lend() : Borrow(); }

  void Lend() {
    RingWriter writer(&words, kCapacity);
    for (Atomic<uint32_t>& word : lent) word.StoreRelaxed(kLent);
    writer.Publish(kFrame);
    if (!writer.Passed(writer.position())) writer.Revoke();
    for (Atomic<uint32_t>& word : lent) word.StoreRelaxed(kOther);
  }

  void Borrow() {
    RingReader reader(&words, kCapacity);
    while (reader.available() == 0) {
      SpinPause();
      RL_ASSERT(reader.Look());
    }
    bool other = false;
    for (Atomic<uint32_t>& word : lent) other |= word.LoadRelaxed() != kLent;
    const bool revoked = reader.Revoked(kFrame);
    RL_ASSERT(revoked || !other);
    reader.Release(kFrame);
  }
};

}  // namespace
}  // namespace dfccl

int main(int argc, char** argv) {
  using namespace dfccl;
  const bool no_fault = ExploreRandom<ByteRingModel<2, 1, 4>>(30000) &&
                        ExploreRandom<ByteRingModel<4, 2, 4>>(30000) &&
                        ExploreBounded<ByteRingModel<2, 1, 3>>(2) &&
                        ExploreRandom<LendingModel>(30000) && ExploreBounded<LendingModel>(3);
  return ModelExit(argc, argv, no_fault);
}
