// SPDX-License-Identifier: Apache-2.0
// What a link's frames go over: rings in shared memory, or a socket. The out side
// and the in side may be used by two threads at once, each by one at a time.
#ifndef DFCCL_CORE_TRANSPORT_WIRE_H_
#define DFCCL_CORE_TRANSPORT_WIRE_H_

#include <cstdint>
#include <string>

#include "core/status.h"
#include "core/transport/assembler.h"
#include "core/transport/frame.h"

namespace dfccl {

// Why a wire has ended.
inline Status LeftJob() { return {StatusCode::kAborted, "has left the job"}; }
inline Status ConnectionLost(const char* why) {
  return {StatusCode::kAborted, std::string("connection lost: ") + why};
}
inline Status CorruptFrame(const char* what) {
  return {StatusCode::kInternal, std::string("connection lost: corrupt frame: ") + what};
}

class Wire {
 public:
  enum class Moved { kNothing, kSome, kEnded };

  virtual ~Wire() = default;

  // Out side.
  // How many bytes of payload (at most `payload`) the next frame may have, with
  // `header` bytes of header; negative: no frame can be written now.
  virtual int64_t Room(uint32_t header, int64_t payload) = 0;
  // Writes a frame that Room has allowed.
  virtual void Write(const Frame& frame, const void* header, const void* payload) = 0;
  // Lets go what Write has held back, as far as there is room.
  virtual void Flush() = 0;
  // Whether something is still held back after Flush. For any thread.
  virtual bool Holding() const = 0;
  // Whether the payload of the last frame is still read.
  virtual bool Reading() const = 0;
  // Makes Reading false, by taking a copy, or (if Lends) by taking the slice back: the
  // rest of its message must not come then.
  virtual void StopReading() = 0;
  // Whether a payload of so many bytes is left where it is, for the peer to fetch.
  virtual bool Lends(int64_t payload) const = 0;
  // The last thing to be said: this end closes in order.
  virtual void Goodbye() = 0;
  // Whether the peer has everything, so that closing cannot lose it.
  virtual bool Delivered() = 0;

  // In side.
  // False if Read would find nothing.
  virtual bool MayRead() const = 0;
  // Feeds what has arrived to the assembler, some frames at most.
  virtual Moved Read(Assembler* assembler) = 0;
  // Why Read said kEnded.
  virtual const Status& end() const = 0;

  // Lets `epoll` report the socket's events with `tag`, some of them only while armed.
  // False: it refuses.
  virtual bool Watch(int epoll, void* tag) = 0;
  // Makes sure that arrivals, and room if asked, become events. False: there is
  // something to do already. By one thread at a time, beside those of the sides.
  virtual bool Arm(bool room) = 0;
  virtual void Disarm() = 0;
  // Whether the next room will become an event.
  virtual bool ArmedForRoom() const = 0;

  // By the transport's thread: the socket has an event.
  virtual void OnEvent() = 0;
  // By the transport's thread, now and then. False: the peer has been silent too
  // long. `*heartbeat`: nothing has been sent since the last time.
  virtual bool Tick(bool* heartbeat) = 0;

  // Ends the connection, also for the peer. Reads and writes go nowhere then.
  virtual void Shut() = 0;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_TRANSPORT_WIRE_H_
