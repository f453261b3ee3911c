// SPDX-License-Identifier: Apache-2.0
// The sleep handshake. Whoever wakes the waiting member goes on in its place, so
// a lost wake-up leaves the wait unfinished, a second one is a race on its
// state, and data that the progress words guard must be seen.
#include "core/protocol/progress.h"
#include "tests/core/protocol/model.h"

namespace dfccl {
namespace {

// A member that needs `kPeers` peers to reach kGoal, or a failure.
template <int kPeers>
struct Waiter {
  static constexpr uint32_t kGoal = 2;

  ProgressWord progress[kPeers];
  Plain<int> data[kPeers];
  Atomic<uint32_t> failed;
  SleepWord sleep;
  Plain<int> resumptions;  // the waiting member's own state
  int finished = 0;

  Waiter() { resumptions.Store(0); }

  void Resume() {
    resumptions.Store(resumptions.Load() + 1);
    for (int peer = 0; peer < kPeers; ++peer) {
      while (!progress[peer].Reached(kGoal)) {
        if (failed.LoadAcquire() != 0) {
          ++finished;
          return;
        }
        const bool asleep = sleep.TrySleep(static_cast<uint16_t>(peer), kGoal, [&] {
          return progress[peer].ReachedSeqCst(kGoal) || failed.LoadSeqCst() != 0;
        });
        if (asleep) return;
      }
      RL_ASSERT(data[peer].Load() == peer + 10);
    }
    ++finished;
  }

  void Signal(int peer) {
    for (uint32_t value = 1; value <= kGoal; ++value) {
      if (value == kGoal) data[peer].Store(peer + 10);
      progress[peer].Signal(value);
      if (sleep.TryWake(static_cast<uint16_t>(peer), value)) {
        RL_ASSERT(value == kGoal);  // nobody awaits less
        Resume();
      }
    }
  }

  void Fail() {
    failed.StoreSeqCst(1);
    if (sleep.TryWakeAny()) Resume();
  }
};

struct OnePeerModel : rl::test_suite<OnePeerModel, 2> {
  Waiter<1> waiter;
  void thread(unsigned index) {
    if (index == 0) {
      waiter.Resume();
    } else {
      waiter.Signal(0);
    }
  }
  void after() { RL_ASSERT(waiter.finished == 1); }
};

struct TwoPeersModel : rl::test_suite<TwoPeersModel, 3> {
  Waiter<2> waiter;
  void thread(unsigned index) {
    if (index == 0) {
      waiter.Resume();
    } else {
      waiter.Signal(static_cast<int>(index) - 1);
    }
  }
  void after() { RL_ASSERT(waiter.finished == 1); }
};

struct FailureModel : rl::test_suite<FailureModel, 3> {
  Waiter<1> waiter;
  void thread(unsigned index) {
    if (index == 0) {
      waiter.Resume();
    } else if (index == 1) {
      waiter.Signal(0);
    } else {
      waiter.Fail();
    }
  }
  void after() { RL_ASSERT(waiter.finished == 1); }
};

// The peer never comes: only the failure can end the wait.
struct LonelyModel : rl::test_suite<LonelyModel, 2> {
  Waiter<1> waiter;
  void thread(unsigned index) {
    if (index == 0) {
      waiter.Resume();
    } else {
      waiter.Fail();
    }
  }
  void after() { RL_ASSERT(waiter.finished == 1); }
};

}  // namespace
}  // namespace dfccl

int main(int argc, char** argv) {
  using namespace dfccl;
  const bool no_fault = ExploreRandom<OnePeerModel>(20000) && ExploreRandom<TwoPeersModel>(30000) &&
                        ExploreRandom<FailureModel>(30000) && ExploreRandom<LonelyModel>(20000) &&
                        ExploreBounded<OnePeerModel>(4) && ExploreBounded<TwoPeersModel>(2);
  return ModelExit(argc, argv, no_fault);
}
