// SPDX-License-Identifier: Apache-2.0
// A process with a thread that sleeps when nobody needs it, one that polls for a while,
// and one that posts work; and a peer that writes into a ring. Work that nobody comes
// for is a deadlock.
#include "core/protocol/byte_ring.h"
#include "core/protocol/pollers.h"
#include "tests/core/protocol/bell.h"
#include "tests/core/protocol/model.h"

namespace dfccl {
namespace {

template <uint32_t kEach>
struct PollersModel : rl::test_suite<PollersModel<kEach>, 4> {
  static constexpr uint32_t kAll = 2 * kEach;

  Pollers pollers;
  ModelBell bell;
  Atomic<uint32_t> turn;
  Atomic<uint32_t> posted;
  Atomic<uint32_t> taken;  // of them; whose turn it is stores it
  Atomic<uint32_t> handled;
  RingWords words;
  Plain<int> bytes[kEach];
  RingReader reader{&words, kEach};  // whose turn it is uses it
  Plain<uint32_t> read;

  void before() { read.Store(0); }

  void thread(unsigned index) {
    switch (index) {
      case 0:
        return Sleeper();
      case 1:
        return Poller();
      case 2:
        return Poster();
      default:
        return Peer();
    }
  }

  void Sleeper() {
    bool idle = true;
    while (handled.LoadSeqCst() < kAll) {
      if (idle) bell.Wait();
      Begin();
      while (Poll()) {
      }
      idle = End();
    }
  }
  void Poller() {
    for (int i = 0; i < 2; ++i) {
      Begin();
      Poll();
      if (!End()) bell.Ring();
    }
  }
  void Poster() {
    for (uint32_t i = 0; i < kEach; ++i) {
      posted.StoreSeqCst(i + 1);  // what the poster cannot do itself
      if (!pollers.Any()) bell.Ring();
    }
  }
  void Peer() {
    RingWriter writer(&words, kEach);
    for (uint32_t i = 0; i < kEach; ++i) {
      bytes[i].Store(static_cast<int>(i) + 10);
      if (writer.Publish(1)) bell.Ring();
    }
  }

  void Begin() {
    pollers.Begin([this] { words.reader.Disarm(); });
  }
  bool End() {
    return pollers.End([this] {
      words.reader.Arm();
      return words.Used() == 0 && !HasWork();
    });
  }

  // In and out have one turn here, so that they get into each other's way.
  bool Try() {
    uint32_t nobody = 0;
    return turn.CompareExchangeSeqCst(nobody, 1);
  }
  bool HasWork() { return posted.LoadSeqCst() != taken.LoadSeqCst(); }
  bool Poll() {
    bool moved = false;
    if (words.written.LoadRelaxed() != words.read.LoadRelaxed() && Try()) {
      RL_ASSERT(reader.Look());
      while (reader.available() > 0) {
        const uint32_t at = read.Load();
        RL_ASSERT(bytes[at].Load() == static_cast<int>(at) + 10);
        read.Store(at + 1);
        reader.Release(1);
        Handled();
        moved = true;
      }
      turn.StoreSeqCst(0);
    }
    return Pump() || moved;
  }
  bool Pump() {
    bool moved = false;
    while (HasWork() && Try()) {
      while (HasWork()) {
        taken.StoreSeqCst(taken.LoadSeqCst() + 1);
        Handled();
        moved = true;
      }
      turn.StoreSeqCst(0);
    }
    return moved;
  }
  void Handled() {
    if (handled.FetchAddSeqCst(1) + 1 == kAll) bell.Ring();  // so that the sleeper ends
  }

  void after() { RL_ASSERT(handled.LoadRelaxed() == kAll); }
};

}  // namespace
}  // namespace dfccl

int main(int argc, char** argv) {
  using namespace dfccl;
  const bool no_fault =
      ExploreRandom<PollersModel<1>>(40000) && ExploreRandom<PollersModel<2>>(40000);
  return ModelExit(argc, argv, no_fault);
}
