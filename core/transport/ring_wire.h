// SPDX-License-Identifier: Apache-2.0
// A wire of two rings of bytes in a memory file, one for each direction. The
// socket that comes with it carries doorbells, and its end is the peer's end.
//
// A frame is published as a whole, so the reader needs to keep no half frames; its
// payload is copied straight to where the receiver wants it. Large payloads do not go
// through the ring: the reader copies them out of the writer's memory, where the system
// lets it (process_vm_readv: same user, and no rule against it).
#ifndef DFCCL_CORE_TRANSPORT_RING_WIRE_H_
#define DFCCL_CORE_TRANSPORT_RING_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/protocol/byte_ring.h"
#include "core/transport/transport.h"
#include "core/transport/wire.h"

namespace dfccl {

class RingWire : public Wire {
 public:
  static constexpr uint64_t kLeastMemory = uint64_t{64} << 10;
  // Of each ring. Its words come before its bytes, in half of the memory.
  static constexpr uint64_t Capacity(uint64_t memory_bytes) {
    return (memory_bytes / 2 - sizeof(RingWords)) / kCacheLine * kCacheLine;
  }

  // Maps `memory`; keeps `socket`, which stays the caller's if this fails. `first`:
  // this end writes into the first half.
  static std::unique_ptr<RingWire> New(int socket, int memory, bool first,
                                       const TransportOptions& options, Status* status);
  ~RingWire() override;

  int64_t Room(uint32_t header, int64_t payload) override;
  void Write(const Frame& frame, const void* header, const void* payload) override;
  void Flush() override {}
  bool Holding() const override { return false; }
  bool Reading() const override;
  void StopReading() override;
  bool Lends(int64_t payload) const override;
  void Goodbye() override;
  bool Delivered() override { return true; }

  bool MayRead() const override;
  Moved Read(Assembler* assembler) override;
  const Status& end() const override { return end_; }

  bool Watch(int epoll, void* tag) override;
  bool Arm(bool room) override;
  void Disarm() override;
  bool ArmedForRoom() const override;

  void OnEvent() override;
  bool Tick(bool* heartbeat) override;
  void Shut() override;

 private:
  // The bytes of a ring, and where in it the next byte goes or comes from.
  class Bytes {
   public:
    Bytes(char* data, uint64_t capacity) : data_(data), capacity_(capacity) {}
    void Put(const void* from, uint64_t bytes);
    void Get(void* to, uint64_t bytes);
    void Skip(uint64_t bytes);

   private:
    char* const data_;
    const uint64_t capacity_;
    uint64_t offset_ = 0;
  };

  RingWire(int socket, char* memory, uint64_t memory_bytes, bool first,
           const TransportOptions& options);
  int64_t RoomFor(uint64_t fixed, uint64_t least, uint64_t most);
  void Ring();
  Moved End(Status status);
  void TryToBorrow();
  bool Fetch(void* to, uint64_t address, uint64_t bytes) const;
  bool LenderLives() const;

  static constexpr int kFramesPerRead = 16;

  const int socket_;
  char* const memory_;
  const uint64_t memory_bytes_;
  const uint64_t capacity_;
  const uint64_t slice_bytes_;
  const int64_t lent_bytes_;
  const int64_t lent_slice_bytes_;
  int epoll_ = -1;
  // How the socket's end was noticed; 0: not yet.
  Atomic<int32_t> socket_end_;
  Atomic<uint32_t> bad_reader_;  // the peer's position in our ring cannot be

  // Out side.
  RingWords* const out_words_;
  alignas(kCacheLine) RingWriter writer_;
  Bytes out_;
  uint64_t frames_ = 0;
  Atomic<uint64_t> room_awaited_;
  Atomic<uint64_t> lent_until_;  // the end of the frame that lends; 0: nothing is lent
  bool lending_ = false;         // the frame that Room has allowed last
  uint64_t proof_;

  // In side.
  RingWords* const in_words_;
  alignas(kCacheLine) RingReader reader_;
  Bytes in_;
  Status end_;
  bool tried_to_borrow_ = false;
  pid_t lender_ = 0;
  int lender_alive_ = -1;  // a pidfd: readable once it is not; -1: nothing can be borrowed
};

}  // namespace dfccl

#endif  // DFCCL_CORE_TRANSPORT_RING_WIRE_H_
