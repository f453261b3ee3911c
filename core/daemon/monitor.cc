// SPDX-License-Identifier: Apache-2.0
// The loop of the monitor thread and what it looks for.
#include "core/daemon/monitor.h"

#include <dirent.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "core/daemon/clock.h"
#include "core/daemon/cluster.h"
#include "core/daemon/crew.h"
#include "core/daemon/describe.h"
#include "core/daemon/record.h"

namespace dfccl {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// A process that uses less of a core than this while nothing happens is stuck.
constexpr double kIdleShare = 0.05;

// Whether a thread of this process but the calling one runs, waits for a core
// or for a disk: on a busy machine a process that computes may get hardly any
// processor time. False where the system does not tell.
bool AnotherThreadRuns() {
  DIR* threads = opendir("/proc/self/task");
  if (threads == nullptr) return false;
  int running = 0;
  while (const dirent* thread = readdir(threads)) {
    const std::string path = std::string("/proc/self/task/") + thread->d_name + "/stat";
    std::FILE* file = std::fopen(path.c_str(), "r");
    if (file == nullptr) continue;  // has ended
    char text[256];
    const size_t size = std::fread(text, 1, sizeof(text), file);
    std::fclose(file);
    // "id (name) state ...", and the name may hold anything.
    const size_t name_end = std::string_view(text, size).rfind(") ");
    if (name_end == std::string_view::npos || name_end + 2 >= size) continue;
    const char state = text[name_end + 2];
    if (state == 'R' || state == 'D') ++running;
  }
  closedir(threads);
  return running > 1;
}

// It waits for members, and has not failed.
bool IsIncomplete(const Record& record) {
  return !record.complete() && record.failed.LoadRelaxed() == 0;
}

void Warn(const std::string& text) { std::fprintf(stderr, "jax_dfccl: %s\n", text.c_str()); }

}  // namespace

Monitor::Monitor(const RuntimeOptions& options, RecordTable* table, Crew* crew, Cluster* cluster,
                 const Describer* describer, uint64_t (*submitted)(void*),
                 uint64_t (*finished)(void*), void* argument)
    : options_(options),
      table_(table),
      crew_(crew),
      cluster_(cluster),
      describer_(describer),
      submitted_(submitted),
      finished_(finished),
      argument_(argument),
      pace_(Pace::kAsleep),
      alarm_ns_(kNever) {
  thread_ = std::thread([this] { Main(); });
}

Monitor::~Monitor() { Stop(); }

void Monitor::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    condition_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Monitor::Submitted(int64_t submit_ns, int64_t timeout_ns) {
  Alarm(submit_ns + std::min(timeout_ns, options_.stall_warning_ns));
  // Partner: the monitor says it sleeps, then looks at the submissions again.
  if (pace_.LoadSeqCst() == Pace::kAsleep) WakeUp();
}

void Monitor::Attend() {
  // A stale look costs at most one slow tick.
  if (pace_.LoadRelaxed() != Pace::kFast) WakeUp();
}

void Monitor::WakeUp() {
  if (pace_.ExchangeSeqCst(Pace::kFast) == Pace::kFast) return;
  std::lock_guard<std::mutex> lock(mutex_);
  notified_ = true;
  condition_.notify_all();
}

void Monitor::Alarm(int64_t at_ns) {
  int64_t alarm_ns = alarm_ns_.LoadRelaxed();
  while (at_ns < alarm_ns && !alarm_ns_.CompareExchangeRelaxed(alarm_ns, at_ns)) {
  }
}

void Monitor::Main() {
  int64_t tick_ns = kFastNs;
  int64_t attend_until_ns = 0;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto wanted = [this] { return notified_ || stop_; };
      if (pace_.LoadSeqCst() == Pace::kAsleep) {
        condition_.wait(lock, wanted);
      } else {
        condition_.wait_for(lock, std::chrono::nanoseconds(tick_ns), wanted);
      }
      if (stop_) return;
      if (notified_) {
        // What stands still is told from what it was a tick ago.
        notified_ = false;
        tick_ns = kFastNs;
        attend_until_ns = NowNs() + kAttendNs;
        continue;
      }
    }
    const int64_t now_ns = NowNs();
    const bool callbacks = crew_->Relieve();
    if (callbacks) attend_until_ns = now_ns + kAttendNs;
    const uint64_t finished = finished_(argument_);
    const uint64_t submitted = submitted_(argument_);
    if (submitted + finished != activity_) {
      activity_ = submitted + finished;
      quiet_since_ns_ = now_ns;
      quiet_cpu_ns_ = -1;  // reading it is slow: not before it is wanted
      cycles_checked_ = false;
      TakeBackStuck();
    }
    if (now_ns < attend_until_ns) {
      tick_ns = kFastNs;
    } else if (quiet_since_ns_ == now_ns) {
      tick_ns = kCalmNs;
    } else {
      tick_ns = std::min(2 * tick_ns, kSlowNs);
    }
    if (now_ns >= alarm_ns_.LoadRelaxed()) LookForLate(now_ns);
    if (submitted != finished) {
      LookForCycles(now_ns);
    } else if (!callbacks && now_ns - quiet_since_ns_ >= kLingerNs) {
      pace_.StoreSeqCst(Pace::kAsleep);
      if (submitted_(argument_) != submitted) pace_.StoreSeqCst(Pace::kFast);
      continue;
    }
    pace_.StoreSeqCst(tick_ns == kFastNs ? Pace::kFast : Pace::kSlow);
    const int64_t alarm_ns = alarm_ns_.LoadRelaxed();
    if (alarm_ns != kNever) tick_ns = std::clamp(alarm_ns - now_ns, kFastNs, tick_ns);
  }
}

