// SPDX-License-Identifier: Apache-2.0
// Workers that sleep in a ParkingSpot each when the run queue is empty: if a wake-up
// is lost, the entry stays and relacy reports the deadlock. The last entry stops
// all workers. What a claimer writes before the wake-up is the worker's afterwards.
#include "core/protocol/bounded_queue.h"
#include "core/protocol/parking.h"
#include "tests/core/protocol/model.h"

namespace dfccl {
namespace {

class ModelSleeper {
 public:
  void SleepUntilEqual(const Atomic<uint32_t>& word, uint32_t value) {
    mutex_.lock(RL_INFO);
    while (word.LoadSeqCst() != value) condition_.wait(mutex_, RL_INFO);
    mutex_.unlock(RL_INFO);
  }
  void Wake() {
    mutex_.lock(RL_INFO);
    condition_.notify_one(RL_INFO);
    mutex_.unlock(RL_INFO);
  }

 private:
  rl::mutex mutex_;
  rl::condition_variable condition_;
};

template <int kProducers, int kWorkers, int kEach>
struct ParkingModel
    : rl::test_suite<ParkingModel<kProducers, kWorkers, kEach>, kProducers + kWorkers> {
  BoundedQueue<int> queue{4};
  ParkingSpot<ModelSleeper> spots[kWorkers];
  Plain<int> errand[kWorkers];
  Atomic<uint32_t> handled;
  Atomic<uint32_t> stop;

  void thread(unsigned index) {
    if (index < kProducers) {
      for (int i = 0; i < kEach; ++i) {
        RL_ASSERT(queue.TryPush(i));
        WakeOne();
      }
    } else {
      Work(index - kProducers);
    }
  }

  bool WakeOne() {
    for (int i = 0; i < kWorkers; ++i) {
      if (!spots[i].TryClaim()) continue;
      errand[i].Store(1);
      spots[i].Wake();
      return true;
    }
    return false;
  }

  void Work(int worker) {
    ParkingSpot<ModelSleeper>* spot = &spots[worker];
    while (stop.LoadSeqCst() == 0) {
      if (TryHandle()) continue;
      spot->Prepare();
      if (stop.LoadSeqCst() != 0 || TryHandle()) {
        spot->Cancel();
      } else {
        spot->SleepUntilWoken();
      }
      errand[worker].Store(0);
    }
  }

  bool TryHandle() {
    int entry;
    if (!queue.TryPop(&entry)) return false;
    if (handled.FetchAddRelaxed(1) + 1 == kProducers * kEach) {
      stop.StoreSeqCst(1);
      while (WakeOne()) {
      }
    }
    return true;
  }

  void after() { RL_ASSERT(handled.LoadRelaxed() == kProducers * kEach); }
};

}  // namespace
}  // namespace dfccl

int main(int argc, char** argv) {
  using namespace dfccl;
  const bool no_fault =
      ExploreRandom<ParkingModel<1, 1, 2>>(30000) && ExploreRandom<ParkingModel<1, 2, 2>>(30000) &&
      ExploreRandom<ParkingModel<2, 1, 1>>(30000) && ExploreRandom<ParkingModel<2, 2, 1>>(30000);
  return ModelExit(argc, argv, no_fault);
}
