// SPDX-License-Identifier: Apache-2.0
// Messages between the processes of a job, cut into slices, over links that
// somebody else has connected and authenticated. Nothing here waits: Post queues,
// and whoever has time calls Poll. The transport knows nothing of collectives.
#ifndef DFCCL_CORE_TRANSPORT_TRANSPORT_H_
#define DFCCL_CORE_TRANSPORT_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/status.h"

namespace dfccl {

struct OutgoingMessage {
  static constexpr uint32_t kMaxHeader = 4096;
  const void* header = nullptr;  // copied by Post; at least one byte
  uint32_t header_bytes = 0;
  // Read in place until Receiver::Sent or the return of Cancel.
  const void* payload = nullptr;
  int64_t payload_bytes = 0;
  int32_t priority = 0;   // larger first, also in the middle of a smaller one
  void* owner = nullptr;  // whom Sent and Cancel are about; nullptr: nobody, no payload
};

// What arrives. Called by Poll only, on whatever thread calls it, with no lock of the
// transport's that others wait for: implementations must not block and not call back
// into Poll or Close; they may call Post and Cancel. Slices of one process come on one
// thread at a time; Sent may come on another at the same time. After Down come neither.
class Receiver {
 public:
  virtual ~Receiver() = default;
  // Where the next slice of a payload goes, at `offset` of the payload; nullptr: it
  // is thrown away. EndSlice follows at once, in any case, with nothing of this
  // process in between.
  virtual void* BeginSlice(int process, const void* header, uint32_t header_bytes,
                           int64_t payload_bytes, int64_t offset, int64_t bytes) = 0;
  // That slice is there; `last`: the whole message is. A message without payload
  // has one empty slice and no BeginSlice. No bytes, and not the last: it was taken back
  // (Cancel), with the rest of the message.
  virtual void EndSlice(int process, const void* header, uint32_t header_bytes,
                        int64_t payload_bytes, int64_t offset, int64_t bytes, bool last) = 0;
  // A message of `owner` has left: its payload is not read any more. Also called
  // for messages that were queued when their process went down.
  virtual void Sent(void* owner) = 0;
  // Around each Poll of the transport's own thread, with nothing held.
  virtual void BeginPoll() {}
  virtual void EndPoll() {}
  // The process is gone for good; `status` says how that was noticed. Once for
  // each process. Nothing is received from it any more.
  virtual void Down(int process, const Status& status) = 0;
};

struct TransportOptions {
  int64_t slice_bytes = int64_t{64} << 10;
  // A payload of at least so many bytes, for a process of this host, is copied by that one
  // straight out of the memory of this, in slices of at most `lent_slice_bytes`, where the
  // system allows it. 0: never.
  int64_t lent_bytes = int64_t{256} << 10;
  int64_t lent_slice_bytes = int64_t{1} << 20;
  // How long the transport's own thread looks for arrivals before it sleeps.
  int64_t spin_ns = 50'000;
  // A peer over the network that says nothing for so long (it sends heartbeats,
  // whatever its program does) is down. 0: never.
  int64_t silence_ns = 30'000'000'000;
};

class Transport {
 public:
  static constexpr int kMostProcesses = 4096;
  static constexpr size_t kMostSockets = 16;  // of a link

  // Starts the thread that polls when nobody else does. nullptr: there is no file
  // descriptor for it.
  static std::unique_ptr<Transport> New(int process, Receiver* receiver,
                                        const TransportOptions& options);
  virtual ~Transport() = default;

  // Takes over connected stream sockets (AF_UNIX, or TCP) to `process`, on which
  // nothing has been sent yet; several, which both ends list in the same order, share
  // large payloads. `memory` >= 0: a memory file that both ends have mapped in common,
  // so that data goes through rings in it and the one socket is only doorbell and death
  // bell; the end with the smaller process number uses the first half for what it
  // sends. The file holds zeros, at least 64 KiB, and must not shrink (seal it). All
  // descriptors are the transport's then, also if this fails. Queued messages go out.
  // Thread-safe.
  virtual Status AddLink(int process, const std::vector<int>& sockets, int memory) = 0;

  // Queues a message; before there is a link it waits for one. Messages to a
  // process with equal priority arrive in the order of their posts. Returns false,
  // and nothing will happen, if the process is down. Thread-safe, never waits.
  // A small message goes out at once if nothing is before it. If `left` is given, it
  // says whether that has happened; then there will be no Sent.
  virtual bool Post(int process, const OutgoingMessage& message, bool* left = nullptr) = 0;

  // Takes back what `owner` has posted to `process` and has not left yet: Sent is
  // called for these, too. When it returns, no payload of `owner` is read any more.
  // The receiver of one in the middle sees no `last`. Thread-safe.
  virtual void Cancel(int process, void* owner) = 0;

  // Moves what can be moved now, in and out, on all links. True if anything was.
  // Thread-safe; links that another thread is at are left to it.
  virtual bool Poll() = 0;

  // While a thread is between these two it calls Poll again and again, peers need not
  // ring, and the transport's own thread sleeps. Cheap enough for every wait; may
  // nest and overlap. Poll works without, but then arrivals also wake that thread.
  virtual void BeginPolling() = 0;
  virtual void EndPolling() = 0;

  // Declares a process down, for a reason that the transport cannot see itself.
  virtual void SetDown(int process, const Status& status) = 0;

  virtual bool IsDown(int process, Status* status) = 0;

  // Sends what is queued, for a second at most, says goodbye to all peers, so that they
  // can tell an end from a death, and ends the thread. Nothing of the receiver is
  // called any more. The destructor does it, too, and closes everything.
  virtual void Close() = 0;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_TRANSPORT_TRANSPORT_H_
