// SPDX-License-Identifier: Apache-2.0
// All links of a process, and the thread that polls them when nobody else does.
//
// Peers ring only if nobody polls (core/protocol/pollers.h), and the transport's thread,
// asleep in epoll, is woken only then.
#include "core/transport/transport.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "core/protocol/atomics.h"
#include "core/protocol/pollers.h"
#include "core/transport/link.h"
#include "core/transport/ring_wire.h"
#include "core/transport/socket_wire.h"

namespace dfccl {

namespace {

using Clock = std::chrono::steady_clock;

// How long Close tries to get rid of what is queued.
constexpr std::chrono::seconds kLinger{1};
constexpr int kPollsPerYield = 64;
constexpr int kEvents = 64;
// The part of spin_ns that is always spun.
constexpr int kShortestSpin = 64;

class TransportImpl : public Transport, private Waker {
 public:
  TransportImpl(int process, Receiver* receiver, const TransportOptions& options, int epoll,
                int kick)
      : process_(process),
        receiver_(receiver),
        options_(options),
        epoll_(epoll),
        kick_(kick),
        links_(new Atomic<Link*>[kMostProcesses]),
        polled_(new Atomic<Link*>[kMostProcesses]) {
    // Signals are for the program's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { Main(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~TransportImpl() override {
    Close();
    for (int i = 0; i < kMostProcesses; ++i) delete links_[i].LoadRelaxed();
    close(kick_);
    close(epoll_);
  }

  Status AddLink(int process, const std::vector<int>& sockets, int memory) override {
    const auto refuse = [&](Status status) {
      for (int socket : sockets) close(socket);
      if (memory >= 0) close(memory);
      return status;
    };
    if (process < 0 || process >= kMostProcesses || process == process_) {
      return refuse({StatusCode::kInvalidArgument, "no such process"});
    }
    if (sockets.empty() || sockets.size() > (memory >= 0 ? 1 : kMostSockets)) {
      return refuse({StatusCode::kInvalidArgument, "no such number of sockets"});
    }
    if (stop_.LoadSeqCst() != 0) return refuse({StatusCode::kAborted, "the transport is closed"});
    std::unique_ptr<Wire> wire;
    if (memory >= 0) {
      Status status;
      wire = RingWire::New(sockets[0], memory, process_ < process, options_, &status);
      if (wire == nullptr) return refuse(status);
      close(memory);
    } else {
      wire = std::make_unique<SocketWire>(sockets, options_.slice_bytes, options_.silence_ns);
    }
    Link* const link = LinkTo(process);
    if (!link->SetWire(std::move(wire), epoll_)) {
      return {StatusCode::kInvalidArgument,
              "the process has a link already, or is down, or there are too many sockets"};
    }
    EnsurePolling();
    return {};
  }

  bool Post(int process, const OutgoingMessage& message, bool* left) override {
    return stop_.LoadRelaxed() == 0 && LinkTo(process)->Post(message, left);
  }

  void Cancel(int process, void* owner) override { LinkTo(process)->Cancel(owner); }

  bool Poll() override {
    bool moved = false;
    const uint32_t links = polled_count_.LoadAcquire();  // partner: the store in LinkTo
    for (uint32_t i = 0; i < links; ++i) moved |= polled_[i].LoadRelaxed()->Poll();
    return moved;
  }

  void BeginPolling() override {
    pollers_.Begin([this] { Disarm(); });
  }

  void EndPolling() override {
    if (!StopPolling()) Kick();
  }

  void SetDown(int process, const Status& status) override { LinkTo(process)->SetDown(status); }

  bool IsDown(int process, Status* status) override { return LinkTo(process)->IsDown(status); }

  void Close() override {
    std::lock_guard<std::mutex> lock(close_mutex_);
    if (!thread_.joinable()) return;
    stop_.StoreSeqCst(1);
    Kick();
    thread_.join();
    const Clock::time_point deadline = Clock::now() + kLinger;
    const uint32_t links = polled_count_.LoadAcquire();
    for (uint32_t i = 0; i < links; ++i) polled_[i].LoadRelaxed()->Close(deadline);
    for (uint32_t i = 0; i < links; ++i) polled_[i].LoadRelaxed()->Linger(deadline);
  }

 private:
  Link* LinkTo(int process) {
    Link* link = links_[process].LoadAcquire();  // partner: the store below
    if (link != nullptr) return link;
    std::lock_guard<std::mutex> lock(links_mutex_);
    link = links_[process].LoadRelaxed();
    if (link != nullptr) return link;
    link = new Link(process, receiver_, this);
    links_[process].StoreRelease(link);
    const uint32_t count = polled_count_.LoadRelaxed();
    polled_[count].StoreRelaxed(link);
    polled_count_.StoreRelease(count + 1);
    return link;
  }

