// SPDX-License-Identifier: Apache-2.0
#include "core/daemon/crew.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "core/daemon/clock.h"
#include "core/daemon/daemon.h"

namespace dfccl {
namespace {

constexpr uint64_t kMostDaemons = 1 << 16;
constexpr uint64_t kMostCompletions = 1 << 13;

// What this thread is doing in the runtime.
struct ThreadState {
  bool driving = false;        // runs daemons, so it will look at the run queue again
  bool draining = false;       // is inside a callback or between two
  bool long_callback = false;  // is inside one of a call site with long ones
  int64_t nested_ns = 0;       // time in the runtime within the callback
};
thread_local ThreadState thread_state;

}  // namespace

Crew::Crew(int workers, void (*attend)(void*), void* attend_argument)
    : workers_(workers),
      attend_(attend),
      attend_argument_(attend_argument),
      run_queue_(kMostDaemons),
      completions_(kMostCompletions),
      handed_(kMostCompletions) {}

void Crew::Enqueue(Daemon* daemon) {
  // Never full for long: a daemon is in the queue at most once.
  while (!run_queue_.TryPush(daemon)) std::this_thread::yield();
  if (!thread_state.driving) Notify();
}

bool Crew::IsLong(uint32_t site) const {
  return streak_[site % kSites].LoadRelaxed() >= kLongStreak;
}

bool Crew::TryPost(Operation* operation) {
  const Completion completion = {operation->callback, operation->argument, operation->site_hash};
  // A long callback around us would keep a short one waiting, too.
  if (!thread_state.long_callback && !IsLong(completion.site) &&
      completions_.TryPush(completion)) {
    return true;
  }
  if (!handed_.TryPush(completion)) return false;
  Notify();
  return true;
}

void Crew::CallWorkers() {
  for (int i = 1; i < workers_; ++i) Notify();
}

void Crew::BeginDrive() { thread_state.driving = true; }

void Crew::Drive(Daemon* own, int64_t deadline_ns) {
  thread_state.driving = true;
  // Pairs with the push before: see Lifecycle.
  if (!own->lifecycle().TryClaim() || own->Run(deadline_ns)) RunQueue(deadline_ns);
  thread_state.driving = false;
  if (run_queue_.ApproxSize() > 0) Notify();
  if (thread_state.draining) {
    if (completions_.ApproxSize() > 0) attend_(attend_argument_);
  } else {
    Drain();
  }
}

void Crew::RunQueue(int64_t deadline_ns) {
  Daemon* daemon;
  for (int turn = 1; run_queue_.TryPop(&daemon); ++turn) {
    if (daemon->lifecycle().TryBeginRun() && !daemon->Run(deadline_ns)) return;
    if (turn % 16 == 0 && NowNs() >= deadline_ns) return;
  }
}

void Crew::Drain() {
  Completion completion;
  if (!completions_.TryPop(&completion)) return;
  thread_state.draining = true;
  int64_t now_ns = NowNs();
  do {
    Call(completion, &now_ns);
  } while (completions_.TryPop(&completion));
  thread_state.draining = false;
}

void Crew::Call(const Completion& completion, int64_t* now_ns) {
  calls_.FetchAddRelaxed(1);
  if (completions_.ApproxSize() > 0) attend_(attend_argument_);
  thread_state.nested_ns = 0;
  thread_state.long_callback = IsLong(completion.site);
  completion.callback(completion.argument);
  thread_state.long_callback = false;
  const int64_t end_ns = NowNs();
  const bool took_long = end_ns - *now_ns - thread_state.nested_ns > kLongCallbackNs;
  Atomic<uint32_t>& streak = streak_[completion.site % kSites];
  const uint32_t before = streak.LoadRelaxed();
  if (took_long) {
    if (before < 2 * kLongStreak) streak.StoreRelaxed(before + 1);
  } else if (before > 0) {
    streak.StoreRelaxed(before / 2);
  }
  *now_ns = end_ns;
}

bool Crew::InCallback() const { return thread_state.draining; }

void Crew::NestedTime(int64_t ns) { thread_state.nested_ns += ns; }

bool Crew::TryTake(Work* work) {
  if (handed_.TryPop(&work->completion)) return true;
  if (relief_.LoadRelaxed() != 0) {
    if (completions_.TryPop(&work->completion)) return true;
    if (stop_.LoadRelaxed() == 0) relief_.StoreRelaxed(0);
  }
  if (runners_.FetchAddSeqCst(1) < workers_) {
    if (run_queue_.TryPop(&work->daemon)) return true;
  }
  runners_.FetchSubSeqCst(1);
  return false;
}

void Crew::Perform(const Work& work) {
  // The producer of what is left may have notified in vain (bounded_queue.h).
  if (run_queue_.ApproxSize() > 0 || handed_.ApproxSize() > 0) Notify();
  if (work.daemon != nullptr) {
    runs_.FetchAddRelaxed(1);
    thread_state.driving = true;
    const int64_t deadline_ns = NowNs() + kQuantumNs;
    if (work.daemon->lifecycle().TryBeginRun()) work.daemon->Run(deadline_ns);
    RunQueue(deadline_ns);
    thread_state.driving = false;
    runners_.FetchSubSeqCst(1);
    // The limit on runners may have turned another thread away.
    if (run_queue_.ApproxSize() > 0) Notify();
  } else {
    thread_state.draining = true;
    int64_t now_ns = NowNs();
    Call(work.completion, &now_ns);
    thread_state.draining = false;
  }
  Drain();
}

void Crew::Main(ThreadEntry* entry) {
  while (stop_.LoadAcquire() == 0) {
    Work work;
    if (TryTake(&work)) {
      Perform(work);
      continue;
    }
    searching_.FetchAddSeqCst(1);
    bool found = false;
    const int64_t end_ns = NowNs() + kSearchNs;
    do {
      SpinPause();
      found = TryTake(&work);
    } while (!found && NowNs() < end_ns && stop_.LoadRelaxed() == 0);
    searching_.FetchSubSeqCst(1);
    if (!found) {
      // From here on, whoever brings work sees a waiter (ParkingLot).
      const uint32_t epoch = lot_.PrepareWait();
      found = TryTake(&work);
      if (found || stop_.LoadSeqCst() != 0) {
        lot_.CancelWait();
      } else {
        idle_.FetchAddSeqCst(1);
        lot_.CommitWait(epoch);
        idle_.FetchSubSeqCst(1);
      }
    }
    if (found) Perform(work);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  threads_.FetchSubSeqCst(1);
  entry->exited = true;
  exit_.notify_all();
}

void Crew::Notify() {
  // A searching thread looks once more after it has left this count.
  if (searching_.LoadSeqCst() > 0) return;
  // Wakes a thread if one is parked or about to be.
  lot_.NotifyOne();
  if (idle_.LoadSeqCst() == 0 && threads_.LoadSeqCst() < workers_) Spawn();
}

bool Crew::Spawn() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stop_.LoadSeqCst() != 0 || threads_.LoadSeqCst() >= kMostThreads) return false;
  threads_.FetchAddSeqCst(1);
  ThreadEntry* entry = &entries_.emplace_back();
  entry->thread = std::thread([this, entry] { Main(entry); });
  return true;
}

