// SPDX-License-Identifier: Apache-2.0
// The CUDA daemon on emulated GPUs: every kind by every plan, in any order, with ranks on
// one GPU or two, blocks of one thread and of several; lanes, priorities, staging, failures,
// quitting and being launched again.
#include "cuda/service.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/emulation.h"
#include "tests/cuda/ranks.h"

namespace dfccl {
namespace gpu {
namespace {

ServiceOptions WithoutLowLatency() {
  ServiceOptions options = SmallOptions();
  options.low_latency_bytes = 0;
  return options;
}

TEST(ServiceTest, EveryKindOnOneGpu) {
  std::mt19937 random(1);
  for (const ServiceOptions& options : {SmallOptions(), WithoutLowLatency()}) {
    Ranks ranks(8, options);
    RunAll(&ranks, {1, 2, 3, 5, 8}, {0, 1, 7, 1000, 9973}, &random);
    if (HasFatalFailure()) return;
  }
}

TEST(ServiceTest, EveryKindWithBlocksOfSeveralThreads) {
  std::mt19937 random(2);
  for (const ServiceOptions& options : {SmallOptions(), WithoutLowLatency()}) {
    Ranks ranks(3, options, {/*threads=*/3, /*gpus=*/1, nullptr});
    RunAll(&ranks, {2, 3}, {1, 61, 3001}, &random);
    if (HasFatalFailure()) return;
  }
}

TEST(ServiceTest, EveryKindOverTwoGpus) {
  std::mt19937 random(3);
  for (const ServiceOptions& options : {SmallOptions(), WithoutLowLatency()}) {
    Ranks ranks(5, options, {/*threads=*/1, /*gpus=*/2, nullptr});
    RunAll(&ranks, {2, 5}, {1, 1000, 9973}, &random);
    if (HasFatalFailure()) return;
  }
}

// By size, but a plan that is forced comes first.
TEST(ServiceTest, SmallMessagesGoByLowLatency) {
  std::mt19937 random(23);
  const auto posted = [&](const ServiceOptions& options, Kind kind, int members, int64_t bytes) {
    Ranks ranks(members, options);
    Call call = MakeCall(kind, Devices(members), bytes / 4, &random);
    call.signature.dtype = DType::kF32;
    call.signature.op = ReduceOp::kSum;
    Parts parts = MakeParts(&ranks, call);
    for (auto& part : parts) part->StartAndFinish();
    ranks.Synchronize();
    for (auto& part : parts) part->CheckValues();
    return ranks.service().Counters().posted;
  };
  const ServiceOptions options = SmallOptions();
  EXPECT_EQ(posted(options, Kind::kAllReduce, 4, 4096), 4u);
  EXPECT_EQ(posted(options, Kind::kAllReduce, 4, 4100), 0u);
  EXPECT_EQ(posted(options, Kind::kAllToAll, 4, 1024), 4u);
  EXPECT_EQ(posted(options, Kind::kAllToAll, 4, 1028), 0u);
  EXPECT_EQ(posted(options, Kind::kBarrier, 4, 4), 0u);
  ServiceOptions less = options;
  less.low_latency_bytes = 1000;
  EXPECT_EQ(posted(less, Kind::kAllGather, 4, 240), 4u);
  EXPECT_EQ(posted(less, Kind::kAllGather, 4, 244), 0u);
  ServiceOptions forced = options;
  forced.plan_rules = Forcing("direct_flat").plan_rules;
  EXPECT_EQ(posted(forced, Kind::kAllReduce, 4, 16), 0u);
  EXPECT_EQ(posted(forced, Kind::kBroadcast, 4, 16), 4u);  // has no such plan
}

// Large copies in bulk, and their neighbours that are none or not aligned for it.
TEST(ServiceTest, CopiesInBulk) {
  std::mt19937 random(26);
  for (const uint32_t threads : {1u, 3u}) {
    ServiceOptions options = SmallOptions();
    options.lane_bytes = options.slice_bytes = 1 << 20;
    Ranks plain(3, options, {threads, 1, nullptr});
    RunAll(&plain, {2, 3}, {20'000, 20'003}, &random);
    EXPECT_EQ(plain.service().Counters().bulk_copies, 0u);
    options.bulk = true;
    Ranks bulk(3, options, {threads, 1, nullptr});
    RunAll(&bulk, {2, 3}, {7, 1000, 20'000, 20'003}, &random);
    if (HasFatalFailure()) return;
    EXPECT_GT(bulk.service().Counters().bulk_copies, 10u);
  }
}

// Records are used again and again for uses of different length, and generations of what
// is posted in them begin anew.
TEST(ServiceTest, GenerationsThatWrap) {
  std::mt19937 random(24);
  ServiceOptions options = SmallOptions();
  options.first_sequence = ~uint64_t{0} - 20;
  Ranks ranks(3, options);
  for (int i = 0; i < 60; ++i) {
    Call call = MakeCall(Kind::kAllReduce, Devices(3), i % 3 == 0 ? 80 : 50 + i % 7, &random);
    call.signature.dtype = DType::kF32;
    call.signature.op = ReduceOp::kSum;
    Parts parts = MakeParts(&ranks, call);
    std::shuffle(parts.begin(), parts.end(), random);
    for (auto& part : parts) part->StartAndFinish();
    ranks.Synchronize();
    for (auto& part : parts) part->CheckValues();
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(ranks.service().Counters().posted, 180u);
}

TEST(ServiceTest, EveryPlan) {
  std::mt19937 random(4);
  for (const char* plan : {"direct_flat", "direct_one_shot", "direct_two_shot", "ring", "ring:8",
                           "recursive_doubling", "direct", "chain", "chain:8"}) {
    SCOPED_TRACE(plan);
    ServiceOptions options = SmallOptions();
    options.plan_rules = Forcing(plan).plan_rules;
    ASSERT_FALSE(options.plan_rules.empty());
    Ranks ranks(5, options);
    RunAll(&ranks, {2, 5}, {3, 3001}, &random);
    if (HasFatalFailure()) return;
  }
}

TEST(ServiceTest, SequencesThatWrap) {
  for (uint64_t first : {(uint64_t{1} << 63) - 20, ~uint64_t{0} - 20}) {
    std::mt19937 random(5);
    ServiceOptions options = SmallOptions();
    options.first_sequence = first;
    Ranks ranks(3, options);
    RunAll(&ranks, {3}, {5, 2000}, &random);
    if (HasFatalFailure()) return;
  }
}

TEST(ServiceTest, DisorderOnOneGpu) { RunInDisorder({1, 1, nullptr}, 10, 60); }
TEST(ServiceTest, DisorderOverTwoGpus) { RunInDisorder({1, 2, nullptr}, 10, 60); }
TEST(ServiceTest, DisorderWithBlocksOfSeveralThreads) { RunInDisorder({2, 1, nullptr}, 2, 20); }
TEST(ServiceTest, DisorderWithoutLowLatency) {
  RunInDisorder({1, 2, nullptr}, 5, 60, /*low_latency=*/false);
}

// The operands of one member are late: the daemon leaves, and others' collectives are
// done meanwhile; it comes back when they are there.
TEST(ServiceTest, LeavesWhileOperandsAreLateAndComesBack) {
  std::mt19937 random(7);
  Ranks ranks(3, SmallOptions());
  Atomic<uint64_t> go;
  const Call late = MakeCall(Kind::kAllReduce, Devices(2), 1000, &random);
  Parts late_parts = MakeParts(&ranks, late);
  auto wait = ranks.service().gpu(0).Wait(&ranks.stream(1), &go, 1);
  ASSERT_TRUE(wait.ok());
  for (auto& part : late_parts) part->StartAndFinish();
  ASSERT_TRUE(ranks.Eventually([&] { return ranks.service().Counters().quits > 0; }));

  // Rank 2 and the late one's partner are not held up but by their own streams.
  Parts alone = MakeParts(&ranks, MakeCall(Kind::kAllReduce, {2}, 500, &random));
  alone[0]->StartAndFinish();
  ranks.stream(2).Synchronize();
  alone[0]->CheckValues();
  EXPECT_FALSE(ranks.service().Idle());

  go.StoreRelease(1);
  ranks.Synchronize();
  for (auto& part : late_parts) part->CheckValues();
  EXPECT_GT(ranks.service().Counters().launches, 1u);
}

// A member that never came does not keep the daemon on the GPU, and is waited for.
TEST(ServiceTest, LeavesWhileAMemberIsLateAndComesBack) {
  std::mt19937 random(8);
  Ranks ranks(2, SmallOptions());
  for (int i = 0; i < 3; ++i) {
    Parts parts = MakeParts(&ranks, MakeCall(Kind::kAllReduce, Devices(2), 3000, &random));
    parts[0]->StartAndFinish();
    const uint64_t quits = ranks.service().Counters().quits;
    ASSERT_TRUE(ranks.Eventually([&] { return ranks.service().Counters().quits > quits; }));
    parts[1]->StartAndFinish();
    ranks.Synchronize();
    for (auto& part : parts) part->CheckValues();
    if (HasFatalFailure()) return;
  }
}

TEST(ServiceTest, APermuteDoesNotWaitForWhomItDoesNotNeed) {
  Ranks ranks(3, SmallOptions());
  std::mt19937 random(9);
  Call call = MakeCall(Kind::kPermute, Devices(3), 100, &random);
  call.signature.pairs = InternPairs({{0, 1}});
  Parts parts = MakeParts(&ranks, call);
  parts[1]->StartAndFinish();
  parts[0]->StartAndFinish();
  ranks.stream(0).Synchronize();
  ranks.stream(1).Synchronize();
  parts[0]->CheckValues();
  parts[1]->CheckValues();
  parts[2]->StartAndFinish();
  ranks.Synchronize();
  parts[2]->CheckValues();
}

TEST(ServiceTest, ResultsInPlaceOfSources) {
  std::mt19937 random(10);
  for (const char* plan : {"direct_flat", "direct_two_shot", "direct_one_shot", "low_latency"}) {
    ServiceOptions options = SmallOptions();
    options.plan_rules = Forcing(plan).plan_rules;
    Ranks ranks(3, options);
    const int64_t count = options.plan_rules.empty() ? 1250 : 2500;
    Call call = MakeCall(Kind::kAllReduce, Devices(3), count, &random);
    call.signature.dtype = DType::kF32;
    call.signature.op = ReduceOp::kSum;
    std::vector<std::vector<float>> buffers(3);
    const EndIfGivenUp end(&ranks);
    for (int m = 0; m < 3; ++m) {
      for (int64_t i = 0; i < count; ++i) {
        buffers[m].push_back(static_cast<float>(call.Source(m, 0, i)));
      }
    }
    for (int m = 0; m < 3; ++m) {
      const Submission submission = call.MakeSubmission(m, buffers[m].data(), buffers[m].data());
      uint64_t ticket;
      ASSERT_TRUE(ranks.service().Start(0, &ranks.stream(m), submission, nullptr, &ticket).ok());
      ASSERT_TRUE(ranks.service().Finish(&ranks.stream(m), ticket, buffers[m].data()).ok());
    }
    ranks.Synchronize();
    for (int m = 0; m < 3; ++m) {
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(buffers[m][i], static_cast<float>(call.Folded(3, 0, i))) << plan << " " << i;
      }
    }
    EXPECT_EQ(ranks.service().Counters().posted, options.plan_rules.empty() ? 3u : 0u);
  }
}

// Members that disagree: both sides hear of it, and buffers are theirs again.
TEST(ServiceTest, MembersThatDisagreeFail) {
  std::mt19937 random(11);
  Ranks ranks(3, SmallOptions());
  const Call call = MakeCall(Kind::kAllReduce, Devices(3), 100, &random);
  Call other = call;
  other.signature.count = 101;
  Part first(&ranks, call, 0), second(&ranks, other, 1), third(&ranks, call, 2);
  first.StartAndFinish();
  const Status status = second.Start();
  EXPECT_EQ(status.code(), StatusCode::kMismatch);
  EXPECT_NE(status.message().find("of 101 "), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("of 100 "), std::string::npos) << status.message();
  ranks.stream(0).Synchronize();  // it goes on
  ASSERT_TRUE(ranks.Eventually([&] { return ranks.service().Idle(); }));
  EXPECT_EQ(ranks.service().TakeError(0).code(), StatusCode::kMismatch);
  EXPECT_TRUE(ranks.service().TakeError(0).ok());
  EXPECT_EQ(third.Start().code(), StatusCode::kMismatch);  // late
  RunAll(&ranks, {3}, {1000}, &random);
}

TEST(ServiceTest, AMemberThatDoesNotComeInTimeIsNamed) {
  std::mt19937 random(12);
  Ranks ranks(3, SmallOptions());
  Parts parts = MakeParts(&ranks, MakeCall(Kind::kAllReduce, Devices(3), 100, &random));
  parts[0]->StartAndFinish();
  parts[2]->timeout_ns = 100'000'000;
  ASSERT_TRUE(parts[2]->Start().ok());
  const Status early = parts[2]->Finish();  // it may be late by now
  ranks.Synchronize();
  ASSERT_TRUE(ranks.Eventually([&] { return ranks.service().Idle(); }));
  // The next call of the device has the error.
  Parts next = MakeParts(&ranks, MakeCall(Kind::kAllReduce, Devices(3), 100, &random));
  const Status status = next[0]->Start();
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find("device 1 has not called"), std::string::npos)
      << status.message();
  EXPECT_FALSE(early.ok() && ranks.service().TakeError(2).ok());
  EXPECT_EQ(parts[1]->Start().code(), StatusCode::kDeadlineExceeded);
  for (auto& part : next) part->StartAndFinish();
  ranks.Synchronize();
  for (auto& part : next) part->CheckValues();
}

// Failures hit collectives that are being moved, again and again; then nothing has been
// harmed, and no member's buffer is touched after its stream went on.
TEST(ServiceTest, FailuresInTheMiddle) {
  std::mt19937 random(13);
  Ranks ranks(4, SmallOptions());
  for (int round = 0; round < 45; ++round) {
    const int64_t count = round % 3 == 0 ? 200 : 20000;
    Parts parts = MakeParts(&ranks, MakeCall(Kind::kAllReduce, Devices(4), count, &random));
    Parts good = MakeParts(&ranks, MakeCall(Kind::kAllGather, Devices(4), 700, &random));
    for (auto& part : parts) part->timeout_ns = 1 + static_cast<int64_t>(random() % 3'000'000);
    const bool incomplete = round % 2 == 0;
    if (incomplete) parts.pop_back();
    for (auto& part : parts) {
      if (part->Start().ok()) {
        static_cast<void>(part->Finish());
        Part* raw = part.get();
        // A race with a peer that still reads it, if there is one.
        part->stream().Put(
            [raw] { std::fill(raw->source().begin(), raw->source().end(), '\x11'); });
      }
    }
    ranks.Synchronize();
    ASSERT_TRUE(ranks.Eventually([&] { return ranks.service().Idle(); }));
    for (int rank = 0; rank < 4; ++rank) {
      const Status status = ranks.service().TakeError(rank);
      EXPECT_TRUE(status.ok() || status.code() == StatusCode::kDeadlineExceeded);
    }
    for (auto& part : good) part->StartAndFinish();
    ranks.Synchronize();
    for (auto& part : good) part->CheckValues();
    if (HasFatalFailure()) return;
  }
}

// Whose daemon cannot be launched.
class BrokenGpu : public EmulatedGpu {
 public:
  BrokenGpu() : EmulatedGpu(1) {}
  Status Launch(const DaemonArguments&) override {
    return Status(StatusCode::kInternal, "no room on this GPU");
  }
};

TEST(ServiceTest, ADaemonThatCannotBeLaunchedHoldsNobodyUp) {
  std::mt19937 random(22);
  Ranks ranks(2, SmallOptions(),
              {1, 1, [](int) -> std::unique_ptr<Gpu> { return std::make_unique<BrokenGpu>(); }});
  Parts parts = MakeParts(&ranks, MakeCall(Kind::kAllReduce, Devices(2), 10, &random));
  ASSERT_TRUE(parts[0]->Start().ok());
  EXPECT_NE(parts[0]->Finish().message().find("no room on this GPU"), std::string::npos);
  ranks.Synchronize();
  EXPECT_NE(parts[1]->Start().message().find("no room on this GPU"), std::string::npos);
  EXPECT_TRUE(ranks.service().Idle());
}

// One of two daemons does not leave at the end.
class CountedGpu : public EmulatedGpu {
 public:
  explicit CountedGpu(bool is_stuck) : EmulatedGpu(1), is_stuck_(is_stuck) {
    alive.push_back(this);
  }
  ~CountedGpu() override { alive.erase(std::find(alive.begin(), alive.end(), this)); }
  Status Launch(const DaemonArguments& arguments) override {
    return is_stuck_ ? Status() : EmulatedGpu::Launch(arguments);
  }
  static std::vector<Gpu*> alive;

