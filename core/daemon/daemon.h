// SPDX-License-Identifier: Apache-2.0
// The daemon of one device: takes submissions, runs their tasks, turns to
// another task where one is blocked, and quits when nothing can move. It has no
// thread: whoever has time claims it (Lifecycle) and runs it for a while.
#ifndef DFCCL_CORE_DAEMON_DAEMON_H_
#define DFCCL_CORE_DAEMON_DAEMON_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/daemon/buffer_pool.h"
#include "core/daemon/context_slot.h"
#include "core/daemon/counter.h"
#include "core/daemon/operation.h"
#include "core/daemon/record.h"
#include "core/daemon/spin_lock.h"
#include "core/protocol/bounded_queue.h"
#include "core/protocol/interpreter.h"
#include "core/protocol/lifecycle.h"
#include "core/protocol/order.h"
#include "core/protocol/stickiness.h"
#include "core/protocol/wake_list.h"
#include "core/reduce/reduce.h"
#include "core/trace/flight_ring.h"

namespace dfccl {

class Cluster;
class Crew;
class Describer;

// Moves a member's progress word, perhaps by more than one, and wakes whoever
// slept for that.
void SignalProgress(Record* record, uint16_t member, uint32_t value);

// A finished operation as the flight record keeps it.
struct Flight {
  OperationInfo info;
  const Group* group = nullptr;
  Signature signature;
  StatusCode code = StatusCode::kOk;
  int64_t complete_ns = 0;  // the last member arrived; 0: never
  int64_t finish_ns = 0;
  int64_t bytes = 0;
  uint64_t preemptions = 0;
  std::string error;  // empty, so free, unless it failed
};

// What all daemons of a runtime share.
struct DaemonEnvironment {
  RecordTable* table;
  BufferPool* buffers;
  Crew* crew;
  Cluster* cluster;
  const Describer* describer;
  bool preemption;
  uint64_t queue_capacity;
  uint64_t first_sequence;
};

class Daemon {
 public:
  Daemon(int64_t device, const DaemonEnvironment& environment);
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  int64_t device() const { return device_; }

  // A fresh operation from the pool, with its sequence number. Thread-safe.
  Operation* Allocate(uint64_t* sequence);
  // Back to the pool, with all memory it holds. Thread-safe.
  void Release(Operation* operation);

  // Hands the task over; full means false, and then the caller drives. The
  // caller must claim or schedule the daemon next.
  bool TrySubmit(Operation* operation) { return submissions_.TryPush(operation); }

  // Operations of this device whose data was cut into slices yield to others
  // after this many bytes read and written.
  static constexpr int64_t kSliceBytes = int64_t{512} << 10;

  // Wakes workers for data steps that are worth it.
  void CallHelp();

  // Makes a task ready again that TryWake or TryWakeAny took from its sleep.
  // Thread-safe.
  void Wake(Operation* operation);

  // Runs tasks until none can move (true: parked) or `deadline_ns` has passed
  // (false: rescheduled). The caller has claimed the daemon.
  bool Run(int64_t deadline_ns);

  // For the runtime: how many threads may run daemons, and how many there are.
  void SetShare(uint32_t runners, uint32_t daemons) {
    share_.StoreRelaxed(uint64_t{runners} << 32 | daemons);
  }

  Lifecycle& lifecycle() { return lifecycle_; }
  Daemon* next_runnable = nullptr;  // in the list of a thread that runs daemons
  Atomic<uint32_t> core;            // where it last moved much data

  struct Counters {
    Counter completed, failed, quits, restarts, bytes, largest_wait_ns;
  };
  const Counters& counters() const { return counters_; }
  const ContextSlot& context_slot() const { return running_; }
  uint64_t submitted() const { return next_sequence_.LoadSeqCst() - first_sequence_; }
  uint64_t finished() const { return counters_.completed.Load() + counters_.failed.Load(); }
  FlightRing<Flight, SpinLock>& flights() { return flights_; }

 private:
  class Machine;

  void TakeIn();
  void MakeReady(Operation* operation, bool front);
  Operation* NextTask();
  bool RunTask(Operation* operation, int64_t deadline_ns);
  void Finish(Operation* operation, const Status& status);
  void Post(Operation* operation);
  bool PostLeftovers();

  const int64_t device_;
  const DaemonEnvironment environment_;
  const uint64_t first_sequence_;

  // Written by submitting threads and wakers.
  Lifecycle lifecycle_;
  WakeList woken_;
  BoundedQueue<Operation*> submissions_;
  alignas(kCacheLine) Atomic<uint64_t> next_sequence_;
  SpinLock pool_lock_;
  Operation* free_ = nullptr;
  Atomic<uint64_t> share_;

  // Used by whoever drives.
  alignas(kCacheLine) Order order_;
  Stickiness stickiness_;
  uint64_t applied_share_ = 0;
  ContextSlot running_;
  Operation* held_ = nullptr;  // without preemption: the resident task, ready again
  uint64_t asleep_ = 0;
  uint64_t unfinished_ = 0;
  Operation* unposted_ = nullptr;  // finished, but the completion queue was full
  bool quit_ = false;              // parked with unfinished tasks
  Counters counters_;
  FlightRing<Flight, SpinLock> flights_;
  std::vector<ReduceSource> sources_;  // arguments of one data step
  std::vector<ReduceDestination> destinations_;
  std::vector<std::unique_ptr<Operation[]>> chunks_;  // the pool's memory
};

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_DAEMON_H_
