// SPDX-License-Identifier: Apache-2.0
// A bounded first-in-first-out ring for any number of producers and consumers:
// submission queue, completion queue and run queue. Each slot carries a 64-bit
// sequence beside its payload, so every payload value is allowed. Positions are
// 64-bit and may wrap. Try operations never wait; full means "not now".
//
// A slot's sequence for position p (all arithmetic modulo 2^64):
//   2 p      free for the push of p            written by TryPop of p - capacity
//   2 p + 1  holds the payload of p            written by TryPush of p
// An operation owns a slot from its compare-exchange of the position until it
// stores the sequence. So a pushed entry stays hidden while the push of an
// earlier position is unfinished: TryPop may fail although a later push has
// returned. Who notifies after each push loses nothing (the earlier producer
// notifies when it is done).
#ifndef DFCCL_CORE_PROTOCOL_BOUNDED_QUEUE_H_
#define DFCCL_CORE_PROTOCOL_BOUNDED_QUEUE_H_

#include <stdint.h>

#include "core/protocol/atomics.h"

namespace dfccl {

template <typename T>
struct QueueSlot {
  Atomic<uint64_t> sequence;
  Plain<T> payload;
};

// Written by producers and by consumers, so they stay on separate lines.
struct QueueEnds {
  alignas(kCacheLine) Atomic<uint64_t> push_position;
  alignas(kCacheLine) Atomic<uint64_t> pop_position;
};

// The queue over memory that someone else owns (`capacity` slots, a power of
// two, and the ends).
template <typename T>
class QueueView {
 public:
  DFCCL_HOST_DEVICE QueueView(QueueEnds* ends, QueueSlot<T>* slots, uint64_t capacity)
      : ends_(ends), slots_(slots), capacity_(capacity) {}

  // Once, before any thread uses the memory.
  DFCCL_HOST_DEVICE void Initialize(uint64_t first_position) {
    for (uint64_t i = 0; i < capacity_; ++i) {
      const uint64_t position = first_position + i;
      Slot(position).sequence.StoreRelaxed(2 * position);
    }
    ends_->push_position.StoreRelaxed(first_position);
    ends_->pop_position.StoreRelaxed(first_position);
  }

  // False when full.
  DFCCL_HOST_DEVICE bool TryPush(const T& value) {
    uint64_t position;
    if (!Claim(&ends_->push_position, 0, &position)) return false;
    QueueSlot<T>& slot = Slot(position);
    slot.payload.Store(value);
    // Release: partner is the acquire in TryPop's Claim. SeqCst, so that a
    // producer may look for sleepers next (parking.h).
    slot.sequence.StoreSeqCst(2 * position + 1);
    return true;
  }

  // False when empty.
  DFCCL_HOST_DEVICE bool TryPop(T* value) {
    uint64_t position;
    if (!Claim(&ends_->pop_position, 1, &position)) return false;
    QueueSlot<T>& slot = Slot(position);
    *value = slot.payload.Load();
    // Partner: the acquire in TryPush's Claim, one lap later.
    slot.sequence.StoreRelease(2 * (position + capacity_));
    return true;
  }

  // Exact only when nobody pushes or pops.
  DFCCL_HOST_DEVICE uint64_t ApproxSize() const {
    const uint64_t popped = ends_->pop_position.LoadRelaxed();
    const uint64_t size = ends_->push_position.LoadRelaxed() - popped;
    if (static_cast<int64_t>(size) < 0) return 0;
    return size < capacity_ ? size : capacity_;
  }

  DFCCL_HOST_DEVICE uint64_t capacity() const { return capacity_; }

 private:
  DFCCL_HOST_DEVICE QueueSlot<T>& Slot(uint64_t position) {
    return slots_[position & (capacity_ - 1)];
  }

  // Takes the next position of one end if its slot is ready, i.e. its sequence
  // is 2 * position + `full`. False if the slot is still behind that.
  DFCCL_HOST_DEVICE bool Claim(Atomic<uint64_t>* end, uint64_t full, uint64_t* position) {
    // The position is only a ticket; the slot's sequence orders the payload.
    *position = end->LoadRelaxed();
    for (;;) {
      // Acquire: partner is the sequence store of the other operation. SeqCst,
      // so that a consumer may announce its sleep first (parking.h).
      const uint64_t sequence = Slot(*position).sequence.LoadSeqCst();
      const int64_t ahead = static_cast<int64_t>(sequence - (2 * *position + full));
      if (ahead < 0) return false;
      if (ahead > 0) {
        *position = end->LoadRelaxed();  // someone else has taken it
      } else if (end->CompareExchangeRelaxed(*position, *position + 1)) {
        return true;
      }
    }
  }

  QueueEnds* ends_;
  QueueSlot<T>* slots_;
  uint64_t capacity_;
};

// The queue with its memory. Host only.
template <typename T>
class BoundedQueue {
 public:
  // `capacity` is a power of two.
  explicit BoundedQueue(uint64_t capacity, uint64_t first_position = 0)
      : slots_(new QueueSlot<T>[capacity]), view_(&ends_, slots_, capacity) {
    view_.Initialize(first_position);
  }
  ~BoundedQueue() { delete[] slots_; }
  BoundedQueue(const BoundedQueue&) = delete;
  BoundedQueue& operator=(const BoundedQueue&) = delete;

  bool TryPush(const T& value) { return view_.TryPush(value); }
  bool TryPop(T* value) { return view_.TryPop(value); }
  uint64_t ApproxSize() const { return view_.ApproxSize(); }
  uint64_t capacity() const { return view_.capacity(); }

 private:
  QueueEnds ends_;
  QueueSlot<T>* slots_;
  QueueView<T> view_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_PROTOCOL_BOUNDED_QUEUE_H_
