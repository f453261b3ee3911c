// SPDX-License-Identifier: Apache-2.0
// SpscProducer and SpscConsumer: every entry comes out once and in order, no payload
// is touched by both sides at once, also where the ring is smaller than the traffic,
// positions wrap around 2^64, and a consumer is made anew between entries.
#include "core/protocol/spsc_queue.h"
#include "tests/core/protocol/model.h"

namespace dfccl {
namespace {

template <uint64_t kCapacity, int kEntries, bool kAnew>
struct SpscModel : rl::test_suite<SpscModel<kCapacity, kEntries, kAnew>, 2> {
  SpscEnds ends;
  Plain<int> slots[kCapacity];

  void before() {
    const auto first = ~uint64_t{0} - 1;
    ends.pushed.StoreRelaxed(first);
    ends.popped.StoreRelaxed(first);
  }

  void thread(unsigned index) {
    if (index == 0) {
      SpscProducer<int> producer(&ends, slots, kCapacity);
      for (int i = 0; i < kEntries; ++i) {
        while (!producer.TryPush(i)) SpinPause();
      }
    } else {
      SpscConsumer<int> consumer(&ends, slots, kCapacity);
      for (int i = 0; i < kEntries; ++i) {
        int entry = -1;
        while (!consumer.TryPop(&entry)) SpinPause();
        RL_ASSERT(entry == i);
        if (kAnew) consumer = SpscConsumer<int>(&ends, slots, kCapacity);
      }
    }
  }
};

}  // namespace
}  // namespace dfccl

int main(int argc, char** argv) {
  using namespace dfccl;
  const bool no_fault = ExploreRandom<SpscModel<1, 3, false>>(20000) &&
                        ExploreRandom<SpscModel<2, 5, false>>(20000) &&
                        ExploreRandom<SpscModel<2, 5, true>>(20000) &&
                        ExploreBounded<SpscModel<1, 2, false>>(2);
  return ModelExit(argc, argv, no_fault);
}
