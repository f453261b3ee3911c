// SPDX-License-Identifier: Apache-2.0
// Collectives that go through the host: GPUs that do not reach each other's memory, under
// the conformance tests of the daemon; failures, a full pool, and the end.
#include "cuda/relay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/runtime.h"
#include "cuda/emulation.h"
#include "cuda/memory.h"
#include "tests/cuda/ranks.h"

namespace dfccl {
namespace gpu {
namespace {

class LonelyGpu : public EmulatedGpu {
 public:
  LonelyGpu() : EmulatedGpu(1) {}
  Status Reach(Gpu*) override { return Status(StatusCode::kInternal, "there is no way there"); }
};

std::unique_ptr<Gpu> OpenLonely(int) { return std::make_unique<LonelyGpu>(); }

constexpr Shape kLonely = {1, 2, OpenLonely};

ServiceOptions RelayOptions() {
  ServiceOptions options = SmallOptions();
  options.host_memory_bytes = size_t{8} << 20;
  return options;
}

class RelayTest : public ::testing::Test {
 protected:
  ~RelayTest() override { Runtime::Shutdown(); }
  std::mt19937 random_{31};
};

TEST_F(RelayTest, EveryKind) {
  Ranks ranks(5, RelayOptions(), kLonely);
  RunAll(&ranks, {1, 2, 5}, {0, 1, 1000, 9973}, &random_);
  const ServiceCounters counters = ranks.service().Counters();
  EXPECT_EQ(counters.relayed, counters.submitted);
  EXPECT_EQ(counters.launches, 0u);  // no daemon has run
}

TEST_F(RelayTest, RaggedExchanges) {
  Ranks ranks(5, RelayOptions(), kLonely);
  for (int members : {1, 2, 5}) {
    for (bool wide : {true, false}) {
      RunRagged(&ranks, members, wide, /*spoil=*/false, &random_);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(RelayTest, Disorder) { RunInDisorder(kLonely, 3, 40); }

// What GPUs can do among themselves does not go through the host, and both kinds get by
// each other.
TEST_F(RelayTest, OnlyWhatMust) {
  ServiceOptions options = RelayOptions();
  for (int rank = 0; rank < 4; ++rank) options.gpu_of[rank] = rank % 2;
  Ranks ranks(4, options, kLonely);
  for (int round = 0; round < 20; ++round) {
    Parts apart = MakeParts(&ranks, MakeCall(Kind::kAllReduce, Devices(4), 700, &random_));
    Parts together = MakeParts(&ranks, MakeCall(Kind::kAllGather, {0, 2}, 300, &random_));
    // In opposite orders on ranks 0 and 2.
    for (Part* part : {apart[0].get(), together[0].get(), together[1].get(), apart[2].get(),
                       apart[1].get(), apart[3].get()}) {
      ASSERT_TRUE(part->Start().ok());
    }
    for (Parts* parts : {&apart, &together}) {
      for (auto& part : *parts) ASSERT_TRUE(part->Finish().ok());
    }
    ranks.Synchronize();
    for (Parts* parts : {&apart, &together}) {
      for (auto& part : *parts) part->CheckValues();
    }
    if (HasFatalFailure()) return;
  }
  const ServiceCounters counters = ranks.service().Counters();
  EXPECT_EQ(counters.relayed, 20u * 4);
  EXPECT_EQ(counters.submitted, 20u * 6);
}

// A member has come when its stream has, not when its handler was called.
TEST_F(RelayTest, AnOperandIsAwaited) {
  Ranks ranks(2, RelayOptions(), kLonely);
  Atomic<uint64_t> go;
  Parts parts = MakeParts(&ranks, MakeCall(Kind::kAllReduce, Devices(2), 100, &random_));
  const std::vector<char> operand = parts[1]->source();
  std::fill(parts[1]->source().begin(), parts[1]->source().end(), '\x11');
  ASSERT_TRUE(ranks.service().gpu(1).Wait(&ranks.stream(1), &go, 1).ok());
  ranks.stream(1).Put([&] { parts[1]->source() = operand; });
  for (auto& part : parts) part->StartAndFinish();
  ASSERT_TRUE(ranks.Eventually([&] { return Runtime::Get().Report().in_flight.size() == 1; }));
  EXPECT_FALSE(ranks.service().Idle());
  go.StoreRelease(1);
  ranks.Synchronize();
  for (auto& part : parts) part->CheckValues();
}

TEST_F(RelayTest, FailuresAreTheNextCallsErrors) {
  Ranks ranks(2, RelayOptions(), kLonely);
  for (int round = 0; round < 3; ++round) {
    // Members that disagree.
    const Call call = MakeCall(Kind::kAllReduce, Devices(2), 100, &random_);
    Call other = call;
    other.signature.count = 101;
    Part first(&ranks, call, 0), second(&ranks, other, 1);
    for (Part* part : {&first, &second}) {
      ASSERT_TRUE(part->Start().ok());
      static_cast<void>(part->Finish());
    }
    ranks.Synchronize();
    ASSERT_TRUE(ranks.Eventually([&] { return ranks.service().Idle(); }));
    int told = 0;
    for (int rank = 0; rank < 2; ++rank) {
      const Status status = ranks.service().TakeError(rank);
      if (status.ok()) continue;  // Finish has said it
      ++told;
      EXPECT_EQ(status.code(), StatusCode::kMismatch);
    }
    // One that does not come.
    Parts late = MakeParts(&ranks, MakeCall(Kind::kAllReduce, Devices(2), 100, &random_));
    late[0]->timeout_ns = 50'000'000;
    ASSERT_TRUE(late[0]->Start().ok());
    const Status early = late[0]->Finish();
    ranks.Synchronize();
    ASSERT_TRUE(ranks.Eventually([&] { return ranks.service().Idle(); }));
    const Status status = early.ok() ? ranks.service().TakeError(0) : Status(early);
    EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status.message();
    EXPECT_NE(status.message().find("1"), std::string::npos) << status.message();
    RunAll(&ranks, {2}, {1000}, &random_);
    EXPECT_LE(told, 2);
    if (HasFatalFailure()) return;
  }
}

// Of a launch that has failed: what it has started ends for all members, before and after
// its operand is there.
TEST_F(RelayTest, WhatIsAbandonedEndsForAll) {
  Ranks ranks(2, RelayOptions(), kLonely);
  const Status why(StatusCode::kInternal, "the program has failed");
  for (int round = 0; round < 40; ++round) {
    Parts parts = MakeParts(&ranks, MakeCall(Kind::kAllReduce, Devices(2), 3000, &random_));
    Atomic<uint64_t> go;
    const bool unready = round % 2 == 1;
    if (unready) {
      EXPECT_TRUE(ranks.service().gpu(1).Wait(&ranks.stream(1), &go, 1).ok());
    }
    ASSERT_TRUE(parts[1]->Start(/*staged_and_owned=*/true).ok());
    if (!unready && round % 4 == 0) {
      ASSERT_TRUE(ranks.Eventually([&] { return Runtime::Get().Report().in_flight.size() == 1; }));
    }
    ranks.service().Abandon(1, &ranks.stream(1), 0, 0, why);
    go.StoreRelease(1);
    ranks.stream(1).Synchronize();
    EXPECT_TRUE(ranks.service().TakeError(1).ok());
    if (round % 4 == 0) {  // it had come, so its peer hears of it
      const Status status = [&] {
        const Status started = parts[0]->Start();
        return started.ok() ? parts[0]->Finish() : Status(started);
      }();
      ranks.stream(0).Synchronize();
      ASSERT_TRUE(ranks.Eventually([&] { return ranks.service().Idle(); }));
      const Status told = status.ok() ? ranks.service().TakeError(0) : Status(status);
      EXPECT_NE(told.message().find("the program has failed"), std::string::npos) << told.message();
    }
    ASSERT_TRUE(ranks.Eventually([&] { return ranks.service().Idle(); }));
    if (HasFailure()) return;
  }
  RunAll(&ranks, {2}, {1000}, &random_);
}

// More than there is memory for at a time holds the caller up; more than there is at all
// is an error.
TEST_F(RelayTest, AFullPool) {
  ServiceOptions options = RelayOptions();
  options.host_memory_bytes = size_t{1} << 18;
  Ranks ranks(2, options, kLonely);
  std::vector<Parts> all;
  for (int i = 0; i < 100; ++i) {
    const Kind kind = i % 2 == 0 ? Kind::kAllReduce : Kind::kAllGather;
    all.push_back(MakeParts(&ranks, MakeCall(kind, Devices(2), 1 + random_() % 2000, &random_)));
    for (auto& part : all.back()) part->StartAndFinish();
    if (HasFatalFailure()) return;
  }
  ranks.Synchronize();
  for (Parts& parts : all) {
    for (auto& part : parts) part->CheckValues();
  }
  ASSERT_TRUE(ranks.Eventually([&] { return ranks.service().Idle(); }));
  Parts large = MakeParts(&ranks, MakeCall(Kind::kBarrier, Devices(2), 1 << 19, &random_));
  const Status status = large[0]->Start();
  EXPECT_NE(status.message().find("host memory"), std::string::npos) << status.message();
}

TEST_F(RelayTest, TheEndComesForWhatIsUnfinished) {
  for (bool unready : {false, true}) {
    Atomic<uint64_t> go;
    auto ranks = std::make_unique<Ranks>(2, RelayOptions(), kLonely);
    Parts parts = MakeParts(ranks.get(), MakeCall(Kind::kAllReduce, Devices(2), 100, &random_));
    if (unready) {
      EXPECT_TRUE(ranks->service().gpu(0).Wait(&ranks->stream(0), &go, 1).ok());
    }
    parts[0]->StartAndFinish();
    if (!unready) {
      ASSERT_TRUE(ranks->Eventually([&] { return Runtime::Get().Report().in_flight.size() == 1; }));
    }
    ranks.reset();
    EXPECT_TRUE(Runtime::Get().Report().in_flight.empty());
  }
}

// Pieces never overlap, and come together again.
TEST(MemoryPoolTest, PiecesAreJoinedAgain) {
  constexpr size_t kBytes = 48 << 10;  // not a power of two
  void* const memory = std::aligned_alloc(256, kBytes);
  MemoryPool pool(memory, kBytes);
  std::mt19937 random(1);
  std::vector<std::pair<char*, size_t>> taken;
  for (int i = 0; i < 20'000; ++i) {
    if (random() % 2 == 0) {
      const size_t bytes = 1 + random() % (random() % 8 == 0 ? 16384 : 900);
      auto* const piece = static_cast<char*>(pool.Take(bytes));
      if (piece == nullptr) continue;
      ASSERT_GE(piece, static_cast<char*>(memory));
      ASSERT_LE(piece + bytes, static_cast<char*>(memory) + kBytes);
      ASSERT_EQ((piece - static_cast<char*>(memory)) % 256, 0);
      for (const auto& [other, size] : taken) {
        ASSERT_TRUE(piece + bytes <= other || other + size <= piece);
      }
      taken.emplace_back(piece, bytes);
    } else if (!taken.empty()) {
      std::swap(taken[random() % taken.size()], taken.back());
      pool.Give(taken.back().first);
      taken.pop_back();
    }
  }
  for (const auto& [piece, bytes] : taken) pool.Give(piece);
  EXPECT_EQ(pool.Take(kBytes), nullptr);
  void* const half = pool.Take(32 << 10);
  ASSERT_NE(half, nullptr);
  EXPECT_EQ(pool.Take(32 << 10), nullptr);
  EXPECT_NE(pool.Take(16 << 10), nullptr);
  std::free(memory);
}

}  // namespace
}  // namespace gpu
}  // namespace dfccl
