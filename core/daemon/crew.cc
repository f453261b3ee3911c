// SPDX-License-Identifier: Apache-2.0
// The life of crew threads, and the hand-over of daemons and callbacks to them.
#include "core/daemon/crew.h"

#include <sys/syscall.h>
#include <unistd.h>

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
  bool driving = false;  // runs daemons, now those in the list:
  Daemon* first = nullptr;
  Daemon* last = nullptr;
  bool in_callback = false;    // and will look for more callbacks after it
  bool long_callback = false;  // is inside one of a call site with long ones
  bool collects = false;       // is in a submission that will call closed callbacks, of these:
  Operation* first_closed = nullptr;
  Operation* last_closed = nullptr;
  int64_t nested_ns = 0;  // time in the runtime within the callback
};
thread_local ThreadState thread_state;

cpu_set_t AllowedCores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  sched_getaffinity(0, sizeof(cores), &cores);
  return cores;
}

// Of a thread; 0: the calling one. If the system refuses, all stays as it is.
void AllowCores(int32_t system_id, const cpu_set_t& cores) {
  sched_setaffinity(system_id, sizeof(cores), &cores);
}

}  // namespace

Crew::Crew(int workers, void (*attend)(void*), void* attend_argument)
    : workers_(workers),
      allowed_cores_(AllowedCores()),
      attend_(attend),
      attend_argument_(attend_argument),
      run_queue_(kMostDaemons, workers),
      short_(kMostCompletions),
      long_(kMostCompletions) {}

void Crew::Enqueue(Daemon* daemon) {
  ThreadState& thread = thread_state;
  if (thread.driving) {
    daemon->next_runnable = nullptr;
    (thread.first != nullptr ? thread.last->next_runnable : thread.first) = daemon;
    thread.last = daemon;
    return;
  }
  run_queue_.Push(daemon);
  OfferDaemons(/*elsewhere=*/false);
}

// Moves this thread's list to the run queue; false if it is empty.
bool Crew::Spill() {
  Daemon* daemon = thread_state.first;
  if (daemon == nullptr) return false;
  thread_state.first = nullptr;
  while (daemon != nullptr) {
    Daemon* next = daemon->next_runnable;  // in the queue it is anyone's
    run_queue_.Push(daemon);
    daemon = next;
  }
  return true;
}

// Runs this thread's list; false if `deadline_ns` passed before its end.
bool Crew::RunOwn(int64_t deadline_ns) {
  ThreadState& thread = thread_state;
  for (int turn = 1; thread.first != nullptr; ++turn) {
    Daemon* daemon = thread.first;
    thread.first = daemon->next_runnable;
    if (daemon->lifecycle().TryBeginRun() && !daemon->Run(deadline_ns)) return false;
    if (turn % 16 == 0 && NowNs() >= deadline_ns) return false;
  }
  return true;
}

bool Crew::IsLong(uint32_t site) const {
  return streak_[site % kSites].LoadRelaxed() >= kLongStreak;
}

bool Crew::TryPost(Operation* operation) {
  const Completion completion = CompletionOf(*operation);
  if (operation->closed && thread_state.collects && !IsLong(completion.site)) {
    ThreadState& thread = thread_state;
    operation->next = nullptr;
    (thread.first_closed != nullptr ? thread.last_closed->next : thread.first_closed) = operation;
    thread.last_closed = operation;
    return true;
  }
  // A long callback around us would keep a short one waiting, too.
  if (!thread_state.long_callback && !IsLong(completion.site) && short_.TryPush(completion)) {
    return true;
  }
  if (!long_.TryPush(completion)) return false;
  Notify(/*elsewhere=*/false);
  return true;
}

void Crew::CallWorkers() {
  Spill();
  // This thread, and others that may not have come to their share yet.
  for (int i = std::max(1, runners_.LoadSeqCst()); i < workers_; ++i) {
    if (searching_.LoadSeqCst() >= i) break;
    if (!WakeOne(/*elsewhere=*/true) && threads_.LoadSeqCst() < workers_) Spawn();
  }
}

void Crew::BeginDrive() {
  ThreadState& thread = thread_state;
  thread.driving = true;
  if (!thread.in_callback) thread.collects = true;
}

void Crew::EndDrive() {
  ThreadState& thread = thread_state;
  if (thread.in_callback || !thread.collects) return;
  if (thread.first_closed != nullptr) {
    int64_t now_ns = NowNs();
    const int64_t end_ns = now_ns + kClosedNs;
    while (Operation* operation = thread.first_closed) {
      thread.first_closed = operation->next;  // the callback gives the operation back
      const Completion completion = CompletionOf(*operation);
      // What is below us must not wait for long, unless the queue is full.
      if (now_ns >= end_ns && short_.TryPush(completion)) {
        Notify(/*elsewhere=*/false);
      } else {
        Call(completion, &now_ns);
      }
    }
  }
  thread.collects = false;
}

