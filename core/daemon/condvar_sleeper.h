// SPDX-License-Identifier: Apache-2.0
// Blocks and wakes a thread for ParkingSpot (core/protocol/parking.h) with a
// mutex and a condition variable.
#ifndef DFCCL_CORE_DAEMON_CONDVAR_SLEEPER_H_
#define DFCCL_CORE_DAEMON_CONDVAR_SLEEPER_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "core/protocol/atomics.h"

namespace dfccl {

class CondvarSleeper {
 public:
  void SleepUntilEqual(const Atomic<uint32_t>& word, uint32_t value) {
    std::unique_lock<std::mutex> lock(mutex_);
    // A waker changes the word before it takes the mutex: either this look sees
    // the change, or the waker comes in after the wait has begun.
    while (word.LoadSeqCst() != value) condition_.wait(lock);
  }

  void Wake() {
    std::lock_guard<std::mutex> lock(mutex_);
    condition_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_CONDVAR_SLEEPER_H_
