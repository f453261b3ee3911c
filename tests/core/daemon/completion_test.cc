// SPDX-License-Identifier: Apache-2.0
// Callbacks are foreign code: they submit again, take long, or wait for each
// other.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "core/runtime.h"
#include "tests/core/daemon/harness.h"

namespace dfccl {
namespace testing {
namespace {

// A part whose callback is the test's.
struct Hooked {
  Hooked(const Instance& instance, int member, std::function<void()> function)
      : part(instance, member), hook(std::move(function)) {}

  // Submits; the hook runs when the operation has finished, here or elsewhere.
  void Go() {
    Submission submission = part.MakeSubmission();
    submission.closed = closed;
    part.Submit(submission);
    Status status;
    if (Runtime::Get().Finished(part.operation(), &status) ||
        !Runtime::Get().OnFinish(part.operation(), &Hooked::OnFinish, this, /*blocks=*/true)) {
      hook();
    }
  }
  // The runtime never calls a callback inside another.
  static void OnFinish(void* self) {
    static thread_local int depth = 0;
    EXPECT_EQ(++depth, 1);
    static_cast<Hooked*>(self)->hook();
    --depth;
  }

  void Release() {
    Status status;
    EXPECT_TRUE(Runtime::Get().Finished(part.operation(), &status));
    EXPECT_TRUE(status.ok()) << status.message();
    Runtime::Get().Release(part.operation());
  }

