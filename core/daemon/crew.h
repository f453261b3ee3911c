// SPDX-License-Identifier: Apache-2.0
// The threads: who runs daemons and who calls callbacks.
//
// Daemons are run by submitting threads for a bounded time, and by the crew's
// own threads, of which at most `workers` run daemons at a time. What becomes
// runnable through a thread that runs daemons waits in that thread's own list:
// small messages stay on one core. When there is enough to do for more threads,
// or the thread must go, the list is moved to the run queue, where any thread
// finds it. The crew starts threads when they are first needed and parks them
// when there is nothing to do.
//
// A callback is foreign code that may take any time or even wait for another
// callback or for the program that made a submission. So it never runs under a
// daemon, and inside a submission only if it is short and was said to wait for
// nobody (Submission::closed): then the submitting thread calls it on its way
// out, which saves waking another thread. All others run on crew threads with
// nothing below them. Short callbacks are called by one thread, one after the other (a
// trampoline); what they submit is run right there, so a chain of dependent
// collectives stays on that thread without context switches. Call sites whose
// callbacks were seen to be long get a thread each, also beyond `workers`. When
// callbacks wait behind one that does not return, the monitor calls Relieve,
// and more threads take them over.
#ifndef DFCCL_CORE_DAEMON_CREW_H_
#define DFCCL_CORE_DAEMON_CREW_H_

#include <sched.h>

#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <thread>

#include "core/daemon/condvar_sleeper.h"
#include "core/daemon/operation.h"
#include "core/daemon/run_queue.h"
#include "core/protocol/atomics.h"
#include "core/protocol/bounded_queue.h"
#include "core/protocol/parking.h"

namespace dfccl {

class Daemon;

class Crew {
 public:
  // `attend` asks the monitor to look at the completion queues soon.
  Crew(int workers, void (*attend)(void*), void* attend_argument);
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  int workers() const { return workers_; }

  // A daemon that has become Scheduled. Thread-safe.
  void Enqueue(Daemon* daemon);

  // Takes over the callback of a finished operation; false: no room, retry.
  bool TryPost(Operation* operation);

  // There is enough to do for several threads.
  void CallWorkers();

  // Announces that this thread will call Drive, and runs what becomes runnable
  // through it until then.
  void BeginDrive();

  // Ends a submission: calls the closed callbacks that it brought about.
  void EndDrive();

  // Runs `own`, if it is given and nobody else does, then whatever daemons it made runnable,
  // until nothing is runnable or `deadline_ns` has passed. Calls no callbacks,
  // and holds no daemon on return.
  void Drive(Daemon* own, int64_t deadline_ns);

  // On a thread inside a callback, time spent in the runtime is not the
  // callback's: true there, and NestedTime takes it off.
  bool InCallback() const;
  void NestedTime(int64_t ns);

  // Called by the monitor about once a millisecond while there may be
  // callbacks: brings in threads if nothing has moved since the last call.
  // Returns true while callbacks are queued.
  bool Relieve();

  // Leaves all queued callbacks to crew threads from now on.
  void TakeOverCallbacks();

  // Ends the threads. Waits until `deadline_ns`; threads that are in foreign
  // code then are left alone (false).
  bool Stop(int64_t deadline_ns);

 private:
  struct Completion {
    Runtime::Callback callback;
    void* argument;
    uint32_t site;
    bool closed;
  };
  static Completion CompletionOf(const Operation& operation) {
    return {operation.callback, operation.argument, operation.site_hash, operation.closed};
  }
  struct Work {
    Daemon* daemon = nullptr;
    Completion completion = {};
    bool drain = false;  // a short callback: go on with the others
  };
  struct ThreadEntry {
    std::thread thread;
    bool exited = false;
    ParkingSpot<CondvarSleeper> spot;
    Atomic<int32_t> system_id;
    bool restricted = false;  // kept off a core by whoever wakes it
  };

  static constexpr int64_t kLongCallbackNs = 50'000;
  static constexpr uint32_t kLongStreak = 4;
  static constexpr int64_t kSearchNs = 10'000;
  // After a daemon that ran for long: as long as its peers may take to end theirs
  // and the program to come back with more. Waking a thread costs about as much.
  static constexpr int64_t kLongSearchNs = 200'000;
  static constexpr int64_t kLongRunNs = 50'000;
  static constexpr int64_t kClosedNs = 200'000;  // a submission may spend on callbacks
  static constexpr int64_t kQuantumNs = 1'000'000;
  static constexpr int kMostThreads = 1024;
  static constexpr int kReliefThreads = 16;
  static constexpr int kSites = 1024;

  bool TryTake(Work* work);
  bool RunOwn(int64_t deadline_ns);
  bool Spill();
  int64_t Perform(const Work& work);  // returns how long to search for more
  void Main(ThreadEntry* entry);
  void Notify(bool elsewhere);
  void OfferDaemons(bool elsewhere);
  bool WakeOne(bool elsewhere);
  bool Spawn();
  void Drain();
  void Call(const Completion& completion, int64_t* now_ns);
  bool IsLong(uint32_t site) const;
  uint64_t Queued() const { return short_.ApproxSize() + long_.ApproxSize(); }

  const int workers_;
  const cpu_set_t allowed_cores_;
  void (*const attend_)(void*);
  void* const attend_argument_;

  RunQueue run_queue_;
  BoundedQueue<Completion> short_;  // callbacks for one thread after the other
  BoundedQueue<Completion> long_;   // callbacks for a thread each
  Atomic<int32_t> runners_;         // threads that run daemons
  Atomic<int32_t> drainers_;        // crew threads that call short callbacks
  Atomic<int32_t> searching_;       // crew threads that look for work before they park
  Atomic<int32_t> idle_;            // crew threads that are parked or about to be
  Atomic<int32_t> threads_;
  Atomic<ThreadEntry*> crew_[kMostThreads];  // the first threads_ of them
  Atomic<uint32_t> relief_;                  // any number of threads may call short callbacks
  Atomic<uint32_t> stop_;
  Atomic<uint64_t> calls_;  // callbacks begun
  Atomic<uint64_t> runs_;   // daemons taken by crew threads
  // Long callbacks in a row, by call site. Where the average would take one
  // that lost its core for long ones, the streak does not.
  Atomic<uint32_t> streak_[kSites];

  uint64_t last_calls_ = 0;  // the monitor's
  uint64_t last_runs_ = 0;

  std::mutex mutex_;  // of the list and of `exited`
  std::condition_variable exit_;
  std::list<ThreadEntry> entries_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_CREW_H_
