// SPDX-License-Identifier: Apache-2.0
// Collectives in any order on any device: values, preemption, priority.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "core/runtime.h"
#include "tests/core/daemon/harness.h"

namespace dfccl {
namespace testing {
namespace {

constexpr int kDevices = 12;

class DisorderTest : public RuntimeTest {
 protected:
  // Random overlapping groups and sizes.
  static std::vector<Instance> RandomInstances(int count, std::mt19937* random) {
    std::vector<Instance> instances;
    for (int i = 0; i < count; ++i) {
      std::vector<int64_t> devices = Devices(kDevices);
      std::shuffle(devices.begin(), devices.end(), *random);
      devices.resize(2 + (*random)() % 5);
      const int64_t size = (*random)() % 50 == 0 ? 30'000 : (*random)() % 64;
      instances.push_back(Make(devices, size));
    }
    return instances;
  }

  // Each device's parts, in an order of its own.
  static std::vector<std::vector<std::unique_ptr<Part>>> Shuffled(
      const std::vector<Instance>& instances, std::mt19937* random) {
    std::vector<std::vector<std::unique_ptr<Part>>> parts(kDevices);
    for (const Instance& instance : instances) {
      for (int i = 0; i < instance.group->size(); ++i) {
        parts[instance.group->members[i]].push_back(std::make_unique<Part>(instance, i));
      }
    }
    for (auto& own : parts) std::shuffle(own.begin(), own.end(), *random);
    return parts;
  }
};

// One thread starts everything, un-awaited, taking devices by chance.
TEST_F(DisorderTest, OneDriver) {
  std::mt19937 random(1);
  for (int round = 0; round < 20; ++round) {
    auto parts = Shuffled(RandomInstances(500, &random), &random);
    std::vector<size_t> next(kDevices);
    std::vector<int> alive = {};
    for (int d = 0; d < kDevices; ++d) alive.push_back(d);
    while (!alive.empty()) {
      const size_t pick = random() % alive.size();
      const int device = alive[pick];
      if (next[device] == parts[device].size()) {
        alive.erase(alive.begin() + pick);
      } else {
        parts[device][next[device]++]->Submit();
      }
    }
    for (auto& own : parts) {
      for (auto& part : own) part->AwaitValues();
    }
  }
  const DeviceCounters counters = Sum(Runtime::Get().Report());
  EXPECT_EQ(counters.submitted, counters.completed);
  EXPECT_GT(counters.preemptions, 0u);
  EXPECT_GT(counters.context_loads, 0u);
  EXPECT_GT(counters.quits, 0u);
  EXPECT_GT(counters.restarts, 0u);
}

// A thread per device.
TEST_F(DisorderTest, OneThreadPerDevice) {
  std::mt19937 random(2);
  for (const char* plan : {"", "ring", "recursive_doubling"}) {
    Start(Forcing(plan));
    for (int round = 0; round < 4; ++round) {
      auto parts = Shuffled(RandomInstances(500, &random), &random);
      std::vector<std::thread> threads;
      for (int device = 0; device < kDevices; ++device) {
        threads.emplace_back([&own = parts[device]] {
          // A window of un-awaited operations that others can always satisfy:
          // all are started before the first is awaited.
          for (auto& part : own) part->Submit();
          for (auto& part : own) part->AwaitValues();
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
    EXPECT_GT(Sum(Runtime::Get().Report()).preemptions, 0u);
  }
}

// [A, B] on one device, [B, A] on the other, with a plan in which every member
// waits for every other.
TEST_F(DisorderTest, WithoutPreemptionOppositeOrdersHang) {
  for (bool preemption : {true, false}) {
    RuntimeOptions options = Forcing("direct_two_shot");
    options.preemption = preemption;
    Start(options);
    const Instance a = Make({0, 1}, 100), b = Make({0, 1}, 50);
    Part a0(a, 0), b0(b, 0), a1(a, 1), b1(b, 1);
    a0.Submit();
    b1.Submit();
    b0.Submit();
    a1.Submit();
    if (preemption) {
      for (Part* part : {&a0, &b0, &a1, &b1}) part->AwaitValues();
      EXPECT_GT(Sum(Runtime::Get().Report()).preemptions, 0u);
    } else {
      EXPECT_FALSE(a0.WaitFor(std::chrono::milliseconds(500)));
      for (Part* part : {&b0, &a1, &b1}) EXPECT_FALSE(part->WaitFor(std::chrono::seconds(0)));
      Runtime& runtime = Runtime::Get();
      Runtime::Shutdown();
      for (Part* part : {&a0, &b0, &a1, &b1}) {
        ASSERT_TRUE(part->WaitFor(kLimit));
        runtime.Release(part->operation());
      }
    }
  }
}

// The same order everywhere needs no preemption.
TEST_F(DisorderTest, WithoutPreemptionEqualOrdersFinish) {
  RuntimeOptions options;
  options.preemption = false;
  Start(options);
  for (int i = 0; i < 50; ++i) {
    const Instance a = Make({0, 1, 2}, 100), b = Make({0, 1, 2}, 50);
    std::vector<std::unique_ptr<Part>> parts;
    for (int member = 0; member < 3; ++member) {
      for (const Instance& instance : {a, b}) {
        parts.push_back(std::make_unique<Part>(instance, member));
        parts.back()->Submit();
      }
    }
    for (auto& part : parts) part->AwaitValues();
  }
  EXPECT_EQ(Sum(Runtime::Get().Report()).preemptions, 0u);
}

// Urgent operations overtake a bulk transfer between its slices, and the bulk
// transfer still goes on among them.
TEST_F(DisorderTest, PriorityOvertakesABulkTransfer) {
  RuntimeOptions options;
  options.workers = 1;
  Start(options);
  const Instance bulk = Make({0, 1}, 16 << 20);
  Part bulk0(bulk, 0), bulk1(bulk, 1);
  bulk0.Submit();
  bulk1.Submit();
  int before_bulk = 0;
  for (int i = 0; i < 20; ++i) {
    const Instance urgent = Make({0, 1}, 16);
    Part urgent0(urgent, 0), urgent1(urgent, 1);
    for (Part* part : {&urgent0, &urgent1}) {
      Submission submission = part->MakeSubmission();
      submission.priority = 5;
      part->Submit(submission);
    }
    urgent0.AwaitValues();
    urgent1.AwaitValues();
    if (!bulk0.Finished() || !bulk1.Finished()) ++before_bulk;
  }
  bulk0.AwaitValues();
  bulk1.AwaitValues();
  EXPECT_GT(before_bulk, 0);
  const DeviceCounters counters = Sum(Runtime::Get().Report());
  EXPECT_GT(counters.preemptions, 0u);
  EXPECT_GT(counters.context_saves, 0u);
}

// A stream of urgent operations that never ends cannot keep a bulk transfer
// from finishing.
TEST_F(DisorderTest, PriorityDoesNotStarveABulkTransfer) {
  RuntimeOptions options;
  options.workers = 1;
  Start(options);
  const Instance bulk = Make({0, 1}, 4 << 20);
  Part bulk0(bulk, 0), bulk1(bulk, 1);
  bulk0.Submit();
  bulk1.Submit();
  std::vector<std::unique_ptr<Part>> window;
  const auto limit = std::chrono::steady_clock::now() + kLimit;
  while (!bulk0.Finished() || !bulk1.Finished()) {
    ASSERT_LT(std::chrono::steady_clock::now(), limit);
    const Instance urgent = Make({0, 1}, 1000);
    for (int member = 0; member < 2; ++member) {
      window.push_back(std::make_unique<Part>(urgent, member));
      Submission submission = window.back()->MakeSubmission();
      submission.priority = 5;
      window.back()->Submit(submission);
    }
    if (window.size() >= 128) {
      for (auto& part : window) part->AwaitValues();
      window.clear();
    }
  }
  for (auto& part : window) part->AwaitValues();
  bulk0.AwaitValues();
  bulk1.AwaitValues();
}

}  // namespace
}  // namespace testing
}  // namespace dfccl