void Monitor::LookForLate(int64_t now_ns) {
  alarm_ns_.StoreRelaxed(kNever);  // submissions set it again, and so do we
  int64_t next_ns = kNever;
  const auto is_late = [now_ns](const OperationInfo& info) {
    return info.submit_ns + info.timeout_ns <= now_ns;
  };
  // Which records to act on, and when to look next.
  const auto wanted = [&](Record& record) {
    // A complete one ends by itself, unless another process stands still.
    const bool across = record.group->placement != nullptr;
    if ((record.complete() && !across) || record.failed.LoadRelaxed() != 0) return false;
    bool late = false;
    bool stalled = false;
    for (int i = 0; i < record.members(); ++i) {
      const Slot& slot = record.slots()[i];
      const bool stuck = across && slot.operation != nullptr && !slot.ended();
      if (!stuck && !record.Lacks(i)) continue;
      late = late || is_late(slot.info);
      next_ns = std::min(next_ns, slot.info.submit_ns + slot.info.timeout_ns);
      const int64_t stall_ns = slot.info.submit_ns + options_.stall_warning_ns;
      if (record.stall_reported) continue;
      stalled = stalled || stall_ns <= now_ns;
      next_ns = std::min(next_ns, stall_ns);
    }
    record.stall_reported = record.stall_reported || stalled;
    return late || stalled;
  };
  for (const RecordView& view : table_->View(wanted)) {
    bool late = false;
    for (int i = 0; i < view.group->size() && !late; ++i) {
      late = view.group->placement != nullptr && view.members[i].here && !view.members[i].ended &&
             is_late(view.members[i].info);
      for (int peer = 0; peer < view.group->size() && !late; ++peer) {
        late = view.Lacks(i, peer) && is_late(view.members[i].info);
      }
    }
    if (late) {
      table_->Fail(view.id, view.group,
                   Status(StatusCode::kDeadlineExceeded, describer_->Timeout(view, now_ns)),
                   view.arrived);
    } else {
      Warn(describer_->Stall(view, now_ns));
    }
  }
  if (next_ns != kNever) Alarm(std::max(next_ns, now_ns + kFastNs));
}

// Nothing was submitted or finished and the process did (nearly) nothing for
// the grace period: then programs that wait for each other wait for ever.
void Monitor::LookForCycles(int64_t now_ns) {
  if (options_.cycle_grace_ns <= 0 || now_ns == quiet_since_ns_) return;
  const bool across = cluster_->has_others();
  if (cycles_checked_ && (!across || now_ns - told_ns_ < kTellNs)) return;
  if (quiet_cpu_ns_ < 0) {
    quiet_since_ns_ = now_ns;
    quiet_cpu_ns_ = OthersCpuNs();
    return;
  }
  const int64_t quiet_ns = now_ns - quiet_since_ns_;
  if (quiet_ns < options_.cycle_grace_ns) return;
  const int64_t cpu_ns = OthersCpuNs();
  if (static_cast<double>(cpu_ns - quiet_cpu_ns_) > kIdleShare * static_cast<double>(quiet_ns) ||
      AnotherThreadRuns()) {
    // Someone computes, and may come yet.
    quiet_since_ns_ = now_ns;
    quiet_cpu_ns_ = cpu_ns;
    TakeBackStuck();
    return;
  }
  if (across) LookForCyclesAcross(now_ns);
  if (cycles_checked_) return;
  cycles_checked_ = true;
  const std::vector<RecordView> records = table_->View(IsIncomplete);
  for (const WaitCycle& cycle : FindCycles(records)) {
    const Status status(StatusCode::kCycle, describer_->Cycle(cycle));
    for (const WaitCycle::Link& link : cycle.chain) {
      table_->Fail(link.record->id, link.record->group, status, link.record->arrived);
    }
  }
}

void Monitor::TakeBackStuck() {
  if (told_) cluster_->TellStuck(0, activity_, {});
  told_ = false;
}

// The same where others of those are in other processes: all say what waits in
// them, and each looks whether it is in a circle.
void Monitor::LookForCyclesAcross(int64_t now_ns) {
  told_ns_ = now_ns;
  const uint64_t words = cluster_->StuckWords();
  std::vector<DeviceWait> waits;
  std::vector<RecordView> waiting;
  for (RecordView& view : table_->View(IsIncomplete)) {
    bool any = false;
    for (int i = 0; i < view.group->size(); ++i) {
      if (!view.members[i].here || !view.members[i].waited_for) continue;
      DeviceWait wait = describer_->Wait(view, i);
      if (wait.awaits.empty()) continue;
      waits.push_back(std::move(wait));
      any = any || view.group->placement != nullptr;
    }
    if (any) waiting.push_back(std::move(view));
  }
  if (waiting.empty() && !told_) return;
  told_ = !waiting.empty();
  const Cluster::MustEnd ends = cluster_->TellStuck(words, activity_, std::move(waits));
  for (const RecordView& view : waiting) {
    if (std::find(ends.ids.begin(), ends.ids.end(), view.id) == ends.ids.end()) continue;
    table_->Fail(view.id, view.group, Status(StatusCode::kCycle, ends.why), view.arrived);
  }
}

int64_t Monitor::OthersCpuNs() const { return ProcessCpuNs() - ThreadCpuNs(); }

}  // namespace dfccl
