// SPDX-License-Identifier: Apache-2.0
// A bounded first-in-first-out ring between one producer and one consumer, over
// memory that someone else owns: the queues between a host and a block of a CUDA
// daemon. Each word has one writer and is only loaded and stored, never read,
// modified and written at once: a GPU does not have to be able to do that to host
// memory. Positions are 64-bit and may wrap; the payload has no reserved values.
#ifndef DFCCL_CORE_PROTOCOL_SPSC_QUEUE_H_
#define DFCCL_CORE_PROTOCOL_SPSC_QUEUE_H_

#include <stdint.h>

#include "core/protocol/atomics.h"

namespace dfccl {

// All equal at first, to whatever position.
struct SpscEnds {
  alignas(kCacheLine) Atomic<uint64_t> pushed;  // stored by the producer only
  alignas(kCacheLine) Atomic<uint64_t> popped;  // stored by the consumer only
};

// The producer's side. `capacity` is a power of two.
template <typename T>
class SpscProducer {
 public:
  DFCCL_HOST_DEVICE SpscProducer(SpscEnds* ends, Plain<T>* slots, uint64_t capacity)
      : ends_(ends),
        slots_(slots),
        capacity_(capacity),
        pushed_(ends->pushed.LoadRelaxed()),
        popped_(pushed_) {}

  // False when full.
  DFCCL_HOST_DEVICE bool TryPush(const T& value) {
    if (pushed_ - popped_ == capacity_) {
      // Acquire: partner is the store in TryPop, after the payload was read.
      popped_ = ends_->popped.LoadAcquire();
      if (pushed_ - popped_ == capacity_) return false;
    }
    slots_[pushed_ & (capacity_ - 1)].Store(value);
    // Release: partner is the load in TryPop.
    ends_->pushed.StoreRelease(++pushed_);
    return true;
  }

 private:
  SpscEnds* ends_;
  Plain<T>* slots_;
  uint64_t capacity_;
  uint64_t pushed_;
  uint64_t popped_;  // as far as is known; at most `capacity_` behind `pushed_`
};

// The consumer's side. One that is made anew goes on where the last one left off.
template <typename T>
class SpscConsumer {
 public:
  DFCCL_HOST_DEVICE SpscConsumer(SpscEnds* ends, Plain<T>* slots, uint64_t capacity)
      : ends_(ends),
        slots_(slots),
        capacity_(capacity),
        popped_(ends->popped.LoadRelaxed()),
        pushed_(popped_) {}

  // False when empty.
  DFCCL_HOST_DEVICE bool TryPop(T* value) {
    if (popped_ == pushed_) {
      // Acquire: partner is the store in TryPush, after the payload was written.
      pushed_ = ends_->pushed.LoadAcquire();
      if (popped_ == pushed_) return false;
    }
    *value = slots_[popped_ & (capacity_ - 1)].Load();
    // Release: partner is the load in TryPush.
    ends_->popped.StoreRelease(++popped_);
    return true;
  }

 private:
  SpscEnds* ends_;
  Plain<T>* slots_;
  uint64_t capacity_;
  uint64_t popped_;
  uint64_t pushed_;  // as far as is known
};

}  // namespace dfccl

#endif  // DFCCL_CORE_PROTOCOL_SPSC_QUEUE_H_
