// SPDX-License-Identifier: Apache-2.0
#include "core/transport/socket_wire.h"

#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace dfccl {

namespace {

// Payloads up to this size are copied into the buffer.
constexpr int64_t kCopied = 4096;
// Frames are gathered until the buffer holds so much.
constexpr size_t kGathered = size_t{16} << 10;
constexpr size_t kLargestFrame = Frame::kSize + OutgoingMessage::kMaxHeader + kCopied;
constexpr size_t kArrived = size_t{16} << 10;
// What is read into the buffer after a payload: the beginning of the next frame.
constexpr size_t kReadAhead = Frame::kSize;
// What may lie unsent in the kernel, of all sockets, so that an urgent message need not
// wait long.
constexpr int kUnsent = 256 << 10;
constexpr int kReadsPerPoll = 16;
// After a frame with so much payload comes the next socket's turn.
constexpr int64_t kMoves = 16 << 10;

bool IsNetwork(int socket) {
  sockaddr_storage address;
  socklen_t size = sizeof(address);
  return getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
         address.ss_family != AF_UNIX;
}

}  // namespace

SocketWire::Lane::Lane(int socket, size_t buffer_bytes)
    : socket(socket), buffer(new char[buffer_bytes]), arrived(new char[kArrived]) {}

SocketWire::Lane::~Lane() { close(socket); }

SocketWire::SocketWire(const std::vector<int>& sockets, int64_t slice_bytes, int64_t silence_ns)
    : slice_bytes_(slice_bytes) {
  const int yes = 1;
  const int unsent = kUnsent / static_cast<int>(sockets.size());
  for (int socket : sockets) {
    lanes_.push_back(std::make_unique<Lane>(
        socket, kGathered + kLargestFrame + static_cast<size_t>(slice_bytes) + Frame::kSize));
    network_ = network_ || IsNetwork(socket);
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    setsockopt(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof(unsent));
  }
  if (network_) silence_ns_ = silence_ns;
}

SocketWire::~SocketWire() = default;

int64_t SocketWire::Room(uint32_t, int64_t payload) {
  Lane* const lane = lanes_[out_].get();
  const auto full = [lane] { return lane->payload_bytes > 0 || lane->buffer_end >= kGathered; };
  if (full()) Flush(lane);
  return full() ? -1 : std::min(payload, slice_bytes_);
}

void SocketWire::Write(const Frame& frame, const void* header, const void* payload) {
  Lane* const lane = lanes_[out_].get();
  char* at = lane->buffer.get() + lane->buffer_end;
  frame.Encode(frames_++, at);
  at += Frame::kSize;
  if (frame.header_bytes > 0) std::memcpy(at, header, frame.header_bytes);
  at += frame.header_bytes;
  lane->buffer_end = static_cast<size_t>(at - lane->buffer.get());
  if (frame.bytes == 0) return;
  lane->payload = static_cast<const char*>(payload);
  lane->payload_bytes = frame.bytes;
  if (frame.bytes <= kCopied) StopReading();
  if (frame.bytes < kMoves || lanes_.size() == 1) return;
  // The next frame need not wait for this socket.
  Send(lane);
  StopReading();
  Flush(lane);
  out_ = (out_ + 1) % lanes_.size();
}

void SocketWire::StopReading() {
  Lane* const lane = lanes_[out_].get();
  if (lane->payload_bytes == 0) return;
  std::memcpy(lane->buffer.get() + lane->buffer_end, lane->payload, lane->payload_bytes);
  lane->buffer_end += lane->payload_bytes;
  lane->payload_bytes = 0;
}

void SocketWire::Flush() {
  for (const std::unique_ptr<Lane>& lane : lanes_) Flush(lane.get());
}

void SocketWire::Flush(Lane* lane) {
  Send(lane);
  const uint32_t holding = lane->buffer_end > 0 || lane->payload_bytes > 0;
  if (lane->holding.LoadRelaxed() != holding) lane->holding.StoreSeqCst(holding);
}

bool SocketWire::Holding() const {
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    if (lane->holding.LoadSeqCst() != 0) return true;
  }
  return false;
}

