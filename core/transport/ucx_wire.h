// SPDX-License-Identifier: Apache-2.0
// A wire over UCX: each frame is an active message, copied into a buffer that UCX reads and
// taken from one that it has filled. A socket, by which the ends have proven who they are,
// carries their UCX addresses, and its end is that of the wire: UCX may miss a death.
//
// UCX delivers to whoever reaches its address, in an order of its own. So each message has
// the receiver's token, which only the socket has carried, and its number; at most kWindow
// frames are under way that the peer has not used.
#ifndef DFCCL_CORE_TRANSPORT_UCX_WIRE_H_
#define DFCCL_CORE_TRANSPORT_UCX_WIRE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/protocol/atomics.h"
#include "core/transport/silence.h"
#include "core/transport/ucx_api.h"
#include "core/transport/wire.h"

namespace dfccl {

class UcxWire : public Wire {
 public:
  // Keeps `socket`. nullptr, and the socket stays the caller's: *status says why.
  static std::unique_ptr<UcxWire> New(const UcxApi* api, int socket, int64_t slice_bytes,
                                      int64_t silence_ns, Status* status);
  ~UcxWire() override;

  int64_t Room(uint32_t header, int64_t payload) override;
  void Write(const Frame& frame, const void* header, const void* payload) override;
  void Flush() override;
  bool Holding() const override { return sending_.LoadSeqCst() != 0; }
  bool Reading() const override { return false; }
  void StopReading() override {}
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

  void OnEvent() override { armed_.StoreSeqCst(0); }
  bool Tick(bool* heartbeat) override;
  void Shut() override;

 private:
  static constexpr uint32_t kWindow = 64;  // frames
  static constexpr size_t kOutgoing = 16;  // frames that UCX may be reading
  static constexpr size_t kTokenBytes = 16;
  using Token = std::array<char, kTokenBytes>;

  // Before each frame; an acknowledgement has nothing behind it.
  struct Envelope {
    Token token;
    uint64_t number;   // of the frame
    uint64_t used;     // how many frames of the receiver's the sender has used
    uint64_t arrived;  // how many have arrived in order
  };
  // What UCX reads until it says that it has.
  struct Outgoing {
    UcxWire* wire;
    Envelope envelope;
    std::unique_ptr<char[]> bytes;  // nullptr: for an acknowledgement
    bool busy = false;
  };
  struct Arrived {
    const char* data = nullptr;  // of UCX's, to be given back, or copy's
    size_t bytes = 0;
    std::unique_ptr<char[]> copy;
  };

  UcxWire(const UcxApi* api, int socket, int64_t slice_bytes, int64_t silence_ns);
  Status SetUp();
  bool HasRoom() const;
  void WriteFrame(const Frame& frame, const void* header, const void* payload);
  void Post(Outgoing* outgoing, size_t bytes);
  void Left(Outgoing* outgoing);
  void Acknowledge();
  void Progress();
  void ProgressOut();
  void Await(uint32_t more);
  void ReadSocket();
  void Connect();
  void Fail(Status status);
  UcxStatus OnMessage(const void* header, size_t header_bytes, void* data, size_t bytes,
                      const UcxArrival& arrival);
  const char* Feed(const char* bytes, size_t size, Assembler* assembler);
  size_t MostBytes() const;
  void Release(Arrived* arrived);

  const UcxApi* const api_;
  const int socket_;
  const int64_t slice_bytes_;
  Token token_;  // of what comes

  // Guards UCX and the following: a worker is one thread's at a time.
  mutable std::mutex mutex_;
  UcxWorker worker_ = nullptr;
  UcxEndpoint endpoint_ = nullptr;  // once the peer's address has come
  int descriptor_ = -1;             // of the worker's events
  std::string greeting_;            // what has come of the peer's token and address
  Token peer_token_ = {};
  std::vector<std::unique_ptr<Outgoing>> outgoing_;
  Outgoing acknowledgement_;
  uint64_t sent_ = 0;             // frames
  uint64_t used_by_peer_ = 0;     // of those
  uint64_t arrived_at_peer_ = 0;  // of those
  uint64_t arrived_ = 0;          // frames, in order
  uint64_t used_ = 0;             // of those
  uint64_t told_used_ = 0;        // the last that the peer has been told
  uint64_t told_arrived_ = 0;
  std::array<Arrived, kWindow> window_;  // by number
  Status failure_;                       // why nothing comes any more
  bool peer_left_ = false;               // the socket has ended
  uint32_t reads_ = 0;
  int epoll_ = -1;
  void* tag_ = nullptr;

  Atomic<uint32_t> sending_;  // messages that UCX still reads
  Atomic<uint32_t> armed_;
  Atomic<uint64_t> messages_out_, messages_in_;  // for ticks
  Status end_;                                   // the in side's

  // The transport's thread.
  Silence silence_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_TRANSPORT_UCX_WIRE_H_
