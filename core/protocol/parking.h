// SPDX-License-Identifier: Apache-2.0
// How a thread that found no work goes to sleep without missing work that comes
// meanwhile, and how whoever brings work chooses one to wake.
//
//   the thread                             whoever brings work
//   Prepare()                              publish the work (SeqCst store)
//   look for work again (SeqCst loads)     if (TryClaim()) Wake()
//   Cancel() or SleepUntilWoken()
//
// The thread stores "I may sleep", then looks for work; the other publishes
// work, then looks for sleepers: in the one SeqCst order at least one sees the
// other. BoundedQueue's publishing and looking are SeqCst for this reason.
//
// A claim is for one waker, so two of them wake two threads. The thread goes on
// only after Wake: until then whoever has claimed it may settle how it wakes. A
// thread that was claimed and found other work than the claimer's, or that takes
// one entry and sees more, should claim another one: see also bounded_queue.h.
#ifndef DFCCL_CORE_PROTOCOL_PARKING_H_
#define DFCCL_CORE_PROTOCOL_PARKING_H_

#include <stdint.h>

#include "core/protocol/atomics.h"

namespace dfccl {

// The place of one thread. Sleeper blocks and wakes it:
//   void SleepUntilEqual(const Atomic<uint32_t>& word, uint32_t value);
//     returns once the word is the value; a Wake after that is never missed
//   void Wake();
template <typename Sleeper>
class ParkingSpot {
 public:
  // By the thread; must be followed by Cancel or SleepUntilWoken.
  void Prepare() { state_.StoreSeqCst(kParked); }

  // Work was found after all. Waits for the Wake if the thread has been claimed.
  void Cancel() {
    uint32_t parked = kParked;
    if (!state_.CompareExchangeSeqCst(parked, kAwake)) SleepUntilWoken();
  }

  // Sleeps until the Wake of a claim that came after Prepare.
  void SleepUntilWoken() { sleeper_.SleepUntilEqual(state_, kAwake); }

  // By others: true for one of them if the thread sleeps or is about to.
  bool TryClaim() {
    uint32_t parked = kParked;
    return state_.LoadSeqCst() == kParked && state_.CompareExchangeSeqCst(parked, kClaimed);
  }

  // By whoever has claimed it.
  void Wake() {
    state_.StoreSeqCst(kAwake);
    sleeper_.Wake();
  }

 private:
  static constexpr uint32_t kAwake = 0;
  static constexpr uint32_t kParked = 1;
  static constexpr uint32_t kClaimed = 2;

  alignas(kCacheLine) Atomic<uint32_t> state_;
  Sleeper sleeper_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_PROTOCOL_PARKING_H_
