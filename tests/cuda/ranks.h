// SPDX-License-Identifier: Apache-2.0
// Ranks with streams of their own on GPUs that are emulated in one way or another, and
// what all of them must be able to do.
#ifndef DFCCL_TESTS_CUDA_RANKS_H_
#define DFCCL_TESTS_CUDA_RANKS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/emulation.h"
#include "cuda/service.h"
#include "tests/core/daemon/harness.h"
#include "tests/core/daemon/kind_values.h"

namespace dfccl {
namespace gpu {

using dfccl::testing::Call;
using dfccl::testing::Devices;
using dfccl::testing::Forcing;
using dfccl::testing::MakeCall;

struct Shape {
  uint32_t threads = 1;  // of a block
  int gpus = 1;
  // nullptr: emulated ones.
  std::unique_ptr<Gpu> (*open)(int ordinal) = nullptr;
};

// Some ranks with a stream each, spread over emulated GPUs.
class Ranks {
 public:
  Ranks(int ranks, const ServiceOptions& options, Shape shape = Shape()) : shape_(shape) {
    std::vector<std::unique_ptr<Gpu>> gpus;
    for (int i = 0; i < shape.gpus; ++i) {
      gpus.push_back(shape.open != nullptr ? shape.open(i)
                                           : std::make_unique<EmulatedGpu>(shape.threads));
    }
    Status status;
    service_ = Service::Make(std::move(gpus), options, &status);
    EXPECT_TRUE(status.ok()) << status.message();
    for (int i = 0; i < ranks; ++i) streams_.push_back(std::make_unique<EmulatedStream>());
  }

  // Nothing in a stream waits any more when the service ends.
  ~Ranks() { End(); }

  // After this nobody uses a buffer of a collective.
  void End() {
    service_.reset();
    streams_.clear();
  }

  Service& service() { return *service_; }
  EmulatedStream& stream(int64_t rank) { return *streams_[rank]; }
  int gpu(int64_t rank) const { return static_cast<int>(rank % shape_.gpus); }

  void Synchronize() {
    for (auto& stream : streams_) stream->Synchronize();
  }

  // False: it has not become so in time.
  bool Eventually(const std::function<bool()>& condition) {
    const auto limit = std::chrono::steady_clock::now() + dfccl::testing::kLimit;
    while (!condition()) {
      if (std::chrono::steady_clock::now() > limit) return false;
      std::this_thread::yield();
    }
    return true;
  }

 private:
  const Shape shape_;
  std::vector<std::unique_ptr<EmulatedStream>> streams_;
  std::unique_ptr<Service> service_;
};

// Behind buffers: a test that gives up in the middle leaves collectives that use them.
class EndIfGivenUp {
 public:
  explicit EndIfGivenUp(Ranks* ranks) : ranks_(*ranks) {}
  ~EndIfGivenUp() {
    if (::testing::Test::HasFatalFailure()) ranks_.End();
  }

 private:
  Ranks& ranks_;
};

inline ServiceOptions SmallOptions() {
  ServiceOptions options;
  options.blocks = 2;
  options.tasks_of_a_block = 256;
  options.lane_bytes = 4096;
  options.slice_bytes = 8192;
  options.quit_polls = 50;
  options.memory_bytes = size_t{32} << 20;
  return options;
}

// One member's part, with its buffers.
class Part {
 public:
  Part(Ranks* ranks, const Call& call, int member)
      : ranks_(*ranks),
        call_(call),
        member_(member),
        source_(call.SourceElements() * DTypeSize(call.signature.dtype)),
        result_(call.ResultElements() * DTypeSize(call.signature.dtype), '\x5a') {
    call.FillSource(member, source_.data());
  }

  int64_t device() const { return call_.group->members[member_]; }
  EmulatedStream& stream() { return ranks_.stream(device()); }

  Submission MakeSubmission() {
    Submission submission;
    submission.device = device();
    submission.group = call_.group;
    submission.member = member_;
    submission.id = call_.id();
    submission.signature = call_.signature;
    submission.source = source_.data();
    submission.result = result_.data();
    submission.priority = priority;
    submission.timeout_ns = timeout_ns;
    return submission;
  }

  // As the handler of a start does.
  Status Start(bool staged_and_owned = false) {
    Submission submission = MakeSubmission();
    submission.stage_source = staged_and_owned;
    if (staged_and_owned) submission.result = nullptr;
    const Status status = ranks_.service().Start(ranks_.gpu(device()), &stream(), submission,
                                                 /*ragged=*/nullptr, &ticket_);
    // What the program does next with the memory of its operand.
    if (staged_and_owned && status.ok()) {
      stream().Put([this] { std::fill(source_.begin(), source_.end(), '\x77'); });
    }
    return status;
  }
  Status Finish() { return ranks_.service().Finish(&stream(), ticket_, result_.data()); }
  void StartAndFinish() {
    Status status = Start();
    ASSERT_TRUE(status.ok()) << status.message();
    status = Finish();
    ASSERT_TRUE(status.ok()) << status.message();
  }