void Crew::Drive(Daemon* own, int64_t deadline_ns) {
  thread_state.driving = true;
  runners_.FetchAddSeqCst(1);
  bool in_time = own == nullptr || !own->lifecycle().TryClaim() || own->Run(deadline_ns);
  in_time = in_time && RunOwn(deadline_ns);
  Daemon* daemon;
  while (in_time && run_queue_.TryPop(&daemon)) {
    if (daemon->lifecycle().TryBeginRun()) in_time = daemon->Run(deadline_ns);
    in_time = in_time && RunOwn(deadline_ns) && NowNs() < deadline_ns;
  }
  thread_state.driving = false;
  Spill();
  runners_.FetchSubSeqCst(1);
  OfferDaemons(/*elsewhere=*/false);
  if (short_.ApproxSize() == 0) return;
  if (thread_state.in_callback && !thread_state.collects) {
    // This crew thread comes to them when the callback around us returns.
    attend_(attend_argument_);
  } else if (drainers_.LoadSeqCst() == 0) {
    Notify(/*elsewhere=*/false);
  }
}

void Crew::Drain() {
  Completion completion;
  // Looks again after it has left `drainers_`: see Drive.
  while (short_.TryPop(&completion)) {
    drainers_.FetchAddSeqCst(1);
    int64_t now_ns = NowNs();
    do {
      Call(completion, &now_ns);
    } while (short_.TryPop(&completion));
    drainers_.FetchSubSeqCst(1);
  }
}

void Crew::Call(const Completion& completion, int64_t* now_ns) {
  calls_.FetchAddRelaxed(1);
  if (short_.ApproxSize() > 0) attend_(attend_argument_);
  Atomic<uint32_t>& streak = streak_[completion.site % kSites];
  const uint32_t before = streak.LoadRelaxed();
  // A callback that waits for nobody can only take long by computing. The time
  // that others took its core for would make a busy machine busier still.
  const bool by_cpu = completion.closed && before > 0;
  const int64_t begin_ns = by_cpu ? ThreadCpuNs() : *now_ns;
  thread_state.in_callback = true;
  thread_state.nested_ns = 0;
  thread_state.long_callback = before >= kLongStreak;
  completion.callback(completion.argument);
  thread_state.long_callback = false;
  thread_state.in_callback = false;
  *now_ns = NowNs();
  const int64_t end_ns = by_cpu ? ThreadCpuNs() : *now_ns;
  if (end_ns - begin_ns - thread_state.nested_ns > kLongCallbackNs) {
    if (before < 2 * kLongStreak) streak.StoreRelaxed(before + 1);
  } else if (before > 0) {
    streak.StoreRelaxed(before / 2);
  }
}

bool Crew::InCallback() const { return thread_state.in_callback; }

void Crew::NestedTime(int64_t ns) { thread_state.nested_ns += ns; }

bool Crew::TryTake(Work* work) {
  if (long_.TryPop(&work->completion)) return true;
  if (drainers_.LoadSeqCst() == 0 || relief_.LoadRelaxed() != 0) {
    if (short_.TryPop(&work->completion)) {
      work->drain = true;
      return true;
    }
    if (stop_.LoadRelaxed() == 0) relief_.StoreRelaxed(0);
  }
  do {
    if (runners_.FetchAddSeqCst(1) < workers_ && run_queue_.TryPop(&work->daemon)) return true;
    runners_.FetchSubSeqCst(1);
    // Whoever brought a daemon meanwhile may have taken this thread for one that runs daemons.
  } while (run_queue_.ApproxSize() > 0 && runners_.LoadSeqCst() < workers_);
  return false;
}

int64_t Crew::Perform(const Work& work) {
  int64_t search_ns = kSearchNs;
  if (work.drain) drainers_.FetchAddSeqCst(1);
  // The producer of what is left may have notified in vain (bounded_queue.h).
  if (long_.ApproxSize() > 0) Notify(/*elsewhere=*/false);
  OfferDaemons(/*elsewhere=*/true);
  if (work.daemon != nullptr) {
    runs_.FetchAddRelaxed(1);
    thread_state.driving = true;
    const int64_t begin_ns = NowNs();
    const int64_t deadline_ns = begin_ns + kQuantumNs;
    if (!work.daemon->lifecycle().TryBeginRun() || work.daemon->Run(deadline_ns)) {
      RunOwn(deadline_ns);
    }
    if (NowNs() - begin_ns >= kLongRunNs) search_ns = kLongSearchNs;
    thread_state.driving = false;
    Spill();
    runners_.FetchSubSeqCst(1);
    // Not only for what was spilled: the limit on runners may have turned another
    // thread away. One daemon is for this thread, unless callbacks come first.
    if (run_queue_.ApproxSize() > (short_.ApproxSize() > 0 ? 0u : 1u))
      OfferDaemons(/*elsewhere=*/true);
  } else {
    int64_t now_ns = NowNs();
    Call(work.completion, &now_ns);
  }
  if (work.drain) drainers_.FetchSubSeqCst(1);
  Drain();
  return search_ns;
}

