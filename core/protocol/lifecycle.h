// SPDX-License-Identifier: Apache-2.0
// The quit/restart word of one daemon: who may drive it, and whether work may
// have come since its driver last looked. It guarantees that one thread at a
// time drives (and sees what the driver before it did), that work published
// before Schedule or TryClaim is looked at after it, and that the run queue
// holds at most one entry per daemon.
//
//                Parked     Scheduled  Running       RunningDirty
//   Schedule     Scheduled  Scheduled  RunningDirty  RunningDirty
//   TryClaim     Running    Running    fails: RunningDirty (both)
//   TryBeginRun  fails      Running    fails         fails
//   TryPark                            Parked        fails: Running
//   Reschedule                         Scheduled     Scheduled
//
// The word is three bits: `driven`, `wanted` (Scheduled = wanted only,
// RunningDirty = driven and wanted) and `queued`: an entry for the daemon is in
// the run queue or about to be. A daemon that is claimed while it sits in the
// run queue keeps `queued`, so that nobody adds a second entry; whoever pops
// the entry and finds the daemon not Scheduled drops it.
//
// Every operation is one read-modify-write of the one word, so its acquire
// partners with the release of all operations before it.
#ifndef DFCCL_CORE_PROTOCOL_LIFECYCLE_H_
#define DFCCL_CORE_PROTOCOL_LIFECYCLE_H_

#include <stdint.h>

#include "core/protocol/atomics.h"

namespace dfccl {

class Lifecycle {
 public:
  enum class State : uint8_t { kParked, kScheduled, kRunning, kRunningDirty };

  // After publishing work. True: the caller must put the daemon on the run
  // queue.
  DFCCL_HOST_DEVICE bool Schedule() {
    uint32_t old_word = word_.LoadRelaxed();
    uint32_t new_word;
    do {
      new_word = old_word | kWanted;
      if (!(old_word & kDriven)) new_word |= kQueued;
      // Also when nothing changes: the next driver must see the work.
    } while (!word_.CompareExchangeAcqRel(old_word, new_word));
    return !(old_word & kQueued) && (new_word & kQueued);
  }

  // After publishing work, by a thread that is willing to drive. True: the
  // caller drives (Running). False: another thread drives and will look again
  // before it parks; the caller need not do anything.
  DFCCL_HOST_DEVICE bool TryClaim() {
    uint32_t old_word = word_.LoadRelaxed();
    uint32_t new_word;
    do {
      new_word = (old_word & kDriven) ? old_word | kWanted : (old_word & kQueued) | kDriven;
    } while (!word_.CompareExchangeAcqRel(old_word, new_word));
    return !(old_word & kDriven);
  }

  // By who has popped the daemon's entry from the run queue. True: the caller
  // drives (Running). False: drop the entry.
  DFCCL_HOST_DEVICE bool TryBeginRun() {
    uint32_t old_word = word_.LoadRelaxed();
    uint32_t new_word;
    bool scheduled;
    do {
      scheduled = (old_word & (kWanted | kDriven)) == kWanted;
      new_word = scheduled ? kDriven : old_word & ~kQueued;
    } while (!word_.CompareExchangeAcqRel(old_word, new_word));
    return scheduled;
  }

  // By the driver, who found nothing to do. True: the daemon is Parked and no
  // longer the caller's. False: work may have come; the caller still drives
  // (Running) and must look again.
  DFCCL_HOST_DEVICE bool TryPark() {
    uint32_t old_word = word_.LoadRelaxed();
    uint32_t new_word;
    do {
      new_word = (old_word & kWanted) ? old_word & ~kWanted : old_word & ~kDriven;
    } while (!word_.CompareExchangeAcqRel(old_word, new_word));
    return !(old_word & kWanted);
  }

  // By the driver, who leaves with work undone (Scheduled). True: the caller
  // must put the daemon on the run queue.
  DFCCL_HOST_DEVICE bool Reschedule() {
    return !(word_.ExchangeAcqRel(kWanted | kQueued) & kQueued);
  }

  // For reports; stale when it returns.
  DFCCL_HOST_DEVICE State state() const {
    const uint32_t word = word_.LoadRelaxed();
    if (word & kDriven) return (word & kWanted) ? State::kRunningDirty : State::kRunning;
    return (word & kWanted) ? State::kScheduled : State::kParked;
  }

 private:
  static constexpr uint32_t kDriven = 1;
  static constexpr uint32_t kWanted = 2;
  static constexpr uint32_t kQueued = 4;

  alignas(kCacheLine) Atomic<uint32_t> word_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_PROTOCOL_LIFECYCLE_H_
