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
    Submission submission = call_.MakeSubmission(member_, source_.data(), result_.data());
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
inline void RunInDisorder(Shape shape, int rounds, int collectives, bool low_latency = true) {
  constexpr int kRanks = 6;
  std::mt19937 random(6);
  ServiceOptions options = SmallOptions();
  if (!low_latency) options.low_latency_bytes = 0;
  Ranks ranks(kRanks, options, shape);
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
  if (counters.relayed > 0) return;
  EXPECT_GT(counters.preemptions, 0u);
  EXPECT_GT(counters.loads, 0u);
  if (low_latency) {  // small ones by it, others not
    EXPECT_GT(counters.posted, counters.submitted / 8);
    EXPECT_LT(counters.posted, counters.submitted * 7 / 8);
  } else {
    EXPECT_EQ(counters.posted, 0u);
  }
}

// Rows of a random exchange; `spoil` makes one member's sizes wrong.
inline void RunRagged(Ranks* ranks, int members, bool wide, bool spoil, std::mt19937* random) {
  static uint64_t next = 1'000'000;
  constexpr int64_t kRow = 3;
  const uint64_t number = next++;
  std::vector<std::vector<int64_t>> rows(members, std::vector<int64_t>(members));
  for (auto& from : rows) {
    for (int64_t& count : from) count = static_cast<int64_t>((*random)() % 5);
  }
  struct Side {
    std::vector<int64_t> index[4];  // in the order of RaggedArrays
    std::vector<int32_t> narrow[4];
    std::vector<float> source, initial, result;
    RaggedArrays arrays = {};
    uint64_t ticket = 0;
  };
  std::vector<Side> sides(members);
  std::vector<Status> outcomes(members);
  const EndIfGivenUp end(ranks);
  for (int m = 0; m < members; ++m) {
    Side& side = sides[m];
    int64_t input = 0, output = 0;
    for (auto& array : side.index) array.resize(members);
    for (int p = 0; p < members; ++p) {
      side.index[0][p] = input;
      side.index[1][p] = rows[m][p];
      side.index[3][p] = rows[p][m];
      input += rows[m][p];
      output += rows[p][m];
    }
    side.source.resize((input + 1) * kRow);
    for (size_t i = 0; i < side.source.size(); ++i) {
      side.source[i] = dfccl::testing::Value(m, static_cast<int64_t>(i), number);
    }
    side.initial.assign((output + 2) * kRow, -5.f);
    side.result.assign(side.initial.size(), 99.f);
    side.arrays.source_rows = input + 1;
    side.arrays.result_rows = output + 2;
  }
  for (int m = 0; m < members; ++m) {
    for (int p = 0; p < members; ++p) {
      int64_t at = 1;  // the first row stays as it was
      for (int q = 0; q < m; ++q) at += rows[q][p];
      sides[m].index[2][p] = at;
    }
  }
  if (spoil) sides[members - 1].index[1][0] += 1;
  const Group* group = InternGroup(Devices(members));
  for (int m = 0; m < members; ++m) {
    Side& side = sides[m];
    const void* pointers[4];
    for (int i = 0; i < 4; ++i) {
      side.narrow[i].assign(side.index[i].begin(), side.index[i].end());
      pointers[i] = wide ? static_cast<const void*>(side.index[i].data()) : side.narrow[i].data();
    }
    side.arrays.input_offsets = pointers[0];
    side.arrays.send_sizes = pointers[1];
    side.arrays.output_offsets = pointers[2];
    side.arrays.recv_sizes = pointers[3];
    side.arrays.initial = side.initial.data();
    side.arrays.wide = wide ? 1 : 0;
    Submission submission;
    submission.device = m;
    submission.group = group;
    submission.member = m;
    submission.id = {number, number};
    submission.signature.kind = Kind::kRaggedAllToAll;
    submission.signature.count = kRow;
    submission.source = side.source.data();
    submission.result = side.result.data();
    Service& service = ranks->service();
    Status status =
        service.Start(ranks->gpu(m), &ranks->stream(m), submission, &side.arrays, &side.ticket);
    ASSERT_TRUE(status.ok()) << status.message();
    // It may have failed by now.
    outcomes[m] = service.Finish(&ranks->stream(m), side.ticket, side.result.data());
  }
  ranks->Synchronize();
  ASSERT_TRUE(ranks->Eventually([&] { return ranks->service().Idle(); }));
  for (int m = 0; m < members; ++m) {
    const Status status = outcomes[m].ok() ? ranks->service().TakeError(m) : std::move(outcomes[m]);
    if (spoil) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << m;
      EXPECT_NE(
          status.message().find("device " + std::to_string(members - 1) + " sends to device 0"),
          std::string::npos)
          << status.message();
      continue;
    }
    ASSERT_TRUE(status.ok()) << status.message();
    std::vector<float> expected(sides[m].initial);
    for (int p = 0; p < members; ++p) {
      for (int64_t i = 0; i < rows[p][m] * kRow; ++i) {
        expected[sides[p].index[2][m] * kRow + i] =
            sides[p].source[sides[p].index[0][m] * kRow + i];
      }
    }
    ASSERT_EQ(sides[m].result, expected) << "member " << m;
  }
}

}  // namespace gpu
}  // namespace dfccl

#endif  // DFCCL_TESTS_CUDA_RANKS_H_
