// SPDX-License-Identifier: Apache-2.0
// A wire over one stream socket, or several. Small frames are gathered into a buffer
// and go out together; a large payload is written from where it lies, and read to
// where the receiver wants it.
//
// Of several sockets both ends use one until a frame with a large payload has gone
// through it, and then the next: so the reader knows where the next frame comes, and
// large messages fill the windows of all.
#ifndef DFCCL_CORE_TRANSPORT_SOCKET_WIRE_H_
#define DFCCL_CORE_TRANSPORT_SOCKET_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/protocol/atomics.h"
#include "core/transport/wire.h"

namespace dfccl {

class SocketWire : public Wire {
 public:
  // In a time of silence_ns there must be so many ticks.
  static constexpr int kTicksOfSilence = 5;

  // Keeps `sockets`, which both ends list in the same order. `silence_ns`: after which
  // a peer on another host is lost.
  SocketWire(const std::vector<int>& sockets, int64_t slice_bytes, int64_t silence_ns);
  ~SocketWire() override;

  int64_t Room(uint32_t header, int64_t payload) override;
  void Write(const Frame& frame, const void* header, const void* payload) override;
  void Flush() override;
  bool Holding() const override;
  bool Reading() const override { return lanes_[out_]->payload_bytes > 0; }
  void StopReading() override;
  bool Lends(int64_t) const override { return false; }
  void Goodbye() override;
  bool Delivered() override;

  bool MayRead() const override { return true; }
  Moved Read(Assembler* assembler) override;
  const Status& end() const override { return end_; }

  bool Watch(int epoll, void* tag) override;
  bool Arm(bool room) override;
  void Disarm() override {}
  bool ArmedForRoom() const override;

  void OnEvent() override;
  bool Tick(bool* heartbeat) override;
  void Shut() override;

 private:
  // A socket and what goes through it.
  struct Lane {
    Lane(int socket, size_t buffer_bytes);
    ~Lane();

    const int socket;
    Atomic<uint32_t> armed;  // what the next event may be; 0: none comes

    // Out side: first the bytes of buffer from buffer_begin, then those of payload.
    std::unique_ptr<char[]> buffer;
    size_t buffer_begin = 0;
    size_t buffer_end = 0;
    const char* payload = nullptr;
    size_t payload_bytes = 0;
    Atomic<uint32_t> holding;

    // In side: bytes that have arrived and no frame has used.
    std::unique_ptr<char[]> arrived;
    size_t arrived_begin = 0;
    size_t arrived_end = 0;
  };

  void Send(Lane* lane);
  void Flush(Lane* lane);
  bool Consume(Assembler* assembler);
  ssize_t ReadSlice(Lane* lane, Assembler* assembler, int64_t bytes);
  Moved ReadSome(Assembler* assembler);
  Moved EndOf(ssize_t received);
  void Arm(Lane* lane, uint32_t what);

  static constexpr uint32_t kArmed = 1;
  static constexpr uint32_t kArmedForRoom = 2;

  std::vector<std::unique_ptr<Lane>> lanes_;
  const int64_t slice_bytes_;
  bool network_ = false;
  int64_t silence_ns_ = 0;
  int epoll_ = -1;
  void* tag_ = nullptr;
  Atomic<uint32_t> armed_;  // somebody waits for the next arrival to become an event

  // Out side.
  size_t out_ = 0;  // the lane of the next frame
  uint64_t frames_ = 0;
  Atomic<uint64_t> sent_;       // bytes
  Atomic<int32_t> send_error_;  // 0, or the errno with which sending ended

  // In side.
  Atomic<uint32_t> in_;        // the lane of the next frame, or of what is missing of one
  bool in_moves_ = false;      // when this frame is over
  Atomic<uint64_t> received_;  // bytes
  Status end_;

  // The transport's thread.
  uint64_t sent_before_ = 0;
  uint64_t received_before_ = 0;
  int silent_ticks_ = 0;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_TRANSPORT_SOCKET_WIRE_H_
