// SPDX-License-Identifier: Apache-2.0
// BoundedQueue as submission queue (2 producers, 1 consumer) and as completion
// queue (1 or 2 producers, 2 consumers): every entry comes out once, entries of
// one producer in order, and no payload is touched by two threads at once. The
// rings are smaller than the traffic, and positions wrap around 2^64.
#include "core/protocol/bounded_queue.h"
#include "tests/core/protocol/model.h"

namespace dfccl {
namespace {

template <int kProducers, int kConsumers, int kEach, int kCapacity>
struct QueueModel : rl::test_suite<QueueModel<kProducers, kConsumers, kEach, kCapacity>,
                                   kProducers + kConsumers> {
  static constexpr int kTotal = kProducers * kEach;

  BoundedQueue<int> queue{kCapacity, ~uint64_t{0}};
  int taken[kTotal] = {};

  void thread(unsigned index) {
    if (index < kProducers) {
      for (int i = 0; i < kEach; ++i) {
        while (!queue.TryPush(static_cast<int>(index) * kEach + i)) SpinPause();
      }
    } else {
      int last[kProducers];
      for (int& entry : last) entry = -1;
      for (int i = 0; i < kTotal / kConsumers; ++i) {
        int entry;
        while (!queue.TryPop(&entry)) SpinPause();
        RL_ASSERT(entry >= 0 && entry < kTotal);
        ++taken[entry];
        RL_ASSERT(entry > last[entry / kEach]);
        last[entry / kEach] = entry;
      }
    }
  }

  void after() {
    for (int count : taken) RL_ASSERT(count == 1);
    int entry;
    RL_ASSERT(!queue.TryPop(&entry));
    RL_ASSERT(queue.ApproxSize() == 0);
    for (int i = 0; i < kCapacity; ++i) RL_ASSERT(queue.TryPush(i));
    RL_ASSERT(!queue.TryPush(0));
  }
};

}  // namespace
}  // namespace dfccl

int main(int argc, char** argv) {
  using namespace dfccl;
  const bool no_fault = ExploreRandom<QueueModel<2, 1, 2, 2>>(20000) &&
                        ExploreRandom<QueueModel<2, 1, 1, 1>>(20000) &&
                        ExploreRandom<QueueModel<1, 2, 4, 2>>(20000) &&
                        ExploreRandom<QueueModel<2, 2, 2, 2>>(20000) &&
                        ExploreBounded<QueueModel<2, 1, 1, 1>>(2);
  return ModelExit(argc, argv, no_fault);
}
