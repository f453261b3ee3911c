// SPDX-License-Identifier: Apache-2.0
// A wire over a stream socket. Small frames are gathered into a buffer and go out
// together; a large payload is written from where it lies, and read to where the
// receiver wants it.
#ifndef DFCCL_CORE_TRANSPORT_SOCKET_WIRE_H_
#define DFCCL_CORE_TRANSPORT_SOCKET_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/protocol/atomics.h"
#include "core/transport/wire.h"

namespace dfccl {

class SocketWire : public Wire {
 public:
  // In a time of silence_ns there must be so many ticks.
  static constexpr int kTicksOfSilence = 5;

  // Keeps `socket`. `silence_ns`: after which a peer on another host is lost.
  SocketWire(int socket, int64_t slice_bytes, int64_t silence_ns);
  ~SocketWire() override;

  int64_t Room(uint32_t header, int64_t payload) override;
  void Write(const Frame& frame, const void* header, const void* payload) override;
  void Flush() override;
  bool Holding() const override { return holding_.LoadSeqCst() != 0; }
  bool Reading() const override { return payload_bytes_ > 0; }
  void StopReading() override;
  void Goodbye() override;
  bool Delivered() override;

  bool MayRead() const override { return true; }
  Moved Read(Assembler* assembler) override;
  const Status& end() const override { return end_; }

  bool Watch(int epoll, void* tag) override;
  bool Arm(bool room) override;
  void Disarm() override {}
  bool ArmedForRoom() const override { return armed_.LoadSeqCst() == kArmedForRoom; }

  void OnEvent() override;
  bool Tick(bool* heartbeat) override;
  void Shut() override;

 private:
  void Send();
  bool Consume(Assembler* assembler);
  ssize_t ReadSlice(Assembler* assembler, int64_t bytes);
  Moved EndOf(ssize_t received);

  static constexpr uint32_t kArmed = 1;
  static constexpr uint32_t kArmedForRoom = 2;

  const int socket_;
  const int64_t slice_bytes_;
  const bool network_;
  const int64_t silence_ns_;
  int epoll_ = -1;
  void* tag_ = nullptr;
  Atomic<uint32_t> armed_;  // what the next event may be; 0: none comes

  // Out side: first the bytes of buffer_ from buffer_begin_, then those of payload_.
  std::unique_ptr<char[]> buffer_;
  size_t buffer_begin_ = 0;
  size_t buffer_end_ = 0;
  const char* payload_ = nullptr;
  size_t payload_bytes_ = 0;
  uint64_t frames_ = 0;
  Atomic<uint32_t> holding_;
  Atomic<uint64_t> sent_;       // bytes
  Atomic<int32_t> send_error_;  // 0, or the errno with which sending ended

  // In side: bytes that have arrived and no frame has used.
  std::unique_ptr<char[]> arrived_;
  size_t arrived_begin_ = 0;
  size_t arrived_end_ = 0;
  Atomic<uint64_t> received_;  // bytes
  Status end_;

  // The transport's thread.
  uint64_t sent_before_ = 0;
  uint64_t received_before_ = 0;
  int silent_ticks_ = 0;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_TRANSPORT_SOCKET_WIRE_H_