  // After the stream has been synchronized.
  void CheckValues() {
    ASSERT_EQ(call_.FirstWrong(member_, result_.data()), -1) << call_.Text(member_);
  }

  std::vector<char>& source() { return source_; }
  uint64_t ticket() const { return ticket_; }
  int priority = 0;
  int64_t timeout_ns = 0;

 private:
  Ranks& ranks_;
  const Call call_;
  const int member_;
  std::vector<char> source_;
  std::vector<char> result_;
  uint64_t ticket_ = 0;
  const EndIfGivenUp end_{&ranks_};
};

using Parts = std::vector<std::unique_ptr<Part>>;

inline Parts MakeParts(Ranks* ranks, const Call& call) {
  Parts parts;
  for (int i = 0; i < call.members(); ++i) parts.push_back(std::make_unique<Part>(ranks, call, i));
  return parts;
}

inline const std::vector<Kind>& Kinds() {
  static const std::vector<Kind> kinds = [] {
    std::vector<Kind> list;
    for (int k = 0; k < kKindCount; ++k) {
      if (static_cast<Kind>(k) != Kind::kRaggedAllToAll) list.push_back(static_cast<Kind>(k));
    }
    return list;
  }();
  return kinds;
}

inline void RunAll(Ranks* ranks, const std::vector<int>& members,
                   const std::vector<int64_t>& counts, std::mt19937* random) {
  const uint64_t failed = ranks->service().Counters().failed;
  for (Kind kind : Kinds()) {
    for (int n : members) {
      for (int64_t count : counts) {
        if (n > 3 && count > 2000) count = 1501;  // n blocks for each of n take their time
        Parts parts = MakeParts(ranks, MakeCall(kind, Devices(n), count, random));
        std::shuffle(parts.begin(), parts.end(), *random);
        for (auto& part : parts) {
          part->StartAndFinish();
          if (::testing::Test::HasFatalFailure()) return;
        }
        ranks->Synchronize();
        for (auto& part : parts) {
          part->CheckValues();
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
  ASSERT_TRUE(ranks->Eventually([&] { return ranks->service().Idle(); }));
  EXPECT_EQ(ranks->service().Counters().failed, failed);
}

// Every rank starts the same collectives over random groups in an order of its own, all
// before the first is awaited, and awaits them in yet another order.
inline void RunInDisorder(Shape shape, int rounds, int collectives) {
  constexpr int kRanks = 6;
  std::mt19937 random(6);
  Ranks ranks(kRanks, SmallOptions(), shape);
  for (int round = 0; round < rounds; ++round) {
    std::vector<Parts> parts(kRanks);
    for (int i = 0; i < collectives; ++i) {
      std::vector<int64_t> devices = Devices(kRanks);
      std::shuffle(devices.begin(), devices.end(), random);
      devices.resize(1 + random() % kRanks);
      const Call call = MakeCall(Kinds()[random() % Kinds().size()], devices,
                                 1 + static_cast<int64_t>(random() % 2000), &random);
      const int priority = static_cast<int>(random() % 3);
      for (Part* part : [&] {
             std::vector<Part*> made;
             for (int m = 0; m < call.members(); ++m) {
               parts[devices[m]].push_back(std::make_unique<Part>(&ranks, call, m));
               made.push_back(parts[devices[m]].back().get());
             }
             return made;
           }()) {
        part->priority = priority;
      }
    }
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank, seed = static_cast<uint32_t>(random())] {
        std::mt19937 own(seed);
        std::shuffle(parts[rank].begin(), parts[rank].end(), own);
        for (auto& part : parts[rank]) {
          const Status status = part->Start(/*staged_and_owned=*/own() % 4 == 0);
          ASSERT_TRUE(status.ok()) << status.message();
        }
        std::shuffle(parts[rank].begin(), parts[rank].end(), own);
        for (auto& part : parts[rank]) {
          const Status status = part->Finish();
          ASSERT_TRUE(status.ok()) << status.message();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (::testing::Test::HasFatalFailure()) return;
    ranks.Synchronize();
    for (Parts& of_rank : parts) {
      for (auto& part : of_rank) {
        part->CheckValues();
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
  ASSERT_TRUE(ranks.Eventually([&] { return ranks.service().Idle(); }));
  const ServiceCounters counters = ranks.service().Counters();
  EXPECT_EQ(counters.failed, 0u);
  EXPECT_EQ(counters.completed, counters.submitted);
  EXPECT_GT(counters.preemptions, 0u);
  EXPECT_GT(counters.loads, 0u);
}

}  // namespace gpu
}  // namespace dfccl

#endif  // DFCCL_TESTS_CUDA_RANKS_H_
