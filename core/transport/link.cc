// SPDX-License-Identifier: Apache-2.0
#include "core/transport/link.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace dfccl {

namespace {

uint64_t ThisThread() {
  static thread_local char place;
  return reinterpret_cast<uint64_t>(&place);
}

using Clock = std::chrono::steady_clock;

// Between looks while a link closes.
constexpr std::chrono::microseconds kPause{50};

// A queue keeps the levels that it has seen, up to this many.
constexpr size_t kLevels = 64;

}  // namespace

void MessageQueue::Push(Message* message) {
  message->next = nullptr;
  auto level = levels_.begin();
  while (level != levels_.end() && level->priority > message->priority) ++level;
  if (level == levels_.end() || level->priority != message->priority) {
    if (levels_.size() >= kLevels) {
      levels_.erase(std::remove_if(levels_.begin(), levels_.end(),
                                   [](const Level& level) { return level.first == nullptr; }),
                    levels_.end());
      level = levels_.begin();
      while (level != levels_.end() && level->priority > message->priority) ++level;
    }
    level = levels_.insert(level, {message->priority, nullptr, nullptr});
  }
  (level->first == nullptr ? level->first : level->last->next) = message;
  level->last = message;
}

Message* MessageQueue::First(bool started) const {
  for (const Level& level : levels_) {
    if (level.first != nullptr && (!started || level.first->stream >= 0)) return level.first;
  }
  return nullptr;
}

void MessageQueue::PopFirst(Message* message) {
  for (Level& level : levels_) {
    if (level.first == message) level.first = message->next;
  }
}

bool Turn::Try() {
  return word_.LoadRelaxed() == 0 && [this] {
    uint64_t nobody = 0;
    return word_.CompareExchangeSeqCst(nobody, ThisThread());
  }();
}

void Turn::Take() {
  while (!Try()) std::this_thread::yield();
}

bool Turn::Mine() const { return word_.LoadRelaxed() == ThisThread(); }

Link::Link(int process, Receiver* receiver, Waker* waker)
    : process_(process), receiver_(receiver), waker_(waker), assembler_(process, receiver) {}

Link::~Link() {
  queue_.RemoveIf([](Message* message) {
    delete message;
    return true;
  });
  while (free_ != nullptr) delete std::exchange(free_, free_->next);
}

bool Link::SetWire(std::unique_ptr<Wire> wire, int epoll) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (owned_wire_ != nullptr || state_.LoadRelaxed() != kUp) return false;
  if (!wire->Watch(epoll, this)) return false;
  owned_wire_ = std::move(wire);
  wire_.StoreSeqCst(owned_wire_.get());  // release: partners are all loads of wire_
  return true;
}

bool Link::HasWork() const {
  if (queued_.LoadSeqCst() != 0) return true;
  const Wire* wire = wire_.LoadSeqCst();
  return wire != nullptr && wire->Holding();
}

bool Link::Post(const OutgoingMessage& message, bool* left) {
  if (left != nullptr) *left = false;
  Wire* const wire = wire_.LoadAcquire();
  if (wire != nullptr && queued_.LoadSeqCst() == 0 && out_.Try()) {
    const bool whole = queued_.LoadSeqCst() == 0 && WriteWhole(wire, message);
    out_.Leave();
    if (whole) {
      if (left != nullptr) {
        *left = true;
      } else if (message.owner != nullptr) {
        std::lock_guard<std::mutex> lock(mutex_);
        left_.push_back(message.owner);
        unreported_.FetchAddSeqCst(1);
        queued_.FetchAddSeqCst(1);
      }
      EnsurePolling();  // somebody may have failed to get the turn meanwhile
      return true;
    }
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state_.LoadRelaxed() != kUp) return false;
    Message* queued = free_;
    if (queued != nullptr) {
      free_ = queued->next;
    } else {
      queued = new Message;
    }
    queued->payload = static_cast<const char*>(message.payload);
    queued->payload_bytes = message.payload_bytes;
    queued->offset = 0;
    queued->owner = message.owner;
    queued->priority = message.priority;
    queued->stream = -1;
    queued->header_bytes = message.header_bytes;
    queued->cancelled = false;
    if (message.header_bytes > Message::kInline) {
      queued->large_header.reset(new char[message.header_bytes]);
    }
    std::memcpy(queued->header(), message.header, message.header_bytes);
    queue_.Push(queued);
    queued_.FetchAddSeqCst(1);
  }
  Pump(1, /*report=*/false);
  EnsurePolling();
  return true;
}

void Link::EnsurePolling() {
  const Wire* const wire = wire_.LoadSeqCst();
  if (wire == nullptr || !HasWork()) return;
  if (unreported_.LoadSeqCst() != 0 || !wire->ArmedForRoom()) waker_->EnsurePolling();
}

