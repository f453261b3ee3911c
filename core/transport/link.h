// SPDX-License-Identifier: Apache-2.0
// What a process has to do with one other: the messages that wait for it, the wire
// to it once there is one, and its end.
//
// Two words say who is at a direction; nobody waits for them but Cancel and Close.
// Whoever leaves work behind makes sure that somebody else comes for it (Waker).
#ifndef DFCCL_CORE_TRANSPORT_LINK_H_
#define DFCCL_CORE_TRANSPORT_LINK_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/protocol/atomics.h"
#include "core/transport/assembler.h"
#include "core/transport/transport.h"
#include "core/transport/wire.h"

namespace dfccl {

// A message in the queue.
struct Message {
  static constexpr uint32_t kInline = 256;

  char* header() { return large_header ? large_header.get() : inline_header; }

  Message* next = nullptr;
  const char* payload = nullptr;
  int64_t payload_bytes = 0;
  int64_t offset = 0;
  void* owner = nullptr;
  int32_t priority = 0;
  int32_t stream = -1;  // >= 0 from its first frame to its last
  uint32_t header_bytes = 0;
  bool cancelled = false;
  char inline_header[kInline];
  std::unique_ptr<char[]> large_header;
};

// Messages by priority, larger first, and within one in the order of Push.
class MessageQueue {
 public:
  void Push(Message* message);
  // The first of the first level, or, if `started`, the first that has a stream.
  Message* First(bool started) const;
  // Removes a message that is the first of its level.
  void PopFirst(Message* message);
  // Removes all for which `taken` holds and passes them to it. For each message in
  // order; `taken` may keep it.
  template <typename Taken>
  void RemoveIf(Taken taken) {
    for (Level& level : levels_) {
      Message** at = &level.first;
      level.last = nullptr;
      while (Message* message = *at) {
        Message* const next = message->next;
        if (taken(message)) {
          *at = next;
        } else {
          level.last = message;
          at = &message->next;
        }
      }
    }
  }

 private:
  struct Level {
    int32_t priority;
    Message* first;
    Message* last;
  };
  std::vector<Level> levels_;  // larger priority first; empty ones stay until there are many
};

// Gets the transport's thread to poll if nobody does.
class Waker {
 public:
  virtual ~Waker() = default;
  virtual void EnsurePolling() = 0;
};

// The right to move in one direction.
class Turn {
 public:
  bool Try();
  void Take();  // waits
  void Leave() { word_.StoreSeqCst(0); }
  bool Mine() const;  // whether the calling thread has it

 private:
  // The thread that has it. SeqCst: whoever fails to get it has published its work
  // before, and whoever leaves it looks for work after.
  Atomic<uint64_t> word_;
};

class Link {
 public:
  Link(int process, Receiver* receiver, Waker* waker);
  ~Link();

  // False if there is a wire already, the process is down, or epoll refuses.
  bool SetWire(std::unique_ptr<Wire> wire, int epoll);

  bool Post(const OutgoingMessage& message, bool* left);
  void Cancel(void* owner);
  bool Poll();
  void SetDown(const Status& status);
  bool IsDown(Status* status);

  // What happens next on the wire becomes an event. False: there is something to do
  // already.
  bool Arm();
  void Disarm();

  // By the transport's thread.
  void OnEvent();
  void Tick();

  // Sends what is queued, if that is done by the deadline; says goodbye; lets nobody do
  // anything any more. Then, until the deadline, waits for the peer to have it.
  void Close(std::chrono::steady_clock::time_point deadline);
  void Linger(std::chrono::steady_clock::time_point deadline);

 private:
  enum State : uint32_t { kUp, kEnding, kDown };  // kDown: the receiver knows it

  bool HasWork() const;
  bool WriteWhole(Wire* wire, const OutgoingMessage& message);
  // Writes up to `frames`; `report`: the receiver may be called. True if it stopped
  // before there was nothing to do.
  bool PumpMyTurn(int frames, bool report, bool* moved);
  bool Pump(int frames, bool report);
  void Finish(Message* message, bool report);
  void Recycle(Message* message);
  void ReportLeft();
  // For whoever may leave work behind.
  void EnsurePolling();
  void End(const Status& status);
  void ReportDown();

  static constexpr int kFramesPerPoll = 16;

  const int process_;
  Receiver* const receiver_;
  Waker* const waker_;
  std::unique_ptr<Wire> owned_wire_;
  Atomic<Wire*> wire_;
  Atomic<uint32_t> state_;

  std::mutex mutex_;  // guards the following
  Status status_;
  MessageQueue queue_;
  Message* free_ = nullptr;
  std::vector<void*> left_;  // owners of messages that have left, who do not know it
  // Entries of queue_ and left_: both grow under the mutex, and shrink once Sent has
  // returned.
  Atomic<uint32_t> queued_;
  Atomic<uint32_t> unreported_;  // those of left_ alone

  alignas(kCacheLine) Turn out_;
  Atomic<uint32_t> cancelling_;  // threads that want the turn soon
  Message* writing_ = nullptr;   // whose payload the wire may be reading
  uint64_t free_streams_ = ~uint64_t{0};
  bool closed_ = false;
  bool lingers_ = false;

  alignas(kCacheLine) Turn in_;
  Assembler assembler_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_TRANSPORT_LINK_H_