void Crew::Main(ThreadEntry* entry) {
  entry->system_id.StoreRelaxed(static_cast<int32_t>(syscall(SYS_gettid)));
  int64_t search_ns = kSearchNs;
  while (stop_.LoadAcquire() == 0) {
    Work work;
    if (TryTake(&work)) {
      search_ns = Perform(work);
      continue;
    }
    searching_.FetchAddSeqCst(1);
    bool found = false;
    const int64_t begin_ns = NowNs();
    int64_t now_ns = begin_ns;
    do {
      // After a while others may have this core, if there are any.
      if (now_ns - begin_ns < kSearchNs) {
        SpinPause();
      } else {
        std::this_thread::yield();
      }
      found = TryTake(&work);
      now_ns = NowNs();
    } while (!found && now_ns - begin_ns < search_ns && stop_.LoadRelaxed() == 0);
    searching_.FetchSubSeqCst(1);
    if (!found) {
      // From here on, whoever brings work can claim this thread (ParkingSpot).
      idle_.FetchAddSeqCst(1);
      entry->spot.Prepare();
      found = TryTake(&work);
      if (found || stop_.LoadSeqCst() != 0) {
        entry->spot.Cancel();
      } else {
        entry->spot.SleepUntilWoken();
      }
      idle_.FetchSubSeqCst(1);
      if (entry->restricted) {
        entry->restricted = false;
        AllowCores(0, allowed_cores_);
      }
    }
    search_ns = found ? Perform(work) : kSearchNs;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  threads_.FetchSubSeqCst(1);
  entry->exited = true;
  exit_.notify_all();
}

void Crew::Notify(bool elsewhere) {
  // A searching thread looks once more after it has left this count.
  if (searching_.LoadSeqCst() > 0) return;
  if (!WakeOne(elsewhere) && threads_.LoadSeqCst() < workers_) Spawn();
}

void Crew::OfferDaemons(bool elsewhere) {
  if (run_queue_.ApproxSize() == 0) return;
  // Whoever runs daemons looks at the queue after it has left this count.
  if (runners_.LoadSeqCst() < workers_) Notify(elsewhere);
}

// Wakes a thread if one is parked or about to be.
bool Crew::WakeOne(bool elsewhere) {
  if (idle_.LoadSeqCst() == 0) return false;
  const int32_t threads = threads_.LoadSeqCst();
  for (int32_t i = 0; i < threads; ++i) {
    ThreadEntry* entry = crew_[i].LoadAcquire();
    if (!entry->spot.TryClaim()) continue;
    if (elsewhere && workers_ > 1) {
      // Linux likes to put a thread that is woken on the core of whoever wakes
      // it, to wait there until that has moved its data.
      cpu_set_t others = allowed_cores_;
      const int core = sched_getcpu();
      if (core >= 0 && core < CPU_SETSIZE) CPU_CLR(core, &others);
      if (CPU_COUNT(&others) > 0) {
        entry->restricted = true;
        AllowCores(entry->system_id.LoadRelaxed(), others);
      }
    }
    entry->spot.Wake();
    return true;
  }
  return false;
}

bool Crew::Spawn() {
  std::lock_guard<std::mutex> lock(mutex_);
  const int32_t threads = threads_.LoadSeqCst();
  if (stop_.LoadSeqCst() != 0 || threads >= kMostThreads) return false;
  ThreadEntry* entry = &entries_.emplace_back();
  // Release: partner is the acquire in WakeOne.
  crew_[threads].StoreRelease(entry);
  threads_.FetchAddSeqCst(1);
  entry->thread = std::thread([this, entry] { Main(entry); });
  return true;
}

bool Crew::Relieve() {
  const uint64_t calls = calls_.LoadRelaxed();
  const uint64_t runs = runs_.LoadRelaxed();
  const uint64_t queued = Queued();
  if (queued > 0 && calls == last_calls_) {
    relief_.StoreSeqCst(1);
    const int64_t idle = idle_.LoadSeqCst();
    // Enough for callbacks that wait for each other within a few ticks, without
    // a thread for each of very many.
    const int64_t most = idle + threads_.LoadSeqCst() + kReliefThreads;
    for (int64_t i = 0; i < std::min(static_cast<int64_t>(queued), most); ++i) {
      if (!WakeOne(/*elsewhere=*/false) && !Spawn()) break;
    }
  } else if (run_queue_.ApproxSize() > 0 && runs == last_runs_ &&
             runners_.LoadSeqCst() < workers_ && searching_.LoadSeqCst() == 0) {
    // All threads are in callbacks, but daemons have work.
    if (!WakeOne(/*elsewhere=*/false)) Spawn();
  }
  last_calls_ = calls;
  last_runs_ = runs;
  return queued > 0;
}

void Crew::TakeOverCallbacks() {
  relief_.StoreSeqCst(1);
  if (threads_.LoadSeqCst() == 0) Spawn();
  while (WakeOne(/*elsewhere=*/false)) {
  }
}

bool Crew::Stop(int64_t deadline_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  stop_.StoreSeqCst(1);
  while (WakeOne(/*elsewhere=*/false)) {
  }
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
