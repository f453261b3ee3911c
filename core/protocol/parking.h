// SPDX-License-Identifier: Apache-2.0
// How a thread that found no work goes to sleep without missing work that comes
// meanwhile, and how whoever brings work wakes it at the price of one load when
// nobody sleeps.
//
//   worker                                 whoever brings work
//   epoch = PrepareWait()                  publish the work (SeqCst store)
//   look for work again (SeqCst loads)     NotifyOne()
//   CancelWait() or CommitWait(epoch)
//
// The worker stores "I may sleep", then looks for work; the other publishes
// work, then looks for sleepers: in the one SeqCst order at least one sees the
// other. BoundedQueue's publishing and looking are SeqCst for this reason.
//
// NotifyOne wakes one thread; a worker that takes one entry and sees more should
// call NotifyOne again, for an entry may have been hidden when its producer
// notified (bounded_queue.h).
#ifndef DFCCL_CORE_PROTOCOL_PARKING_H_
#define DFCCL_CORE_PROTOCOL_PARKING_H_

#include <stdint.h>

#include "core/protocol/atomics.h"

namespace dfccl {

// Sleeper blocks and wakes threads:
//   void SleepWhileEqual(const Atomic<uint32_t>& word, uint32_t value);
//     returns once the word differs, or for no reason; a WakeOne or WakeAll
//     after the word changed is never missed
//   void WakeOne();  void WakeAll();
template <typename Sleeper>
class ParkingLot {
 public:
  // Must be followed by CancelWait or CommitWait on the same thread.
  uint32_t PrepareWait() {
    waiters_.FetchAddSeqCst(1);
    return epoch_.LoadSeqCst();
  }

  // Work was found after all.
  void CancelWait() { waiters_.FetchSubSeqCst(1); }

  // Sleeps until a notification that came after PrepareWait. May return early:
  // look for work again.
  void CommitWait(uint32_t epoch) {
    sleeper_.SleepWhileEqual(epoch_, epoch);
    waiters_.FetchSubSeqCst(1);
  }

  void NotifyOne() {
    if (Announce()) sleeper_.WakeOne();
  }

  void NotifyAll() {
    if (Announce()) sleeper_.WakeAll();
  }

 private:
  bool Announce() {
    if (waiters_.LoadSeqCst() == 0) return false;
    epoch_.FetchAddSeqCst(1);
    return true;
  }

  // Waiters write the first word, notifiers the second (only if someone waits).
  alignas(kCacheLine) Atomic<uint32_t> waiters_;
  alignas(kCacheLine) Atomic<uint32_t> epoch_;
  Sleeper sleeper_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_PROTOCOL_PARKING_H_