// If the queue is empty. The whole message in one frame, or nothing.
bool Link::WriteWhole(Wire* wire, const OutgoingMessage& message) {
  // A stream is free: those that are not belong to messages in the queue.
  if (state_.LoadAcquire() != kUp || closed_ || wire->Holding()) return false;
  if (wire->Lends(message.payload_bytes)) return false;
  if (wire->Room(message.header_bytes, message.payload_bytes) < message.payload_bytes) return false;
  Frame frame;
  frame.stream = static_cast<uint32_t>(__builtin_ctzll(free_streams_));
  frame.header_bytes = static_cast<uint16_t>(message.header_bytes);
  frame.bytes = static_cast<uint32_t>(message.payload_bytes);
  frame.payload_bytes = static_cast<uint64_t>(message.payload_bytes);
  wire->Write(frame, message.header, message.payload);
  wire->Flush();
  wire->StopReading();
  return true;
}

void Link::Recycle(Message* message) {
  if (message->stream >= 0) free_streams_ |= uint64_t{1} << message->stream;
  message->large_header.reset();
  message->next = free_;
  free_ = message;
}

// The message has left.
void Link::Finish(Message* message, bool report) {
  void* const owner = message->owner;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.PopFirst(message);
    Recycle(message);
    if (owner != nullptr && !report) {
      left_.push_back(owner);
      unreported_.FetchAddSeqCst(1);
      return;
    }
  }
  if (owner != nullptr && !closed_) receiver_->Sent(owner);
  queued_.FetchSubSeqCst(1);
}

void Link::ReportLeft() {
  for (;;) {
    void* owner;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (left_.empty()) return;
      owner = left_.back();
      left_.pop_back();
    }
    if (!closed_) receiver_->Sent(owner);
    unreported_.FetchSubSeqCst(1);
    queued_.FetchSubSeqCst(1);
  }
}

bool Link::PumpMyTurn(int frames, bool report, bool* moved) {
  Wire* const wire = wire_.LoadAcquire();
  if (wire == nullptr) return true;
  if (report && unreported_.LoadSeqCst() != 0) ReportLeft();
  bool more = false;
  for (;;) {
    if (writing_ != nullptr) {
      wire->Flush();
      if (wire->Reading()) return true;
      Message* const message = std::exchange(writing_, nullptr);
      if (message->offset == message->payload_bytes) Finish(message, report);
    }
    more = frames == 0 || cancelling_.LoadRelaxed() != 0;
    if (more) break;
    Message* message;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      message = queue_.First(false);
      if (message != nullptr && message->stream < 0 && free_streams_ == 0) {
        message = queue_.First(true);
      }
    }
    if (message == nullptr) break;
    Frame frame;
    const int64_t rest = message->cancelled ? 0 : message->payload_bytes - message->offset;
    const uint32_t header = message->stream < 0 ? message->header_bytes : 0;
    const int64_t bytes = wire->Room(header, rest);
    more = bytes < 0;
    if (more) break;
    if (message->stream < 0) {
      message->stream = __builtin_ctzll(free_streams_);
      free_streams_ &= free_streams_ - 1;
    }
    frame.stream = static_cast<uint32_t>(message->stream);
    if (message->cancelled) {
      frame.kind = FrameKind::kAbort;
      message->offset = message->payload_bytes;
    } else {
      frame.header_bytes = static_cast<uint16_t>(header);
      frame.bytes = static_cast<uint32_t>(bytes);
      frame.payload_bytes = static_cast<uint64_t>(message->payload_bytes);
    }
    wire->Write(frame, message->header(), bytes > 0 ? message->payload + message->offset : nullptr);
    message->offset += bytes;
    --frames;
    *moved = true;
    if (wire->Reading()) {
      writing_ = message;
    } else if (message->offset == message->payload_bytes) {
      Finish(message, report);
    }
  }
  wire->Flush();
  return more || wire->Holding();
}

bool Link::Pump(int frames, bool report) {
  bool moved = false;
  while (HasWork() && cancelling_.LoadRelaxed() == 0 && out_.Try()) {
    const bool more = state_.LoadAcquire() != kUp || PumpMyTurn(frames, report, &moved);
    out_.Leave();
    // If nothing was left, look again: somebody may have failed to get the turn.
    if (more || (!report && unreported_.LoadSeqCst() != 0)) break;
  }
  return moved;
}

