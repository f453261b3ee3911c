// SPDX-License-Identifier: Apache-2.0
// Plays members of collectives against the runtime, with data that depends on
// member, position and instance, so that a crossed or stale buffer shows.
#ifndef DFCCL_TESTS_CORE_DAEMON_HARNESS_H_
#define DFCCL_TESTS_CORE_DAEMON_HARNESS_H_

#include <gtest/gtest.h>
#include <time.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "core/daemon/options.h"
#include "core/group.h"
#include "core/plans/choice.h"
#include "core/runtime.h"
#include "tests/core/daemon/kind_values.h"

namespace dfccl {
namespace testing {

constexpr std::chrono::seconds kLimit(60);

inline double ProcessCpuSeconds() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

inline std::vector<int64_t> Devices(int count, int64_t first = 0) {
  std::vector<int64_t> devices(count);
  std::iota(devices.begin(), devices.end(), first);
  return devices;
}

// The plan of this name for all kinds that have it; "": nothing is forced.
inline RuntimeOptions Forcing(const std::string& plan) {
  RuntimeOptions options;
  for (int k = 0; k < kKindCount; ++k) {
    const auto kind = static_cast<Kind>(k);
    for (const PlanChoice& choice : PlansOf(kind)) {
      if (PlanName(choice) == plan) {
        options.plan_rules.push_back({kind, 0, PlanRule::kAnyBytes, choice});
      }
    }
  }
  return options;
}

// One instance of an all_reduce(sum) over f32.
struct Instance {
  const Group* group = nullptr;
  uint64_t number = 0;
  int64_t count = 0;

  float Expected(int64_t position) const {
    float sum = 0;
    for (int64_t device : group->members) sum += Value(device, position, number);
    return sum;
  }
};

// One member's part, with its buffers.
class Part {
 public:
  Part(const Instance& instance, int member) : instance_(instance), member_(member) {
    source_.resize(instance.count);
    for (int64_t i = 0; i < instance.count; ++i) source_[i] = Value(device(), i, instance.number);
    result_.assign(instance.count, -1.f);
  }

  int64_t device() const { return instance_.group->members[member_]; }

  Submission MakeSubmission() {
    Submission submission;
    submission.device = device();
    submission.group = instance_.group;
    submission.member = member_;
    submission.id = {instance_.number * 0x9e3779b97f4a7c15u, instance_.number};
    submission.signature.count = instance_.count;
    submission.source = source_.data();
    submission.result = result_.data();
    return submission;
  }

  void Submit() { Submit(MakeSubmission()); }
  void Submit(const Submission& submission) { operation_ = Runtime::Get().Submit(submission); }

  bool Finished() {
    Status status;
    return Runtime::Get().Finished(operation_, &status);
  }

  // Registers a callback; if it `blocks`, the program waits for this call from now on.
  void Watch(bool blocks = true) {
    watched_ = true;
    if (!Runtime::Get().OnFinish(operation_, &Part::OnFinish, this, blocks)) {
      std::lock_guard<std::mutex> lock(mutex_);
      finished_ = true;
    }
  }

  // False: it has not finished in time.
  bool WaitFor(std::chrono::nanoseconds limit) {
    if (!watched_) Watch();
    std::unique_lock<std::mutex> lock(mutex_);
    return condition_.wait_for(lock, limit, [this] { return finished_; });
  }

  // Waits, releases, and returns the outcome.
  Status Await() {
    if (!WaitFor(kLimit)) {
      ADD_FAILURE() << "device " << device() << ", instance " << instance_.number << " hangs";
      std::abort();  // its buffers are still in use
    }
    Status status;
    EXPECT_TRUE(Runtime::Get().Finished(operation_, &status));
    Runtime::Get().Release(operation_);
    operation_ = nullptr;
    return status;
  }

  // Await, and the values must be right.
  void AwaitValues() {
    const Status status = Await();
    ASSERT_TRUE(status.ok()) << status.message();
    for (int64_t i = 0; i < instance_.count; ++i) {
      ASSERT_EQ(result_[i], instance_.Expected(i))
          << "device " << device() << ", position " << i << ", instance " << instance_.number;
    }
  }

  Operation* operation() { return operation_; }
  std::vector<float>& source() { return source_; }
  std::vector<float>& result() { return result_; }

 private:
  static void OnFinish(void* argument) {
    Part* part = static_cast<Part*>(argument);
    std::lock_guard<std::mutex> lock(part->mutex_);
    part->finished_ = true;
    part->condition_.notify_all();
  }

  const Instance instance_;
  const int member_;
  std::vector<float> source_;
  std::vector<float> result_;
  Operation* operation_ = nullptr;
  bool watched_ = false;
  std::mutex mutex_;
  std::condition_variable condition_;
  bool finished_ = false;
};

class RuntimeTest : public ::testing::Test {
 protected:
  void TearDown() override {
    Runtime::Shutdown();
    Runtime::Configure(RuntimeOptions());
    SetInternalOptions(InternalOptions());
  }

  static void Start(const RuntimeOptions& options) {
    Runtime::Shutdown();
    Runtime::Configure(options);
  }

  static Instance Make(const std::vector<int64_t>& devices, int64_t count) {
    static uint64_t next = 1;
    return {Runtime::Get().InternGroup(devices), next++, count};
  }

  // All members in order, from this thread.
  static void RunOnce(const Instance& instance) {
    std::vector<std::unique_ptr<Part>> parts;
    for (int i = 0; i < instance.group->size(); ++i) {
      parts.push_back(std::make_unique<Part>(instance, i));
      parts.back()->Submit();
    }
    for (auto& part : parts) part->AwaitValues();
  }

  static DeviceCounters Sum(const FlightReport& report) {
    DeviceCounters sum;
    for (const DeviceCounters& device : report.devices) {
      sum.submitted += device.submitted;
      sum.completed += device.completed;
      sum.failed += device.failed;
      sum.preemptions += device.preemptions;
      sum.context_saves += device.context_saves;
      sum.context_loads += device.context_loads;
      sum.quits += device.quits;
      sum.restarts += device.restarts;
    }
    return sum;
  }
};

}  // namespace testing
}  // namespace dfccl

#endif  // DFCCL_TESTS_CORE_DAEMON_HARNESS_H_
