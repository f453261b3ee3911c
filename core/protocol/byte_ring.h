// SPDX-License-Identifier: Apache-2.0
// The words of a ring of bytes that one side writes and the other reads, and how
// either side goes to sleep when there is nothing to read or no room. Which bytes
// are whose follows from two positions that only grow:
//
//   read <= position < written             the reader's
//   written <= position < read + capacity  the writer's
//
// The other side may be another process, and is not trusted: a position of its
// that cannot be is reported, never used.
//
//   sleeper                                the other side
//   Arm() its doorbell                     store its position
//   look at the other's position again     TryTake() the doorbell: if armed, ring
//
// Both sides store, then look at the other's word, in one total order (SeqCst): at
// least one of them sees the other's store. A bell too many is harmless.
//
// What the writer publishes may also say where in its own memory something lies that
// it lends to the reader, until the reader has given those bytes back. The writer can
// take it back at any time and need not wait for the reader to notice:
//
//   writer                                 reader
//   revokes                                copies what was lent
//   uses the memory for something else     looks whether it was revoked
//
// Both revoke and look by read-modify-writes of one word, so one comes first: either
// the reader finds it revoked, and throws away what it has copied, or it had copied all
// before the writer went on.
#ifndef DFCCL_CORE_PROTOCOL_BYTE_RING_H_
#define DFCCL_CORE_PROTOCOL_BYTE_RING_H_

#include <stdint.h>

#include "core/protocol/atomics.h"

namespace dfccl {

class alignas(kCacheLine) Doorbell {
 public:
  // By the sleeper, before it looks again.
  DFCCL_HOST_DEVICE void Arm() { word_.StoreSeqCst(1); }
  // By the sleeper, once it is awake.
  DFCCL_HOST_DEVICE void Disarm() {
    if (word_.LoadRelaxed() != 0) word_.StoreRelaxed(0);
  }
  DFCCL_HOST_DEVICE bool Armed() const { return word_.LoadSeqCst() != 0; }
  // By the other side, after it has stored its position. True: the caller must ring.
  DFCCL_HOST_DEVICE bool TryTake() {
    return word_.LoadSeqCst() != 0 && word_.ExchangeSeqCst(0) != 0;
  }

 private:
  Atomic<uint32_t> word_;
};

// What both sides share; all zero at first.
struct RingWords {
  alignas(kCacheLine) Atomic<uint64_t> written;  // stored by the writer only
  alignas(kCacheLine) Atomic<uint64_t> read;     // stored by the reader only
  Doorbell reader;                               // sleeps until there is data
  Doorbell writer;                               // sleeps until there is room
  // By the writer: what it has lent before this position is not to be used.
  alignas(kCacheLine) Atomic<uint64_t> revoked;
  // By the writer, once: where 8 bytes are that equal `proof` (address and process last),
  // by which the reader sees whether it can read the writer's memory. 0: nothing is lent.
  Atomic<uint64_t> lender;
  Atomic<uint64_t> proof_address;
  Atomic<uint64_t> proof;
  alignas(kCacheLine) Atomic<uint32_t> borrows;  // by the reader, once: it can

  // The second look, after Arm, by any thread of the side that goes to sleep.
  DFCCL_HOST_DEVICE uint64_t Used() const { return written.LoadSeqCst() - read.LoadSeqCst(); }
};

// The writer's side.
class RingWriter {
 public:
  DFCCL_HOST_DEVICE RingWriter(RingWords* words, uint64_t capacity)
      : words_(words), capacity_(capacity) {}

  // What is free as far as is known.
  DFCCL_HOST_DEVICE uint64_t room() const { return capacity_ - (written_ - read_); }

  // Looks what the reader has given back. False: its position cannot be.
  // Acquire: partner is the store in RingReader::Release.
  DFCCL_HOST_DEVICE bool Look() {
    const uint64_t read = words_->read.LoadAcquire();
    if (written_ - read > written_ - read_) return false;
    read_ = read;
    return true;
  }

  // Where the next byte goes.
  DFCCL_HOST_DEVICE uint64_t position() const { return written_; }

  // Whether everything before `position` was given back.
  // Acquire: partner is the store in RingReader::Release.
  DFCCL_HOST_DEVICE bool Passed(uint64_t position) const {
    return words_->read.LoadAcquire() >= position;
  }

  // Takes back what was lent. SeqCst: partner is the look in RingReader::Revoked.
  DFCCL_HOST_DEVICE void Revoke() { words_->revoked.ExchangeSeqCst(written_); }

  // The next `bytes` (at most room()) are written. True: ring the reader's bell.
  // Release: partners are the loads in RingReader::Look and in Used.
  DFCCL_HOST_DEVICE bool Publish(uint64_t bytes) {
    written_ += bytes;
    words_->written.StoreSeqCst(written_);
    return words_->reader.TryTake();
  }

 private:
  RingWords* const words_;
  const uint64_t capacity_;
  uint64_t written_ = 0;
  uint64_t read_ = 0;
};

// The reader's side.
class RingReader {
 public:
  DFCCL_HOST_DEVICE RingReader(RingWords* words, uint64_t capacity)
      : words_(words), capacity_(capacity) {}

  // What there is to read as far as is known.
  DFCCL_HOST_DEVICE uint64_t available() const { return written_ - read_; }

  // Looks what the writer has published. False: its position cannot be.
  // Acquire: partner is the store in RingWriter::Publish.
  DFCCL_HOST_DEVICE bool Look() {
    const uint64_t written = words_->written.LoadAcquire();
    if (written - read_ > capacity_ || written - read_ < written_ - read_) return false;
    written_ = written;
    return true;
  }

  // After what was lent by the first `bytes` was copied: whether it was taken back.
  // SeqCst: partner is the exchange in RingWriter::Revoke.
  DFCCL_HOST_DEVICE bool Revoked(uint64_t bytes) {
    return words_->revoked.FetchAddSeqCst(0) >= read_ + bytes;
  }

  // The first `bytes` (at most available()) are not read any more. True: ring the
  // writer's bell. It waits for half of the ring at most, and for less it is not
  // woken. Release: partners are the loads in RingWriter::Look and in Used.
  DFCCL_HOST_DEVICE bool Release(uint64_t bytes) {
    read_ += bytes;
    words_->read.StoreSeqCst(read_);
    return available() <= capacity_ / 2 && words_->writer.TryTake();
  }

 private:
  RingWords* const words_;
  const uint64_t capacity_;
  uint64_t read_ = 0;
  uint64_t written_ = 0;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_PROTOCOL_BYTE_RING_H_