  void EnsurePolling() override {
    if (!pollers_.Any()) Kick();
  }

  void Kick() {
    if (kicked_.ExchangeSeqCst(1) != 0) return;
    const uint64_t one = 1;
    const ssize_t written = write(kick_, &one, sizeof(one));
    static_cast<void>(written);
  }

  void Disarm() {
    const uint32_t links = polled_count_.LoadAcquire();
    for (uint32_t i = 0; i < links; ++i) polled_[i].LoadRelaxed()->Disarm();
  }

  // False: there is something to do.
  bool Arm() {
    std::lock_guard<std::mutex> lock(arm_mutex_);
    const uint32_t links = polled_count_.LoadAcquire();
    for (uint32_t i = 0; i < links; ++i) {
      if (!polled_[i].LoadRelaxed()->Arm()) return false;
    }
    return true;
  }

  // False: nobody polls any more, and somebody must.
  bool StopPolling() {
    return pollers_.End([this] { return Arm(); });
  }

  void Main() {
    pthread_setname_np(pthread_self(), "dfccl-net");
    next_tick_ = Clock::now() + tick_;
    bool idle = true;
    while (stop_.LoadSeqCst() == 0) {
      AwaitEvents(idle);
      PollUntilQuiet();
      idle = StopPolling();
    }
  }

  // Counts this thread as one that polls when it returns.
  void AwaitEvents(bool idle) {
    epoll_event events[kEvents];
    const Clock::time_point before = Clock::now();
    int timeout_ms = -1;
    if (!idle) {
      timeout_ms = 0;
    } else if (tick_.count() > 0) {
      const auto rest = std::chrono::ceil<std::chrono::milliseconds>(next_tick_ - before);
      timeout_ms = static_cast<int>(std::clamp<int64_t>(rest.count(), 0, 1'000'000));
    }
    const int count = epoll_wait(epoll_, events, kEvents, timeout_ms);
    BeginPolling();
    for (int i = 0; i < count; ++i) {
      if (events[i].data.ptr != nullptr) {
        static_cast<Link*>(events[i].data.ptr)->OnEvent();
      } else {
        uint64_t kicks;
        const ssize_t got = read(kick_, &kicks, sizeof(kicks));
        static_cast<void>(got);
        kicked_.StoreSeqCst(0);
      }
    }
    // A little more spinning would have saved this sleep.
    if (count > 0 && Clock::now() - before < most_spin_) spin_ = std::min(most_spin_, 4 * spin_);
  }

  void PollUntilQuiet() {
    Clock::time_point moved = Clock::now();
    for (int polls = 1; stop_.LoadRelaxed() == 0; ++polls) {
      receiver_->BeginPoll();
      const bool any = Poll();
      receiver_->EndPoll();
      const Clock::time_point now = Clock::now();
      if (tick_.count() > 0 && now >= next_tick_) Tick(now);
      if (any) {
        moved = now;
      } else if (pollers_.Others()) {
        return;
      } else if (now - moved >= spin_) {
        spin_ = std::max(most_spin_ / kShortestSpin, spin_ / 2);
        return;
      } else {
        SpinPause();
      }
      if (polls % kPollsPerYield == 0) std::this_thread::yield();
    }
  }

  void Tick(Clock::time_point now) {
    next_tick_ = now + tick_;
    const uint32_t links = polled_count_.LoadAcquire();
    for (uint32_t i = 0; i < links; ++i) polled_[i].LoadRelaxed()->Tick();
  }

  const int process_;
  Receiver* const receiver_;
  const TransportOptions options_;
  const int epoll_;
  const int kick_;                           // an eventfd
  std::unique_ptr<Atomic<Link*>[]> links_;   // by process
  std::unique_ptr<Atomic<Link*>[]> polled_;  // the same, in the order of their making
  Atomic<uint32_t> polled_count_;
  std::mutex links_mutex_;
  std::mutex arm_mutex_;
  std::mutex close_mutex_;
  Pollers pollers_;
  Atomic<uint32_t> kicked_;
  Atomic<uint32_t> stop_;

  // The thread and its own.
  const std::chrono::nanoseconds tick_{options_.silence_ns / SocketWire::kTicksOfSilence};
  const std::chrono::nanoseconds most_spin_{options_.spin_ns};
  std::chrono::nanoseconds spin_{options_.spin_ns};
  Clock::time_point next_tick_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Transport> Transport::New(int process, Receiver* receiver,
                                          const TransportOptions& options) {
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  const int kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event = {};
  event.events = EPOLLIN;
  if (epoll < 0 || kick < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, kick, &event) != 0) {
    if (epoll >= 0) close(epoll);
    if (kick >= 0) close(kick);
    return nullptr;
  }
  return std::make_unique<TransportImpl>(process, receiver, options, epoll, kick);
}

}  // namespace dfccl