void SocketWire::Send(Lane* lane) {
  while (lane->buffer_begin < lane->buffer_end || lane->payload_bytes > 0) {
    if (send_error_.LoadRelaxed() != 0) {  // nobody will ever read it
      lane->buffer_begin = lane->buffer_end = lane->payload_bytes = 0;
      return;
    }
    iovec parts[2] = {
        {lane->buffer.get() + lane->buffer_begin, lane->buffer_end - lane->buffer_begin},
        {const_cast<char*>(lane->payload), lane->payload_bytes}};
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = lane->payload_bytes > 0 ? 2 : 1;
    const ssize_t sent = sendmsg(lane->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return;
      send_error_.StoreRelease(errno);  // partner: the load in EndOf
      // The in side finds the end, after what came before it, at whichever socket it is.
      for (const std::unique_ptr<Lane>& each : lanes_) shutdown(each->socket, SHUT_RD);
      continue;
    }
    sent_.StoreRelaxed(sent_.LoadRelaxed() + static_cast<uint64_t>(sent));
    const size_t of_buffer =
        std::min(static_cast<size_t>(sent), lane->buffer_end - lane->buffer_begin);
    const size_t of_payload = static_cast<size_t>(sent) - of_buffer;
    lane->buffer_begin += of_buffer;
    lane->payload += of_payload;
    lane->payload_bytes -= of_payload;
    if (lane->buffer_begin == lane->buffer_end) lane->buffer_begin = lane->buffer_end = 0;
  }
}

void SocketWire::Goodbye() {
  StopReading();
  Frame frame;
  frame.kind = FrameKind::kGoodbye;
  Write(frame, nullptr, nullptr);
  Flush();
}

bool SocketWire::Delivered() {
  Flush();
  if (Holding()) return false;
  // A network connection that is closed with something unread is reset, and what its
  // peer has not acknowledged is lost.
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    int unacknowledged = 0;
    if (network_) ioctl(lane->socket, SIOCOUTQ, &unacknowledged);
    if (unacknowledged != 0) return false;
  }
  return true;
}

// Uses up what has arrived. False: it is wrong, or the end.
bool SocketWire::Consume(Assembler* assembler) {
  while (!assembler->goodbye()) {
    Lane* const lane = lanes_[in_.LoadRelaxed()].get();
    const size_t available = lane->arrived_end - lane->arrived_begin;
    const char* const at = lane->arrived.get() + lane->arrived_begin;
    size_t used;
    if (assembler->header_wanted() > 0) {
      used = assembler->header_wanted();
      if (available < used) return true;
      std::memcpy(assembler->header(), at, used);
      assembler->HeaderThere();
    } else if (assembler->payload_wanted() > 0) {
      used = std::min(available, static_cast<size_t>(assembler->payload_wanted()));
      if (used == 0) return true;
      void* const to = assembler->BeginSlice(static_cast<int64_t>(used));
      if (to != nullptr) std::memcpy(to, at, used);
      assembler->EndSlice(static_cast<int64_t>(used));
    } else if (in_moves_) {
      in_moves_ = false;
      in_.StoreSeqCst((in_.LoadRelaxed() + 1) % static_cast<uint32_t>(lanes_.size()));
      continue;
    } else {
      used = Frame::kSize;
      if (available < used) return true;
      const char* wrong = assembler->Begin(at);
      if (wrong == nullptr && assembler->lent()) wrong = "lent payload over a socket";
      if (wrong != nullptr) {
        end_ = CorruptFrame(wrong);
        return false;
      }
      in_moves_ = assembler->payload_wanted() >= kMoves;
    }
    lane->arrived_begin += used;
  }
  end_ = LeftJob();
  return false;
}

// Reads `bytes` of the payload, which are known to have arrived, and a little of what
// comes after it.
ssize_t SocketWire::ReadSlice(Lane* lane, Assembler* assembler, int64_t bytes) {
  void* const to = assembler->BeginSlice(bytes);
  ssize_t received = 0;
  if (to != nullptr) {
    iovec parts[2] = {{to, static_cast<size_t>(bytes)}, {lane->arrived.get(), kReadAhead}};
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    received = recvmsg(lane->socket, &message, MSG_DONTWAIT);
    lane->arrived_begin = 0;
    lane->arrived_end = static_cast<size_t>(std::max<ssize_t>(received - bytes, 0));
  } else {
    while (received < bytes) {
      const size_t part = std::min(kArrived, static_cast<size_t>(bytes - received));
      const ssize_t read = recv(lane->socket, lane->arrived.get(), part, MSG_DONTWAIT);
      if (read <= 0) break;
      received += read;
    }
  }
  assembler->EndSlice(std::max<int64_t>(std::min<int64_t>(received, bytes), 0));
  return received;
}

