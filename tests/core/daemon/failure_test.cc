// SPDX-License-Identifier: Apache-2.0
// What no runtime can repair ends with a named error on every member, in
// bounded time, and what comes after works.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/runtime.h"
#include "tests/core/daemon/harness.h"

namespace dfccl {
namespace testing {
namespace {

class FailureTest : public RuntimeTest {
 protected:
  static void ExpectContains(const std::string& text, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) {
      EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
    }
  }
};

TEST_F(FailureTest, MismatchNamesBothSides) {
  Runtime& runtime = Runtime::Get();
  runtime.RegisterSite(11, 0, {"all_reduce(sum)", "", "train.py:3 (step)", "jit_step", {}});
  runtime.RegisterSite(22, 5, {"all_reduce(max)", "", "eval.py:9 (score)", "jit_score", {}});
  runtime.RegisterLoaded(23, 22);  // and so has the same sites
  const Instance instance = Make({4, 5, 6}, 10);
  Part right(instance, 0), wrong(instance, 1), late(instance, 2);
  Submission submission = right.MakeSubmission();
  submission.program = 11;
  submission.site = 0;
  submission.name = "loss";
  right.Submit(submission);
  submission = wrong.MakeSubmission();
  submission.signature.op = ReduceOp::kMax;
  submission.signature.dtype = DType::kS32;
  submission.signature.count = 9;
  submission.program = 23;
  submission.site = 5;
  wrong.Submit(submission);
  // Also a member that comes after the error, at once.
  late.Submit();
  EXPECT_TRUE(late.Finished());
  for (Part* part : {&right, &wrong, &late}) {
    const Status status = part->Await();
    EXPECT_EQ(status.code(), StatusCode::kMismatch);
    ExpectContains(status.message(),
                   {"device 4", "device 5", "sum", "max", "float32", "int32", "10", "9", "'loss'",
                    "train.py:3", "eval.py:9", "jit_step", "jit_score", "[4, 5, 6]"});
  }
  RunOnce(Make({4, 5, 6}, 10));
}

TEST_F(FailureTest, TheSameMemberTwice) {
  const Instance instance = Make({0, 1}, 10);
  Part first(instance, 0), again(instance, 0), other(instance, 1);
  first.Submit();
  again.Submit();
  const Status status = again.Await();
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  ExpectContains(status.message(), {"device 0"});
  other.Submit();
  first.AwaitValues();
  other.AwaitValues();
}

TEST_F(FailureTest, AbsentMemberIsNamedAtTheDeadline) {
  RuntimeOptions options;
  options.stall_warning_ns = 50'000'000;
  Start(options);
  Runtime::Get().RegisterSite(7, 2, {"all_reduce(sum)", "", "train.py:12 (step)", "jit_step", {}});
  const Instance instance = Make({0, 1, 2, 3}, 10);
  std::vector<std::unique_ptr<Part>> parts;
  for (int member : {0, 2, 3}) {
    parts.push_back(std::make_unique<Part>(instance, member));
    Submission submission = parts.back()->MakeSubmission();
    submission.timeout_ns = 200'000'000;
    submission.program = 7;
    submission.site = 2;
    submission.name = "grads";
    submission.key = 41;
    submission.has_key = true;
    parts.back()->Submit(submission);
  }
  ::testing::internal::CaptureStderr();
  const auto begin = std::chrono::steady_clock::now();
  for (auto& part : parts) {
    const Status status = part->Await();
    EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
    ExpectContains(status.message(), {"all_reduce(sum)", "'grads'", "key 41", "train.py:12",
                                      "jit_step", "[0, 1, 2, 3]", "devices [1]", "timeout="});
  }
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(100));
  // One warning came before.
  const std::string warnings = ::testing::internal::GetCapturedStderr();
  ExpectContains(warnings, {"'grads'", "devices [1]", "report()"});
  EXPECT_EQ(warnings.find("jax_dfccl:"), warnings.rfind("jax_dfccl:"));
  // The late member gets the same error, at once.
  Part late(instance, 1);
  late.Submit();
  EXPECT_TRUE(late.Finished());
  EXPECT_EQ(late.Await().code(), StatusCode::kDeadlineExceeded);
  RunOnce(Make({0, 1, 2, 3}, 10));
}

TEST_F(FailureTest, ALateMemberIsNoError) {
  const Instance instance = Make({0, 1}, 10);
  Part early(instance, 0), late(instance, 1);
  early.Submit();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  late.Submit();
  early.AwaitValues();
  late.AwaitValues();
  EXPECT_GE(Runtime::Get().Report().devices[0].largest_wait_s, 0.2);
}

class CycleTest : public FailureTest {
 protected:
  void SetUp() override {
    RuntimeOptions options;
    options.cycle_grace_ns = 200'000'000;
    Start(options);
  }

  // Device 0 waits in 'a', device 1 in 'b'; both are for {0, 1}.
  void Cross(Part* a, Part* b) {
    Submission submission = a->MakeSubmission();
    submission.program = 1;
    submission.site = 0;
    submission.name = "a";
    a->Submit(submission);
    submission = b->MakeSubmission();
    submission.program = 1;
    submission.site = 3;
    submission.name = "b";
    b->Submit(submission);
  }

