// SPDX-License-Identifier: Apache-2.0
#include "core/transport/ring_wire.h"

#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>

namespace dfccl {

namespace {

// What goes over the socket.
constexpr char kBell = 'b';
constexpr char kGoodbye = 'g';

// Values of socket_end_ beside errno's.
constexpr int32_t kLeft = -1;
constexpr int32_t kClosed = -2;

}  // namespace

void RingWire::Bytes::Put(const void* from, uint64_t bytes) {
  const uint64_t straight = std::min(bytes, capacity_ - offset_);
  std::memcpy(data_ + offset_, from, straight);
  if (straight < bytes) {
    std::memcpy(data_, static_cast<const char*>(from) + straight, bytes - straight);
  }
  Skip(bytes);
}

void RingWire::Bytes::Get(void* to, uint64_t bytes) {
  const uint64_t straight = std::min(bytes, capacity_ - offset_);
  std::memcpy(to, data_ + offset_, straight);
  if (straight < bytes) std::memcpy(static_cast<char*>(to) + straight, data_, bytes - straight);
  Skip(bytes);
}

void RingWire::Bytes::Skip(uint64_t bytes) {
  offset_ += bytes;
  if (offset_ >= capacity_) offset_ -= capacity_;
}

std::unique_ptr<RingWire> RingWire::New(int socket, int memory, bool first,
                                        const TransportOptions& options, Status* status) {
  struct stat about;
  if (fstat(memory, &about) != 0) {
    *status = {StatusCode::kInvalidArgument, std::string("memory file: ") + std::strerror(errno)};
    return nullptr;
  }
  const uint64_t bytes = static_cast<uint64_t>(about.st_size) / 2 / kCacheLine * kCacheLine * 2;
  if (bytes < kLeastMemory) {
    *status = {StatusCode::kInvalidArgument, "memory file too small"};
    return nullptr;
  }
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  if (at == MAP_FAILED) {
    *status = {StatusCode::kInvalidArgument, std::string("memory file: ") + std::strerror(errno)};
    return nullptr;
  }
  return std::unique_ptr<RingWire>(
      new RingWire(socket, static_cast<char*>(at), bytes, first, options));
}

RingWire::RingWire(int socket, char* memory, uint64_t memory_bytes, bool first,
                   const TransportOptions& options)
    : socket_(socket),
      memory_(memory),
      memory_bytes_(memory_bytes),
      capacity_(Capacity(memory_bytes)),
      slice_bytes_(std::min(static_cast<uint64_t>(options.slice_bytes), capacity_ / 4)),
      lent_bytes_(options.lent_bytes),
      lent_slice_bytes_(options.lent_slice_bytes),
      out_words_(reinterpret_cast<RingWords*>(memory + (first ? 0 : memory_bytes / 2))),
      writer_(out_words_, capacity_),
      out_(reinterpret_cast<char*>(out_words_ + 1), capacity_),
      in_words_(reinterpret_cast<RingWords*>(memory + (first ? memory_bytes / 2 : 0))),
      reader_(in_words_, capacity_),
      in_(reinterpret_cast<char*>(in_words_ + 1), capacity_) {
  std::random_device random;
  proof_ = uint64_t{random()} << 32 | random();
  out_words_->proof.StoreRelaxed(proof_);
  out_words_->proof_address.StoreRelaxed(reinterpret_cast<uintptr_t>(&proof_));
  // Release: partner is the load in TryToBorrow.
  if (lent_bytes_ > 0) out_words_->lender.StoreRelease(static_cast<uint64_t>(getpid()));
}

RingWire::~RingWire() {
  if (lender_alive_ >= 0) close(lender_alive_);
  munmap(memory_, memory_bytes_);
  close(socket_);
}

int64_t RingWire::Room(uint32_t header, int64_t payload) {
  const uint64_t fixed = Frame::kSize + header;
  lending_ = Lends(payload);
  if (lending_) {
    const bool fits = RoomFor(fixed, sizeof(uint64_t), sizeof(uint64_t)) >= 0;
    return fits ? std::min(payload, lent_slice_bytes_) : -1;
  }
  const uint64_t slice = std::min(static_cast<uint64_t>(payload), slice_bytes_);
  // Not a scrap of the payload after the other.
  return RoomFor(fixed, std::min(slice, capacity_ / 8), slice);
}

// How many bytes behind the `fixed` ones there is room for, of those between `least` and
// `most`; -1: less.
int64_t RingWire::RoomFor(uint64_t fixed, uint64_t least, uint64_t most) {
  if (writer_.room() < fixed + most && !writer_.Look()) {
    bad_reader_.StoreRelease(1);  // partner: the load in MayRead
    return -1;
  }
  if (writer_.room() < fixed + least) {
    room_awaited_.StoreRelaxed(fixed + least);
    return -1;
  }
  room_awaited_.StoreRelaxed(0);
  return static_cast<int64_t>(std::min(most, writer_.room() - fixed));
}

void RingWire::Write(const Frame& frame, const void* header, const void* payload) {
  Frame sent = frame;
  if (lending_) sent.kind = FrameKind::kLent;
  char bytes[Frame::kSize];
  sent.Encode(frames_++, bytes);
  out_.Put(bytes, Frame::kSize);
  if (frame.header_bytes > 0) out_.Put(header, frame.header_bytes);
  uint64_t size = Frame::kSize + frame.header_bytes;
  if (lending_) {
    const uint64_t address = reinterpret_cast<uintptr_t>(payload);
    out_.Put(&address, sizeof(address));
    size += sizeof(address);
    // For Arm; seen with the armed bell, or by who armed it.
    lent_until_.StoreSeqCst(writer_.position() + size);
  } else if (frame.bytes > 0) {
    out_.Put(payload, frame.bytes);
    size += frame.bytes;
  }
  if (writer_.Publish(size)) Ring();
}

bool RingWire::Lends(int64_t payload) const {
  // Relaxed: it says nothing about other memory.
  return lent_bytes_ > 0 && payload >= lent_bytes_ && out_words_->borrows.LoadRelaxed() != 0;
}

bool RingWire::Reading() const {
  const uint64_t until = lent_until_.LoadRelaxed();
  return until != 0 && !writer_.Passed(until);
}

void RingWire::StopReading() {
  if (Reading()) writer_.Revoke();
  lent_until_.StoreRelaxed(0);
}

void RingWire::Ring() {
  // If the socket is full, bells are under way; if it is closed, its end is.
  const ssize_t sent = send(socket_, &kBell, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  static_cast<void>(sent);
}

void RingWire::Goodbye() {
  StopReading();
  const ssize_t sent = send(socket_, &kGoodbye, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  static_cast<void>(sent);
}

bool RingWire::MayRead() const {
  // Acquire: partners are the stores in OnEvent and Room.
  return in_words_->written.LoadRelaxed() != in_words_->read.LoadRelaxed() ||
         socket_end_.LoadAcquire() != 0 || bad_reader_.LoadAcquire() != 0;
}

Wire::Moved RingWire::Read(Assembler* assembler) {
  // First: what the peer wrote before its end is in the ring.
  const int32_t socket_end = socket_end_.LoadAcquire();
  if (bad_reader_.LoadAcquire() != 0 || !reader_.Look()) {
    return End(CorruptFrame("position out of range"));
  }
  if (!tried_to_borrow_) TryToBorrow();
  int frames = 0;
  while (reader_.available() > 0 && frames < kFramesPerRead) {
    const uint64_t available = reader_.available();
    char bytes[Frame::kSize];
    if (available < Frame::kSize) return End(CorruptFrame("half a frame"));
    in_.Get(bytes, Frame::kSize);
    const char* wrong = assembler->Begin(bytes);
    if (wrong != nullptr) return End(CorruptFrame(wrong));
    if (assembler->goodbye()) return End(LeftJob());
    const uint64_t header = assembler->header_wanted();
    const uint64_t payload = static_cast<uint64_t>(assembler->payload_wanted());
    const bool lent = assembler->lent();
    if (lent && lender_alive_ < 0) return End(CorruptFrame("lent payload that cannot be read"));
    const uint64_t size = Frame::kSize + header + (lent ? sizeof(uint64_t) : payload);
    if (size > available) return End(CorruptFrame("half a frame"));
    if (header > 0) {
      in_.Get(assembler->header(), header);
      assembler->HeaderThere();
    }
    if (payload > 0) {
      void* const to = assembler->BeginSlice(static_cast<int64_t>(payload));
      if (lent) {
        uint64_t address;
        in_.Get(&address, sizeof(address));
        const bool fetched = to == nullptr || Fetch(to, address, payload);
        const bool taken_back = reader_.Revoked(size);
        fetched && !taken_back ? assembler->EndSlice(static_cast<int64_t>(payload))
                               : assembler->SliceTakenBack();
        // With the peer it is gone, but what comes after it still counts.
        if (!fetched && !taken_back && LenderLives()) {
          return End(ConnectionLost("its memory cannot be read"));
        }
      } else {
        to != nullptr ? in_.Get(to, payload) : in_.Skip(payload);
        assembler->EndSlice(static_cast<int64_t>(payload));
      }
    }
    if (reader_.Release(size)) Ring();
    ++frames;
    if (reader_.available() == 0 && !reader_.Look()) {
      return End(CorruptFrame("position out of range"));
    }
  }
  if (frames > 0) return Moved::kSome;
  if (socket_end == 0) return Moved::kNothing;
  return End(socket_end == kLeft     ? LeftJob()
             : socket_end == kClosed ? ConnectionLost("closed by the peer")
                                     : ConnectionLost(std::strerror(socket_end)));
}

// Finds out whether the peer's memory can be read, if it lends.
void RingWire::TryToBorrow() {
  tried_to_borrow_ = true;
  // Acquire: partner is the store in the peer's constructor.
  const uint64_t lender = in_words_->lender.LoadAcquire();
  if (lender == 0 || lender > INT32_MAX) return;
  lender_ = static_cast<pid_t>(lender);
  lender_alive_ = static_cast<int>(syscall(SYS_pidfd_open, lender_, 0));
  uint64_t proof = 0;
  if (lender_alive_ >= 0 && Fetch(&proof, in_words_->proof_address.LoadRelaxed(), sizeof(proof)) &&
      proof == in_words_->proof.LoadRelaxed()) {
    return in_words_->borrows.StoreRelaxed(1);
  }
  if (lender_alive_ >= 0) close(lender_alive_);
  lender_alive_ = -1;
}

// Copies out of the peer's memory.
bool RingWire::Fetch(void* to, uint64_t address, uint64_t bytes) const {
  for (uint64_t done = 0; done < bytes;) {
    const iovec here = {static_cast<char*>(to) + done, bytes - done};
    const iovec there = {reinterpret_cast<void*>(static_cast<uintptr_t>(address + done)),
                         bytes - done};
    const ssize_t copied = process_vm_readv(lender_, &here, 1, &there, 1, 0);
    if (copied <= 0) return false;
    done += static_cast<uint64_t>(copied);
  }
  return LenderLives();  // so it was that one's memory
}

bool RingWire::LenderLives() const {
  pollfd alive = {lender_alive_, POLLIN, 0};
  return poll(&alive, 1, 0) == 0;
}

Wire::Moved RingWire::End(Status status) {
  end_ = std::move(status);
  return Moved::kEnded;
}

bool RingWire::Watch(int epoll, void* tag) {
  epoll_ = epoll;
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.ptr = tag;
  return epoll_ctl(epoll_, EPOLL_CTL_ADD, socket_, &event) == 0;
}

bool RingWire::Arm(bool room) {
  in_words_->reader.Arm();
  if (in_words_->Used() != 0 || MayRead()) return false;
  if (room) {
    out_words_->writer.Arm();
    const uint64_t lent_until = lent_until_.LoadSeqCst();
    if (lent_until != 0 && out_words_->read.LoadSeqCst() < lent_until) return true;
    if (capacity_ - out_words_->Used() >= room_awaited_.LoadRelaxed()) return false;
  }
  return true;
}

void RingWire::Disarm() {
  in_words_->reader.Disarm();
  out_words_->writer.Disarm();
}

bool RingWire::ArmedForRoom() const { return out_words_->writer.Armed(); }

void RingWire::OnEvent() {
  char bytes[64];
  for (;;) {
    const ssize_t received = recv(socket_, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && errno == EAGAIN) return;
    int32_t end = received < 0 ? errno : received == 0 ? kClosed : 0;
    for (ssize_t i = 0; i < received; ++i) {
      if (bytes[i] == kGoodbye) {
        end = kLeft;
      } else if (bytes[i] != kBell) {
        end = EPROTO;
      }
    }
    if (end == 0) continue;
    socket_end_.StoreRelease(end);  // partners: the loads in MayRead and Read
    epoll_ctl(epoll_, EPOLL_CTL_DEL, socket_, nullptr);
    return;
  }
}

bool RingWire::Tick(bool* heartbeat) {
  *heartbeat = false;
  return true;
}

void RingWire::Shut() {
  epoll_ctl(epoll_, EPOLL_CTL_DEL, socket_, nullptr);
  shutdown(socket_, SHUT_RDWR);
}

}  // namespace dfccl