Wire::Moved SocketWire::Read(Assembler* assembler) {
  const uint32_t before = in_.LoadRelaxed();
  const Moved moved = ReadSome(assembler);
  const uint32_t now = in_.LoadRelaxed();
  // Whoever arms meanwhile arms this lane, or has been seen here (SeqCst, both sides).
  if (now != before && armed_.LoadSeqCst() != 0) Arm(lanes_[now].get(), kArmed);
  return moved;
}

Wire::Moved SocketWire::ReadSome(Assembler* assembler) {
  Moved moved = Moved::kNothing;
  for (int reads = 0; reads < kReadsPerPoll; ++reads) {
    Lane* const lane = lanes_[in_.LoadRelaxed()].get();
    ssize_t received;
    int available = 0;
    if (assembler->header_wanted() == 0 && assembler->payload_wanted() > kCopied &&
        ioctl(lane->socket, FIONREAD, &available) == 0 && available > 0) {
      received =
          ReadSlice(lane, assembler, std::min<int64_t>(available, assembler->payload_wanted()));
    } else {
      char* const arrived = lane->arrived.get();
      std::memmove(arrived, arrived + lane->arrived_begin, lane->arrived_end - lane->arrived_begin);
      lane->arrived_end -= lane->arrived_begin;
      lane->arrived_begin = 0;
      received = recv(lane->socket, arrived + lane->arrived_end, kArrived - lane->arrived_end,
                      MSG_DONTWAIT);
      if (received > 0) lane->arrived_end += static_cast<size_t>(received);
    }
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && errno == EAGAIN) return moved;
    if (received <= 0) return EndOf(received);
    received_.StoreRelaxed(received_.LoadRelaxed() + static_cast<uint64_t>(received));
    moved = Moved::kSome;
    if (!Consume(assembler)) return Moved::kEnded;
  }
  return moved;
}

Wire::Moved SocketWire::EndOf(ssize_t received) {
  const int error = received < 0 ? errno : send_error_.LoadAcquire();
  end_ = ConnectionLost(error != 0 ? std::strerror(error) : "closed by the peer");
  return Moved::kEnded;
}

bool SocketWire::Watch(int epoll, void* tag) {
  epoll_ = epoll;
  tag_ = tag;
  epoll_event event = {};
  event.events = EPOLLONESHOT;
  event.data.ptr = tag_;
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, lane->socket, &event) != 0) return false;
  }
  return true;
}

bool SocketWire::Arm(bool room) {
  // What is there already becomes an event at once. One that has been asked for and
  // not come stays asked for.
  armed_.StoreSeqCst(1);
  Lane* const in = lanes_[in_.LoadSeqCst()].get();
  bool waits = false;
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    const bool holding = room && lane->holding.LoadSeqCst() != 0;
    waits = waits || holding;
    if (holding || lane.get() == in) Arm(lane.get(), holding ? kArmedForRoom : kArmed);
  }
  return waits || !room;
}

void SocketWire::Arm(Lane* lane, uint32_t what) {
  if (lane->armed.LoadSeqCst() == what) return;
  lane->armed.StoreSeqCst(what);
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLRDHUP | EPOLLONESHOT;
  if (what == kArmedForRoom) event.events |= EPOLLOUT;
  event.data.ptr = tag_;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, lane->socket, &event);
}

bool SocketWire::ArmedForRoom() const {
  bool armed = false;
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    if (lane->holding.LoadSeqCst() == 0) continue;
    if (lane->armed.LoadSeqCst() != kArmedForRoom) return false;
    armed = true;
  }
  return armed;
}

void SocketWire::OnEvent() {
  armed_.StoreSeqCst(0);
  for (const std::unique_ptr<Lane>& lane : lanes_) lane->armed.StoreSeqCst(0);
}

bool SocketWire::Tick(bool* heartbeat) {
  const uint64_t sent = sent_.LoadRelaxed();
  *heartbeat = silence_ns_ > 0 && sent == sent_before_;
  sent_before_ = sent;
  const uint64_t received = received_.LoadRelaxed();
  silent_ticks_ = received == received_before_ ? silent_ticks_ + 1 : 0;
  received_before_ = received;
  return silence_ns_ == 0 || silent_ticks_ <= kTicksOfSilence;
}

void SocketWire::Shut() {
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    epoll_ctl(epoll_, EPOLL_CTL_DEL, lane->socket, nullptr);
    shutdown(lane->socket, SHUT_RDWR);
  }
}

}  // namespace dfccl
