// SPDX-License-Identifier: Apache-2.0
// The monitor: one thread that looks after what nobody else would notice:
// members that do not come, programs that wait for each other, callbacks that
// wait behind one that does not return. It sleeps when nothing is in flight,
// and looks rarely while nothing happens.
#ifndef DFCCL_CORE_DAEMON_MONITOR_H_
#define DFCCL_CORE_DAEMON_MONITOR_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "core/protocol/atomics.h"
#include "core/runtime.h"

namespace dfccl {

class Cluster;
class Crew;
class Describer;
class RecordTable;

class Monitor {
 public:
  // `submitted` and `finished` add up all devices' operations.
  Monitor(const RuntimeOptions& options, RecordTable* table, Crew* crew, Cluster* cluster,
          const Describer* describer, uint64_t (*submitted)(void*), uint64_t (*finished)(void*),
          void* argument);
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  // After an operation was counted as submitted (SeqCst).
  void Submitted(int64_t submit_ns, int64_t timeout_ns);

  // Callbacks wait behind one that runs: look soon.
  void Attend();

  void Stop();

 private:
  enum class Pace : uint32_t { kFast, kSlow, kAsleep };

  static constexpr int64_t kFastNs = 1'000'000;
  static constexpr int64_t kCalmNs = 10'000'000;  // while operations come and go
  static constexpr int64_t kSlowNs = 50'000'000;
  static constexpr int64_t kAttendNs = 10'000'000;   // fast for so long after a call for it
  static constexpr int64_t kTellNs = 250'000'000;    // between words to other processes
  static constexpr int64_t kLingerNs = 200'000'000;  // idle so long before it sleeps

  void Main();
  void WakeUp();
  void Alarm(int64_t at_ns);
  void LookForLate(int64_t now_ns);
  void LookForCycles(int64_t now_ns);
  void LookForCyclesAcross(int64_t now_ns);
  void TakeBackStuck();
  int64_t OthersCpuNs() const;

  const RuntimeOptions options_;
  RecordTable* const table_;
  Crew* const crew_;
  Cluster* const cluster_;
  const Describer* const describer_;
  uint64_t (*const submitted_)(void*);
  uint64_t (*const finished_)(void*);
  void* const argument_;

  Atomic<Pace> pace_;
  Atomic<int64_t> alarm_ns_;  // no member's time is up before

  // The monitor thread's own.
  uint64_t activity_ = 0;       // submissions and finishes
  int64_t quiet_since_ns_ = 0;  // neither since then
  int64_t quiet_cpu_ns_ = -1;   // the process's CPU time then; -1: not read yet
  int64_t told_ns_ = 0;
  bool told_ = false;  // other processes, that something waits here
  bool cycles_checked_ = false;

  std::mutex mutex_;
  std::condition_variable condition_;
  bool notified_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_MONITOR_H_
