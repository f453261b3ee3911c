// SPDX-License-Identifier: Apache-2.0
// A lock for a few instructions. With more threads than cores its holder may
// lose the core, so a waiting thread soon gives its own away.
#ifndef DFCCL_CORE_DAEMON_SPIN_LOCK_H_
#define DFCCL_CORE_DAEMON_SPIN_LOCK_H_

#include <cstdint>
#include <thread>

#include "core/protocol/atomics.h"

namespace dfccl {

// Usable with std::lock_guard.
class SpinLock {
 public:
  void lock() {
    // Acquire: partner is the release in unlock.
    while (word_.ExchangeAcquire(1) != 0) {
      for (int spins = 0; word_.LoadRelaxed() != 0; ++spins) {
        if (spins < kSpins) {
          SpinPause();
        } else {
          std::this_thread::yield();
        }
      }
    }
  }
  // Release: partner is the acquire in lock.
  void unlock() { word_.StoreRelease(0); }

 private:
  static constexpr int kSpins = 32;
  Atomic<uint32_t> word_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_SPIN_LOCK_H_