void Link::Cancel(void* owner) {
  if (queued_.LoadSeqCst() == 0) return;
  uint32_t removed = 0;
  uint32_t broken_off = 0;
  const bool mine = out_.Mine();
  if (!mine) {
    cancelling_.FetchAddRelaxed(1);
    out_.Take();
    cancelling_.FetchSubRelaxed(1);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.RemoveIf([&](Message* message) {
      if (message->owner != owner) return false;
      if (message == writing_) {
        wire_.LoadRelaxed()->StopReading();
        writing_ = nullptr;
      }
      if (message->stream >= 0 && message->offset < message->payload_bytes) {
        message->cancelled = true;
        message->owner = nullptr;
        ++broken_off;
        return false;
      }
      Recycle(message);
      ++removed;
      return true;
    });
    for (auto left = std::find(left_.begin(), left_.end(), owner); left != left_.end();
         left = std::find(left, left_.end(), owner)) {
      left = left_.erase(left);
      unreported_.FetchSubSeqCst(1);
      ++removed;
    }
    queued_.FetchSubSeqCst(removed);
  }
  if (!mine) out_.Leave();
  for (uint32_t i = 0; i < removed + broken_off; ++i) receiver_->Sent(owner);
  EnsurePolling();
}

bool Link::Poll() {
  Wire* const wire = wire_.LoadAcquire();
  bool moved = false;
  if (wire != nullptr && state_.LoadRelaxed() == kUp && wire->MayRead() && in_.Try()) {
    if (state_.LoadAcquire() == kUp) {
      const Wire::Moved read = wire->Read(&assembler_);
      moved = read != Wire::Moved::kNothing;
      if (read == Wire::Moved::kEnded) End(wire->end());
    }
    in_.Leave();
  }
  if (HasWork()) moved |= Pump(kFramesPerPoll, /*report=*/true);
  if (state_.LoadRelaxed() == kEnding) {
    ReportDown();
    moved = true;
  }
  return moved;
}

void Link::SetDown(const Status& status) {
  End(status);
  waker_->EnsurePolling();
}

void Link::End(const Status& status) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_.LoadRelaxed() != kUp) return;
  status_ = status;
  if (owned_wire_ != nullptr) owned_wire_->Shut();
  state_.StoreSeqCst(kEnding);
}

void Link::ReportDown() {
  if (!in_.Try()) return;
  if (out_.Try()) {
    if (state_.LoadAcquire() == kEnding && !closed_) {
      if (writing_ != nullptr) wire_.LoadRelaxed()->StopReading();
      writing_ = nullptr;
      ReportLeft();
      for (;;) {
        Message* message;
        {
          std::lock_guard<std::mutex> lock(mutex_);
          message = queue_.First(false);
        }
        if (message == nullptr) break;
        Finish(message, /*report=*/true);
      }
      // Nobody changes the status any more.
      receiver_->Down(process_, status_);
      state_.StoreSeqCst(kDown);
    }
    out_.Leave();
  }
  in_.Leave();
}

bool Link::IsDown(Status* status) {
  if (state_.LoadAcquire() == kUp) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  *status = status_;
  return true;
}

bool Link::Arm() {
  const uint32_t state = state_.LoadSeqCst();
  if (state != kUp) return state == kDown;
  Wire* const wire = wire_.LoadSeqCst();
  return wire == nullptr || wire->Arm(HasWork());
}

void Link::Disarm() {
  Wire* const wire = wire_.LoadAcquire();
  if (wire != nullptr) wire->Disarm();
}

void Link::OnEvent() {
  // An event that comes before SetWire has ended comes again.
  Wire* const wire = wire_.LoadAcquire();
  if (wire != nullptr) wire->OnEvent();
}

void Link::Tick() {
  Wire* const wire = wire_.LoadAcquire();
  if (wire == nullptr || state_.LoadAcquire() != kUp) return;
  bool heartbeat;
  if (!wire->Tick(&heartbeat)) {
    End(ConnectionLost("nothing heard any more"));
  } else if (heartbeat && out_.Try()) {
    if (!closed_ && writing_ == nullptr && !wire->Holding() && wire->Room(0, 0) >= 0) {
      Frame frame;
      frame.kind = FrameKind::kHeartbeat;
      wire->Write(frame, nullptr, nullptr);
      wire->Flush();
    }
    out_.Leave();
  }
}

void Link::Close(Clock::time_point deadline) {
  in_.Take();
  out_.Take();
  closed_ = true;
  Wire* const wire = wire_.LoadAcquire();
  if (wire != nullptr && state_.LoadAcquire() == kUp) {
    bool moved;
    while (PumpMyTurn(kFramesPerPoll, /*report=*/true, &moved) && Clock::now() < deadline) {
      std::this_thread::sleep_for(kPause);
    }
    wire->Goodbye();
    lingers_ = true;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (state_.LoadRelaxed() == kUp) status_ = {StatusCode::kAborted, "the transport is closed"};
  state_.StoreSeqCst(kDown);
}

void Link::Linger(Clock::time_point deadline) {
  if (!lingers_) return;
  Wire* const wire = wire_.LoadAcquire();
  while (!wire->Delivered() && Clock::now() < deadline) std::this_thread::sleep_for(kPause);
  wire->Shut();
}

}  // namespace dfccl