  Part part;
  std::function<void()> hook;
  bool closed = false;
};

class Latch {
 public:
  explicit Latch(int count) : count_(count) {}
  void Down() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--count_ <= 0) condition_.notify_all();
  }
  bool Wait(std::chrono::nanoseconds limit = kLimit) {
    std::unique_lock<std::mutex> lock(mutex_);
    return condition_.wait_for(lock, limit, [this] { return count_ <= 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  int count_;
};

// As native collectives behind ours would: each callback blocks its thread
// until the callbacks of all other members run, too.
TEST_F(RuntimeTest, CallbacksThatWaitForEachOther) {
  constexpr int kMembers = 8;
  for (int round = 0; round < 20; ++round) {
    const Instance instance = Make(Devices(kMembers), 100);
    Latch rendezvous(kMembers), done(kMembers);
    std::atomic<int> failures{0};
    std::vector<std::unique_ptr<Hooked>> parts;
    for (int i = 0; i < kMembers; ++i) {
      parts.push_back(std::make_unique<Hooked>(instance, i, [&] {
        rendezvous.Down();
        if (!rendezvous.Wait()) ++failures;
        done.Down();
      }));
    }
    // The last member's program goes on in a thread of its own, as XLA's would.
    std::vector<std::thread> threads;
    for (int i = 0; i < kMembers; ++i) {
      threads.emplace_back([&parts, i] { parts[i]->Go(); });
    }
    ASSERT_TRUE(done.Wait());
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(failures, 0);
    for (auto& part : parts) part->Release();
  }
}

// A chain in one thread: closed callbacks run in the submission that brought
// them about, and what they submit adds to its list, not to its stack.
TEST_F(RuntimeTest, ClosedCallbacksRunOnTheSubmittingThread) {
  constexpr int kMembers = 4;
  constexpr int kSteps = 500;
  const std::thread::id self = std::this_thread::get_id();
  std::atomic<int> here{0};
  // On a busy machine a submission may run out of time and leave all to others.
  for (int round = 0; round < 4 || (here == 0 && round < 100); ++round) {
    std::vector<Instance> instances;
    for (int step = 0; step < kSteps; ++step)
      instances.push_back(Make(Devices(kMembers), step % 3));
    Latch done(kMembers - 1 + kSteps);
    std::vector<std::vector<std::unique_ptr<Hooked>>> programs(kMembers);
    for (int member = 0; member < kMembers; ++member) {
      for (int step = 0; step < kSteps; ++step) {
        // The last member goes on by itself, as a handler that returns at once does.
        const bool last = member == kMembers - 1;
        programs[member].push_back(
            std::make_unique<Hooked>(instances[step], member, [&, member, step, last] {
              if (last) return done.Down();
              if (std::this_thread::get_id() == self) ++here;
              // Once the next step is on its way, all may end before this returns.
              if (step + 1 == kSteps) {
                done.Down();
              } else {
                programs[member][step + 1]->Go();
              }
            }));
        programs[member].back()->closed = true;
      }
    }
    for (int member = 0; member < kMembers - 1; ++member) programs[member][0]->Go();
    for (int step = 0; step < kSteps; ++step) programs[kMembers - 1][step]->Go();
    ASSERT_TRUE(done.Wait());
    for (auto& program : programs) {
      for (int step = 0; step < kSteps; ++step) {
        Part& part = program[step]->part;
        for (int64_t i = 0; i < instances[step].count; ++i) {
          ASSERT_EQ(part.result()[i], instances[step].Expected(i)) << "step " << step;
        }
        program[step]->Release();
      }
    }
  }
  EXPECT_GT(here, 0);
}

// Closed callbacks that turn out to be long leave the submission to the others.
TEST_F(RuntimeTest, LongClosedCallbacksAreHandedOver) {
  constexpr int kMembers = 6;
  const std::thread::id self = std::this_thread::get_id();
  bool handed_over = false;
  for (int round = 0; round < 20 && !handed_over; ++round) {
    const Instance instance = Make(Devices(kMembers), 10);
    Latch done(kMembers);
    std::atomic<int> elsewhere{0};
    std::vector<std::unique_ptr<Hooked>> parts;
    for (int i = 0; i < kMembers; ++i) {
      parts.push_back(std::make_unique<Hooked>(instance, i, [&] {
        if (std::this_thread::get_id() != self) ++elsewhere;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        done.Down();
      }));
      parts.back()->closed = true;
    }
    for (auto& part : parts) part->Go();
    ASSERT_TRUE(done.Wait());
    handed_over = elsewhere > 0;
    for (auto& part : parts) part->Release();
  }
  EXPECT_TRUE(handed_over);
}

// Programs of dependent calls that are driven by callbacks alone.
TEST_F(RuntimeTest, ChainsOfCallbacks) {
  constexpr int kMembers = 5;
  constexpr int kSteps = 300;
  std::vector<Instance> instances;
  for (int step = 0; step < kSteps; ++step) instances.push_back(Make(Devices(kMembers), step % 70));
  Latch done(kMembers);
  std::vector<std::vector<std::unique_ptr<Hooked>>> programs(kMembers);
  for (int member = 0; member < kMembers; ++member) {
    for (int step = 0; step < kSteps; ++step) {
      programs[member].push_back(
          std::make_unique<Hooked>(instances[step], member, [&, member, step] {
            if (step + 1 < kSteps) {
              programs[member][step + 1]->Go();
            } else {
              done.Down();
            }
          }));
    }
  }
  for (auto& program : programs) program[0]->Go();
  ASSERT_TRUE(done.Wait());
  for (auto& program : programs) {
    for (int step = 0; step < kSteps; ++step) {
      program[step]->Release();
      for (int64_t i = 0; i < instances[step].count; ++i) {
        ASSERT_EQ(program[step]->part.result()[i], instances[step].Expected(i));
      }
    }
  }
}

// Callbacks of a call site that takes long run beside each other.
TEST_F(RuntimeTest, LongCallbacksRunInParallel) {
  RuntimeOptions options;
  options.workers = 2;
  Start(options);
  constexpr int kMembers = 4;
  std::atomic<int> most{0}, now{0};
  for (int round = 0; round < 6; ++round) {
    const Instance instance = Make(Devices(kMembers), 10);
    Latch done(kMembers);
    std::vector<std::unique_ptr<Hooked>> parts;
    for (int i = 0; i < kMembers; ++i) {
      parts.push_back(std::make_unique<Hooked>(instance, i, [&, i] {
        if (i == kMembers - 1) return done.Down();  // perhaps on the submitting thread
        const int running = ++now;
        int before = most;
        while (running > before && !most.compare_exchange_weak(before, running)) {
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        --now;
        done.Down();
      }));
    }
    for (auto& part : parts) part->Go();
    ASSERT_TRUE(done.Wait());
    for (auto& part : parts) part->Release();
  }
  EXPECT_GE(most, 2);
}

// A callback never runs while its thread holds a daemon: it may wait for an
// operation of the same device.
TEST_F(RuntimeTest, ACallbackMayWaitForAnotherOperationOfItsDevice) {
  for (int round = 0; round < 50; ++round) {
    const Instance first = Make({0, 1}, 10), second = Make({0, 1}, 20);
    Latch done(1);
    Part second0(second, 0), second1(second, 1);
    Hooked first0(first, 0, [&] {
      second0.Submit();
      second1.Submit();
      second0.AwaitValues();
      second1.AwaitValues();
      done.Down();
    });
    first0.Go();
    Part first1(first, 1);
    first1.Submit();
    ASSERT_TRUE(done.Wait());
    first1.AwaitValues();
    first0.Release();
  }
}

// More finished operations than the completion queue has room for, all while
// the first callback does not return.
TEST_F(RuntimeTest, MoreCompletionsThanTheQueueHolds) {
  constexpr int kOperations = 30'000;
  std::atomic<int> called{0};
  std::vector<std::unique_ptr<Hooked>> parts;
  std::vector<Instance> instances;
  for (int i = 0; i < kOperations; ++i) {
    instances.push_back(Make({0, 1}, 1));
    parts.push_back(std::make_unique<Hooked>(instances.back(), 0, [&called] {
      if (called++ == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }));
    parts.back()->Go();
  }
  std::vector<std::unique_ptr<Part>> others;
  for (int i = 0; i < kOperations; ++i) {
    others.push_back(std::make_unique<Part>(instances[i], 1));
  }
  std::thread other([&] {
    for (auto& part : others) part->Submit();
  });
  other.join();
  for (auto& part : others) part->AwaitValues();
  const auto limit = std::chrono::steady_clock::now() + kLimit;
  while (called < kOperations) {
    ASSERT_LT(std::chrono::steady_clock::now(), limit) << called;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (auto& part : parts) part->Release();
}

// Shutdown does not wait for foreign code for ever.
TEST_F(RuntimeTest, ShutdownLeavesStuckCallbacksBehind) {
  const Instance instance = Make({0, 1}, 10);
  static Latch* release = new Latch(1);
  static Latch* returned = new Latch(1);
  static Hooked* stuck = nullptr;
  stuck = new Hooked(instance, 0, [] {
    release->Wait();
    returned->Down();
  });
  stuck->Go();
  Part other(instance, 1);
  other.Submit();
  ASSERT_TRUE(other.Finished());
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const auto begin = std::chrono::steady_clock::now();
  Runtime::Shutdown();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
  release->Down();
  EXPECT_TRUE(returned->Wait());
}

}  // namespace
}  // namespace testing
}  // namespace dfccl