 private:
  const bool is_stuck_;
};
std::vector<Gpu*> CountedGpu::alive;

TEST(ServiceTest, NoMemoryIsFreedWhileADaemonMayTouchIt) {
  std::mt19937 random(25);
  for (const int stuck : {0, 2}) {  // 2: none
    ServiceOptions options = SmallOptions();
    options.shutdown_ns = stuck < 2 ? 20'000'000 : options.shutdown_ns;
    const auto open = stuck == 0 ? +[](int ordinal) -> std::unique_ptr<Gpu> {
      return std::make_unique<CountedGpu>(ordinal == 0);
    }
    : +[](int) -> std::unique_ptr<Gpu> { return std::make_unique<CountedGpu>(false); };
    Ranks ranks(2, options, {1, 2, open});
    Parts parts = MakeParts(&ranks, MakeCall(Kind::kAllReduce, {0}, 10, &random));
    Parts others = MakeParts(&ranks, MakeCall(Kind::kAllReduce, {1}, 10, &random));
    for (Parts* each : {&parts, &others}) (*each)[0]->StartAndFinish();
    ranks.stream(1).Synchronize();
    ranks.End();
    EXPECT_EQ(CountedGpu::alive.size(), stuck < 2 ? 2u : 0u);
    while (!CountedGpu::alive.empty()) delete CountedGpu::alive.back();
  }
}

TEST(ServiceTest, ATicketIsGoodForOneFinish) {
  std::mt19937 random(14);
  Ranks ranks(1, SmallOptions());
  Parts parts = MakeParts(&ranks, MakeCall(Kind::kAllReduce, Devices(1), 10, &random));
  parts[0]->StartAndFinish();
  EXPECT_FALSE(parts[0]->Finish().ok());
  EXPECT_FALSE(ranks.service().Finish(&ranks.stream(0), 12345, nullptr).ok());
  ranks.Synchronize();
  EXPECT_FALSE(parts[0]->Finish().ok());
}

// More than there is room for at a time.
TEST(ServiceTest, AFullDaemonHoldsTheCallerUp) {
  std::mt19937 random(15);
  ServiceOptions options = SmallOptions();
  options.tasks_of_a_block = 8;
  Ranks ranks(2, options);
  std::vector<Parts> all;
  for (int i = 0; i < 200; ++i) {
    all.push_back(MakeParts(&ranks, MakeCall(Kind::kAllReduce, Devices(2), 40, &random)));
    for (auto& part : all.back()) part->StartAndFinish();
    if (HasFatalFailure()) return;
  }
  ranks.Synchronize();
  for (Parts& parts : all) {
    for (auto& part : parts) part->CheckValues();
  }
}

TEST(ServiceTest, MemoryIsGivenBack) {
  std::mt19937 random(16);
  ServiceOptions options = SmallOptions();
  options.memory_bytes = size_t{1} << 20;
  Ranks ranks(2, options);
  for (int i = 0; i < 300; ++i) {
    Call call = MakeCall(Kind::kAllReduce, Devices(2), 10000, &random);
    call.signature.dtype = DType::kF32;
    call.signature.op = ReduceOp::kSum;
    Parts parts = MakeParts(&ranks, call);
    for (auto& part : parts) {
      Status status = part->Start(/*staged_and_owned=*/true);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    for (auto& part : parts) ASSERT_TRUE(part->Finish().ok());
    ranks.Synchronize();
    for (auto& part : parts) part->CheckValues();
    if (HasFatalFailure()) return;
  }
}

TEST(ServiceTest, TooMuchForItsMemoryIsRefused) {
  std::mt19937 random(17);
  ServiceOptions options = SmallOptions();
  options.memory_bytes = size_t{1} << 20;
  Ranks ranks(2, options);
  Parts parts = MakeParts(&ranks, MakeCall(Kind::kBarrier, Devices(2), 1 << 21, &random));
  const Status status = parts[0]->Start(/*staged_and_owned=*/true);
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("device memory"), std::string::npos) << status.message();
}

TEST(ServiceTest, EndsWhatIsUnfinishedWhenItEnds) {
  std::mt19937 random(18);
  auto ranks = std::make_unique<Ranks>(2, SmallOptions());
  Parts parts = MakeParts(ranks.get(), MakeCall(Kind::kAllReduce, Devices(2), 100, &random));
  parts[0]->StartAndFinish();
  if (HasFatalFailure()) return;
  ranks.reset();  // within its bound, or the test's limit ends it
}

TEST(ServiceTest, EndsWhatIsAwaitedWhenItEnds) {
  std::mt19937 random(23);
  auto ranks = std::make_unique<Ranks>(2, SmallOptions());
  Parts parts = MakeParts(ranks.get(), MakeCall(Kind::kAllReduce, Devices(2), 100, &random));
  Submission submission = parts[0]->MakeSubmission();
  submission.result = nullptr;
  uint64_t ticket, kept = 0;
  Service& service = ranks->service();
  ASSERT_TRUE(service.Start(0, &ranks->stream(0), submission, nullptr, &ticket, &kept).ok());
  Service::Wait wait;
  wait.ticket = &kept;
  wait.destination = parts[0]->source().data();
  wait.result_bytes = static_cast<int64_t>(parts[0]->source().size());
  ASSERT_TRUE(service.Await(0, &ranks->stream(0), wait).ok());
  ASSERT_TRUE(ranks->Eventually(
      [&] { return service.StateOfKept(ticket) != Service::KeptState::kPending; }));
  EXPECT_EQ(kept, ticket);
  ranks.reset();
}

TEST(ServiceTest, RaggedExchanges) {
  std::mt19937 random(19);
  Ranks ranks(5, SmallOptions(), {1, 2, nullptr});
  for (int round = 0; round < 10; ++round) {
    for (int members : {1, 2, 5}) {
      RunRagged(&ranks, members, /*wide=*/round % 2 == 0, /*spoil=*/false, &random);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(ServiceTest, RaggedExchangesThatDoNotFitFailOnAll) {
  std::mt19937 random(20);
  Ranks ranks(4, SmallOptions());
  for (int round = 0; round < 5; ++round) {
    RunRagged(&ranks, 4, /*wide=*/true, /*spoil=*/true, &random);
    if (HasFatalFailure()) return;
    RunRagged(&ranks, 4, /*wide=*/true, /*spoil=*/false, &random);
    if (HasFatalFailure()) return;
  }
}

// Without preemption by priority the urgent one would come after all of the others'
// slices. What is checked is that slices of others came after it.
TEST(ServiceTest, AnUrgentCollectiveOvertakesALargeOne) {
  std::mt19937 random(21);
  ServiceOptions options = SmallOptions();
  options.blocks = 1;
  options.slice_bytes = 1;
  options.lane_bytes = int64_t{1} << 40;
  Ranks ranks(1, options);
  Call large = MakeCall(Kind::kBarrier, Devices(1), 1 << 20, &random);
  large.signature.dtype = DType::kC128;
  Call urgent = MakeCall(Kind::kBarrier, Devices(1), 16, &random);
  int overtaken = 0;
  for (int round = 0; round < 2000 && overtaken == 0; ++round) {
    large.number += 1'000'000;
    urgent.number += 1'000'000;
    EmulatedStream other;
    std::vector<char> result(16 * 16);
    Parts slow = MakeParts(&ranks, large);
    const uint64_t turns = ranks.service().Counters().turns;
    ASSERT_TRUE(slow[0]->Start().ok());
    ASSERT_TRUE(ranks.Eventually([&] { return ranks.service().Counters().turns > turns; }));
    Parts fast = MakeParts(&ranks, urgent);
    fast[0]->priority = 5;
    Submission submission = fast[0]->MakeSubmission();
    uint64_t ticket;
    submission.result = result.data();
    ASSERT_TRUE(ranks.service().Start(0, &other, submission, nullptr, &ticket).ok());
    ASSERT_TRUE(ranks.service().Finish(&other, ticket, result.data()).ok());
    other.Synchronize();
    if (!ranks.service().Idle()) ++overtaken;  // the large one still runs
    ASSERT_TRUE(slow[0]->Finish().ok());
    ranks.Synchronize();
    slow[0]->CheckValues();
  }
  EXPECT_GT(overtaken, 0);
  EXPECT_GT(ranks.service().Counters().saves, 0u);
}

}  // namespace
}  // namespace gpu
}  // namespace dfccl
