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
// What may lie unsent in the kernel, so that an urgent message need not wait long.
constexpr int kUnsent = 256 << 10;
constexpr int kReadsPerPoll = 16;

bool IsNetwork(int socket) {
  sockaddr_storage address;
  socklen_t size = sizeof(address);
  return getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
         address.ss_family != AF_UNIX;
}

}  // namespace

SocketWire::SocketWire(int socket, int64_t slice_bytes, int64_t silence_ns)
    : socket_(socket),
      slice_bytes_(slice_bytes),
      network_(IsNetwork(socket)),
      silence_ns_(network_ ? silence_ns : 0),
      buffer_(
          new char[kGathered + kLargestFrame + static_cast<size_t>(slice_bytes) + Frame::kSize]),
      arrived_(new char[kArrived]) {
  const int yes = 1;
  setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
  setsockopt(socket_, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsent, sizeof(kUnsent));
}

SocketWire::~SocketWire() { close(socket_); }

int64_t SocketWire::Room(uint32_t, int64_t payload) {
  if (payload_bytes_ > 0 || buffer_end_ >= kGathered) {
    Flush();
    if (payload_bytes_ > 0 || buffer_end_ >= kGathered) return -1;
  }
  return std::min(payload, slice_bytes_);
}

void SocketWire::Write(const Frame& frame, const void* header, const void* payload) {
  char* at = buffer_.get() + buffer_end_;
  frame.Encode(frames_++, at);
  at += Frame::kSize;
  if (frame.header_bytes > 0) std::memcpy(at, header, frame.header_bytes);
  at += frame.header_bytes;
  buffer_end_ = static_cast<size_t>(at - buffer_.get());
  if (frame.bytes == 0) return;
  payload_ = static_cast<const char*>(payload);
  payload_bytes_ = frame.bytes;
  if (frame.bytes <= kCopied) StopReading();
}

void SocketWire::StopReading() {
  if (payload_bytes_ == 0) return;
  std::memcpy(buffer_.get() + buffer_end_, payload_, payload_bytes_);
  buffer_end_ += payload_bytes_;
  payload_bytes_ = 0;
}

void SocketWire::Flush() {
  Send();
  const uint32_t holding = buffer_end_ > 0 || payload_bytes_ > 0;
  if (holding_.LoadRelaxed() != holding) holding_.StoreSeqCst(holding);
}

void SocketWire::Send() {
  while (buffer_begin_ < buffer_end_ || payload_bytes_ > 0) {
    if (send_error_.LoadRelaxed() != 0) {  // nobody will ever read it
      buffer_begin_ = buffer_end_ = payload_bytes_ = 0;
      return;
    }
    iovec parts[2] = {{buffer_.get() + buffer_begin_, buffer_end_ - buffer_begin_},
                      {const_cast<char*>(payload_), payload_bytes_}};
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = payload_bytes_ > 0 ? 2 : 1;
    const ssize_t sent = sendmsg(socket_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return;
      // The in side finds the end, after what came before it.
      send_error_.StoreRelease(errno);  // partner: the load in EndOf
      continue;
    }
    sent_.StoreRelaxed(sent_.LoadRelaxed() + static_cast<uint64_t>(sent));
    const size_t of_buffer = std::min(static_cast<size_t>(sent), buffer_end_ - buffer_begin_);
    const size_t of_payload = static_cast<size_t>(sent) - of_buffer;
    buffer_begin_ += of_buffer;
    payload_ += of_payload;
    payload_bytes_ -= of_payload;
    if (buffer_begin_ == buffer_end_) buffer_begin_ = buffer_end_ = 0;
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
  // A network connection that is closed with something unread is reset, and what its
  // peer has not acknowledged is lost.
  int unacknowledged = 0;
  if (network_) ioctl(socket_, SIOCOUTQ, &unacknowledged);
  return !Holding() && unacknowledged == 0;
}

// Uses up what has arrived. False: it is wrong.
bool SocketWire::Consume(Assembler* assembler) {
  while (!assembler->goodbye()) {
    const size_t available = arrived_end_ - arrived_begin_;
    const char* const at = arrived_.get() + arrived_begin_;
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
    } else {
      used = Frame::kSize;
      if (available < used) return true;
      const char* wrong = assembler->Begin(at);
      if (wrong != nullptr) {
        end_ = CorruptFrame(wrong);
        return false;
      }
    }
    arrived_begin_ += used;
  }
  end_ = LeftJob();
  return false;
}

// Reads `bytes` of the payload, which are known to have arrived, and a little of what
// comes after it.
ssize_t SocketWire::ReadSlice(Assembler* assembler, int64_t bytes) {
  void* const to = assembler->BeginSlice(bytes);
  ssize_t received = 0;
  if (to != nullptr) {
    iovec parts[2] = {{to, static_cast<size_t>(bytes)}, {arrived_.get(), kReadAhead}};
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    received = recvmsg(socket_, &message, MSG_DONTWAIT);
    arrived_begin_ = 0;
    arrived_end_ = static_cast<size_t>(std::max<ssize_t>(received - bytes, 0));
  } else {
    while (received < bytes) {
      const size_t part = std::min(kArrived, static_cast<size_t>(bytes - received));
      const ssize_t read = recv(socket_, arrived_.get(), part, MSG_DONTWAIT);
      if (read <= 0) break;
      received += read;
    }
  }
  assembler->EndSlice(std::max<int64_t>(std::min<int64_t>(received, bytes), 0));
  return received;
}

Wire::Moved SocketWire::Read(Assembler* assembler) {
  Moved moved = Moved::kNothing;
  for (int reads = 0; reads < kReadsPerPoll; ++reads) {
    ssize_t received;
    int available = 0;
    if (assembler->header_wanted() == 0 && assembler->payload_wanted() > kCopied &&
        ioctl(socket_, FIONREAD, &available) == 0 && available > 0) {
      received = ReadSlice(assembler, std::min<int64_t>(available, assembler->payload_wanted()));
    } else {
      std::memmove(arrived_.get(), arrived_.get() + arrived_begin_, arrived_end_ - arrived_begin_);
      arrived_end_ -= arrived_begin_;
      arrived_begin_ = 0;
      received =
          recv(socket_, arrived_.get() + arrived_end_, kArrived - arrived_end_, MSG_DONTWAIT);
      if (received > 0) arrived_end_ += static_cast<size_t>(received);
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
  return epoll_ctl(epoll_, EPOLL_CTL_ADD, socket_, &event) == 0;
}

bool SocketWire::Arm(bool room) {
  // What is there already becomes an event at once. One that has been asked for and
  // not come stays asked for.
  const uint32_t wanted = room ? kArmedForRoom : kArmed;
  if (armed_.LoadSeqCst() == wanted) return true;
  armed_.StoreSeqCst(wanted);
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLRDHUP | EPOLLONESHOT;
  if (room) event.events |= EPOLLOUT;
  event.data.ptr = tag_;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, socket_, &event);
  return true;
}

void SocketWire::OnEvent() { armed_.StoreSeqCst(0); }

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
  epoll_ctl(epoll_, EPOLL_CTL_DEL, socket_, nullptr);
  shutdown(socket_, SHUT_RDWR);
}

}  // namespace dfccl