bool Crew::Relieve() {
  const uint64_t calls = calls_.LoadRelaxed();
  const uint64_t runs = runs_.LoadRelaxed();
  const uint64_t queued = completions_.ApproxSize() + handed_.ApproxSize();
  if (queued > 0 && calls == last_calls_) {
    relief_.StoreSeqCst(1);
    const int64_t idle = idle_.LoadSeqCst();
    for (int64_t i = 0; i < static_cast<int64_t>(queued); ++i) {
      if (i < idle) {
        lot_.NotifyOne();
      } else if (!Spawn()) {
        break;
      }
    }
  } else if (run_queue_.ApproxSize() > 0 && runs == last_runs_ &&
             runners_.LoadSeqCst() < workers_ && searching_.LoadSeqCst() == 0) {
    // All threads are in callbacks, but daemons have work.
    if (idle_.LoadSeqCst() > 0) {
      lot_.NotifyOne();
    } else {
      Spawn();
    }
  }
  last_calls_ = calls;
  last_runs_ = runs;
  return queued > 0;
}

void Crew::TakeOverCallbacks() {
  relief_.StoreSeqCst(1);
  if (threads_.LoadSeqCst() == 0) Spawn();
  lot_.NotifyAll();
}

bool Crew::Stop(int64_t deadline_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  stop_.StoreSeqCst(1);
  lot_.NotifyAll();
  const auto all_exited = [this] {
    return std::all_of(entries_.begin(), entries_.end(),
                       [](const ThreadEntry& entry) { return entry.exited; });
  };
  exit_.wait_for(lock, std::chrono::nanoseconds(std::max<int64_t>(0, deadline_ns - NowNs())),
                 all_exited);
  bool stopped = true;
  for (ThreadEntry& entry : entries_) {
    if (entry.exited) {
      lock.unlock();  // it may still hold the lock on its way out
      entry.thread.join();
      lock.lock();
    } else if (entry.thread.joinable()) {
      entry.thread.detach();
      stopped = false;
    }
  }
  return stopped;
}

}  // namespace dfccl
