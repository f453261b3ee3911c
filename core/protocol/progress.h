// SPDX-License-Identifier: Apache-2.0
// A member's progress word, and how a member that waits for a peer's word goes
// to sleep: no wake-up is lost and none comes twice.
//
//   waiting member                        signalling member
//   TrySleep: sleep word = what I await   Signal: progress word = value
//             look at the progress word   TryWake: look at the sleep word;
//             again                                if it awaits this, take it
//
// Both sides store, then look at the other's word, in one total order (SeqCst):
// at least one of them sees the other's store. Whoever takes the sleep word
// back to "awake" decides: the signalling member (it must wake the sleeper), or
// the waiting member (it stays awake).
#ifndef DFCCL_CORE_PROTOCOL_PROGRESS_H_
#define DFCCL_CORE_PROTOCOL_PROGRESS_H_

#include <stdint.h>

#include "core/protocol/atomics.h"

namespace dfccl {

// Written by its member only; it only grows.
class alignas(kCacheLine) ProgressWord {
 public:
  // Release: partners are the loads in Reached and ReachedSeqCst. SeqCst, so that the
  // member may look for sleepers next.
  DFCCL_HOST_DEVICE void Signal(uint32_t value) { value_.StoreSeqCst(value); }

  // The same where members only poll and never sleep, so nobody need be looked for.
  DFCCL_HOST_DEVICE void Publish(uint32_t value) { value_.StoreRelease(value); }

  // For polling.
  DFCCL_HOST_DEVICE bool Reached(uint32_t value) const { return value_.LoadAcquire() >= value; }

  // For the second look, after the sleep was announced.
  DFCCL_HOST_DEVICE bool ReachedSeqCst(uint32_t value) const {
    return value_.LoadSeqCst() >= value;
  }

  // By who has the word to itself: for its next use.
  DFCCL_HOST_DEVICE void Reset() { value_.StoreRelaxed(0); }

  // For reports.
  DFCCL_HOST_DEVICE uint32_t value() const { return value_.LoadRelaxed(); }

 private:
  Atomic<uint32_t> value_;
};

// What a sleeping member awaits: `member` to reach `value`. A member that waits
// for several peers sleeps on any one that it still misses, then on the next.
class alignas(kCacheLine) SleepWord {
 public:
  // By the waiting member. True: it is asleep, and exactly one TryWake or
  // TryWakeAny returns true for it (perhaps it has already). False: it is awake
  // and must go on. `ready()` is the second look: it must read with SeqCst loads
  // everything that could end the wait (the peer's progress, a failure).
#if defined(__CUDACC__)
#pragma nv_exec_check_disable  // `ready` may be a host function
#endif
  template <typename Ready>
  DFCCL_HOST_DEVICE bool TrySleep(uint16_t member, uint32_t value, Ready ready) {
    uint64_t awaited = Awaited(member, value);
    word_.StoreSeqCst(awaited);
    if (!ready()) return true;
    // Fails when a peer has taken the word: then the wake-up is on its way.
    return !word_.CompareExchangeSeqCst(awaited, kAwake);
  }

  // By `member`, after Signal(progress). True: the caller must wake the sleeper.
  DFCCL_HOST_DEVICE bool TryWake(uint16_t member, uint32_t progress) {
    uint64_t awaited = word_.LoadSeqCst();
    if ((awaited >> 32) != uint64_t{member} + 1) return false;
    if (static_cast<uint32_t>(awaited) > progress) return false;
    return word_.CompareExchangeSeqCst(awaited, kAwake);
  }

  // By anyone, after publishing (SeqCst) something else that ends the wait.
  // True: the caller must wake the sleeper.
  DFCCL_HOST_DEVICE bool TryWakeAny() {
    if (word_.LoadSeqCst() == kAwake) return false;
    return word_.ExchangeSeqCst(kAwake) != kAwake;
  }

  // For reports and the wait-for graph. False: awake.
  DFCCL_HOST_DEVICE bool Peek(uint16_t* member, uint32_t* value) const {
    const uint64_t awaited = word_.LoadRelaxed();
    if (awaited == kAwake) return false;
    *member = static_cast<uint16_t>((awaited >> 32) - 1);
    *value = static_cast<uint32_t>(awaited);
    return true;
  }

 private:
  static constexpr uint64_t kAwake = 0;
  DFCCL_HOST_DEVICE static uint64_t Awaited(uint16_t member, uint32_t value) {
    return (uint64_t{member} + 1) << 32 | value;
  }

  Atomic<uint64_t> word_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_PROTOCOL_PROGRESS_H_