  // Branch 0 holds a (site 0), then b (site 1); branch 1 holds b (site 3), then
  // a (site 2).
  static void RegisterSites(bool dependent) {
    Runtime& runtime = Runtime::Get();
    const auto after = [&](int32_t site) {
      return dependent ? std::vector<int32_t>{site} : std::vector<int32_t>{};
    };
    runtime.RegisterSite(1, 0, {"all_reduce(sum)", "a", "train.py:3 (f)", "jit_f", {}});
    runtime.RegisterSite(1, 1, {"all_reduce(sum)", "b", "train.py:4 (f)", "jit_f", after(0)});
    runtime.RegisterSite(1, 2, {"all_reduce(sum)", "a", "train.py:8 (f)", "jit_f", after(3)});
    runtime.RegisterSite(1, 3, {"all_reduce(sum)", "b", "train.py:7 (f)", "jit_f", {}});
  }
};

TEST_F(CycleTest, OfDataIsFoundPromptly) {
  RegisterSites(/*dependent=*/true);
  Part a(Make({0, 1}, 10), 0), b(Make({0, 1}, 10), 1);
  Cross(&a, &b);
  a.Watch();
  b.Watch();
  for (Part* part : {&a, &b}) {
    ASSERT_TRUE(part->WaitFor(std::chrono::seconds(20)));
    const Status status = part->Await();
    EXPECT_EQ(status.code(), StatusCode::kCycle);
    ExpectContains(status.message(), {"device 0 waits in", "'a'", "train.py:3", "for device 1",
                                      "'b'", "train.py:7", "for device 0", "data dependences"});
  }
  RunOnce(Make({0, 1}, 10));
}

TEST_F(CycleTest, OfTheScheduleIsToldApart) {
  RegisterSites(/*dependent=*/false);
  Part a(Make({0, 1}, 10), 0), b(Make({0, 1}, 10), 1);
  Cross(&a, &b);
  a.Watch();
  b.Watch();
  EXPECT_EQ(Runtime::Get().Report().cycles.size(), 1u);
  const Status status = a.Await();
  EXPECT_EQ(status.code(), StatusCode::kCycle);
  ExpectContains(status.message(), {"schedule"});
  EXPECT_EQ(status.message().find("cycle of data dependences"), std::string::npos);
  EXPECT_EQ(b.Await().code(), StatusCode::kCycle);
}

// The same two operations, but device 1's program does not wait for its own, of whose
// end somebody wants to hear: it can still start the other.
TEST_F(CycleTest, IsNoneWhileOneProgramGoesOn) {
  const Instance ia = Make({0, 1}, 10), ib = Make({0, 1}, 10);
  Part a(ia, 0), b(ib, 1), a1(ia, 1), b0(ib, 0);
  Cross(&a, &b);
  a.Watch();
  b.Watch(/*blocks=*/false);
  EXPECT_FALSE(a.WaitFor(std::chrono::milliseconds(700)));
  EXPECT_TRUE(Runtime::Get().Report().cycles.empty());
  a1.Submit();
  a.AwaitValues();
  b0.Submit();
  for (Part* part : {&b, &a1, &b0}) part->AwaitValues();
}

// A process that computes may come to its next call yet.
TEST_F(CycleTest, IsNotReportedWhileTheProcessComputes) {
  const Instance ia = Make({0, 1}, 10), ib = Make({0, 1}, 10);
  Part a(ia, 0), b(ib, 1), a1(ia, 1), b0(ib, 0);
  Cross(&a, &b);
  a.Watch();
  b.Watch();
  const double until = ProcessCpuSeconds() + 1.0;
  while (ProcessCpuSeconds() < until) {
  }
  EXPECT_FALSE(a.Finished());
  a1.Submit();
  b0.Submit();
  for (Part* part : {&a, &b, &a1, &b0}) part->AwaitValues();
}

TEST_F(CycleTest, OfThreeDevicesBesideOneThatIsNotInIt) {
  Part a(Make({0, 1}, 4), 0), b(Make({1, 2}, 4), 0), c(Make({2, 0}, 4), 0), d(Make({3, 0}, 4), 0);
  const Instance free_instance = Make({5, 6}, 4);
  Part e(free_instance, 0);
  for (Part* part : {&a, &b, &c, &d, &e}) {
    part->Submit();
    part->Watch();
  }
  for (Part* part : {&a, &b, &c}) EXPECT_EQ(part->Await().code(), StatusCode::kCycle);
  EXPECT_FALSE(d.Finished());
  EXPECT_FALSE(e.Finished());
  Part f(free_instance, 1);
  f.Submit();
  e.AwaitValues();
  f.AwaitValues();
  Runtime& runtime = Runtime::Get();
  Runtime::Shutdown();
  ASSERT_TRUE(d.WaitFor(kLimit));
  runtime.Release(d.operation());
}

// Abandon returns only when no peer touches the buffers: they are overwritten
// right after, and a peer that still read them would be seen by the sanitizer.
TEST_F(FailureTest, AbandonWhileAPeerMovesData) {
  for (int round = 0; round < 30; ++round) {
    const Instance instance = Make({0, 1, 2}, 1 << 20);
    Part a(instance, 0), b(instance, 1), c(instance, 2);
    Submission submission = a.MakeSubmission();
    submission.program = 5;
    submission.launch = round;
    a.Submit(submission);
    std::thread peers([&] {
      b.Submit();
      c.Submit();
    });
    std::this_thread::sleep_for(std::chrono::microseconds(round * 50));
    Runtime::Get().Abandon(0, 5, round, Status(StatusCode::kAborted, "gone"));
    ASSERT_TRUE(a.Finished());
    std::fill(a.source().begin(), a.source().end(), 1.f);
    std::fill(a.result().begin(), a.result().end(), 2.f);
    a.Await();
    peers.join();
    for (Part* part : {&b, &c}) {
      const Status status = part->Await();
      EXPECT_TRUE(status.ok() || status.code() == StatusCode::kAborted);
    }
  }
}

TEST_F(FailureTest, AbandonEndsOnlyThatLaunch) {
  const Instance one = Make({0, 1}, 10), two = Make({0, 1}, 10);
  Part gone(one, 0), stays(two, 0), peer(two, 1);
  Submission submission = gone.MakeSubmission();
  submission.program = 5;
  submission.launch = 1;
  gone.Submit(submission);
  submission = stays.MakeSubmission();
  submission.program = 5;
  submission.launch = 2;
  stays.Submit(submission);
  Runtime::Get().Abandon(0, 5, 1, Status(StatusCode::kAborted, "gone"));
  EXPECT_EQ(gone.Await().message(), "gone");
  peer.Submit();
  stays.AwaitValues();
  peer.AwaitValues();
}

TEST_F(FailureTest, ReportWhileStuck) {
  Runtime::Get().RegisterSite(3, 1, {"all_reduce(sum)", "", "train.py:1 (g)", "jit_g", {}});
  RunOnce(Make({0, 1, 2}, 7));
  Part part(Make({0, 1, 2}, 10), 1);
  Submission submission = part.MakeSubmission();
  submission.program = 3;
  submission.site = 1;
  submission.launch = 9;
  submission.name = "stuck";
  part.Submit(submission);
  part.Watch();
  const FlightReport report = Runtime::Get().Report();
  ASSERT_EQ(report.in_flight.size(), 1u);
  const FlightEntry& entry = report.in_flight[0];
  EXPECT_EQ(entry.device, 1);
  EXPECT_EQ(entry.sequence, 1u);
  EXPECT_EQ(entry.operation, "all_reduce(sum)");
  EXPECT_EQ(entry.name, "stuck");
  EXPECT_EQ(entry.program, "jit_g");
  EXPECT_EQ(entry.launch, 9u);
  EXPECT_EQ(entry.source, "train.py:1 (g)");
  EXPECT_EQ(entry.dtype, "float32");
  EXPECT_EQ(entry.bytes, 40);
  EXPECT_EQ(entry.group, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(entry.absent, (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(entry.state, "waiting for members");
  EXPECT_TRUE(entry.blocks_device);
  ASSERT_EQ(report.recent.size(), 3u);
  EXPECT_EQ(report.recent[0].state, "done");
  EXPECT_EQ(report.devices.size(), 3u);
  EXPECT_TRUE(report.cycles.empty());
  Runtime& runtime = Runtime::Get();
  Runtime::Shutdown();
  ASSERT_TRUE(part.WaitFor(kLimit));
  runtime.Release(part.operation());
}

// The ring keeps the last 256 operations of a device.
TEST_F(FailureTest, TheFlightRecordIsBounded) {
  for (int i = 0; i < 300; ++i) RunOnce(Make({0, 1}, 1));
  const FlightReport report = Runtime::Get().Report();
  ASSERT_EQ(report.recent.size(), 512u);
  EXPECT_EQ(report.recent.front().sequence, 299u);
  EXPECT_EQ(report.recent.back().sequence, 44u);
}

// A stuck operation costs nothing, and submissions restart its daemon.
TEST_F(FailureTest, ALoneStuckOperationParksItsDaemon) {
  const Instance instance = Make({0, 1}, 10);
  Part stuck(instance, 0);
  stuck.Submit();
  stuck.Watch();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // let everyone come to rest
  const double before = ProcessCpuSeconds();
  std::this_thread::sleep_for(std::chrono::seconds(3));
  EXPECT_LT(ProcessCpuSeconds() - before, 0.02 * 3);
  const DeviceCounters counters = Runtime::Get().Report().devices[0];
  EXPECT_GE(counters.quits, 1u);
  RunOnce(Make({0, 2}, 10));
  EXPECT_GT(Runtime::Get().Report().devices[0].restarts, counters.restarts);
  Part late(instance, 1);
  late.Submit();
  stuck.AwaitValues();
  late.AwaitValues();
}

}  // namespace
}  // namespace testing
}  // namespace dfccl
