// SPDX-License-Identifier: Apache-2.0
// Every kind of collective: values for groups, sizes and types, in any order of
// submission; members that need not wait for each other; ragged exchanges.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/runtime.h"
#include "tests/core/daemon/harness.h"
#include "tests/core/daemon/kind_values.h"

namespace dfccl {
namespace testing {
namespace {

class KindPart {
 public:
  KindPart(const Call& call, int member)
      : call_(call),
        member_(member),
        source_(call.SourceElements() * DTypeSize(call.signature.dtype)),
        result_(call.ResultElements() * DTypeSize(call.signature.dtype), '\x5a') {
    call.FillSource(member, source_.data());
  }

  void Submit(bool staged_and_owned = false) {
    Submission submission =
        call_.MakeSubmission(member_, source_.data(), staged_and_owned ? nullptr : result_.data());
    submission.stage_source = staged_and_owned;
    owned_ = staged_and_owned;
    operation_ = Runtime::Get().Submit(submission);
    if (staged_and_owned) std::fill(source_.begin(), source_.end(), '\x77');
  }

  bool Finished() const {
    Status status;
    return Runtime::Get().Finished(operation_, &status);
  }

  // Waits, takes the result, and returns the outcome.
  Status Await() {
    Status status;
    const auto limit = std::chrono::steady_clock::now() + kLimit;
    while (!Runtime::Get().Finished(operation_, &status)) {
      if (std::chrono::steady_clock::now() > limit) {
        ADD_FAILURE() << Text() << " hangs";
        std::abort();  // its buffers are still in use
      }
      std::this_thread::yield();
    }
    if (owned_ && status.ok()) {
      Runtime::Get().Collect(operation_, result_.data());
    } else {
      Runtime::Get().Release(operation_);
    }
    return status;
  }

  void AwaitValues() {
    const Status status = Await();
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(call_.FirstWrong(member_, result_.data()), -1) << Text();
  }

  std::string Text() const { return call_.Text(member_); }

 private:
  const Call call_;
  const int member_;
  std::vector<char> source_;
  std::vector<char> result_;
  bool owned_ = false;
  Operation* operation_ = nullptr;
};

using KindParts = std::vector<std::unique_ptr<KindPart>>;

class KindsTest : public RuntimeTest {
 protected:
  static KindParts Parts(const Call& call) {
    KindParts parts;
    for (int i = 0; i < call.members(); ++i) parts.push_back(std::make_unique<KindPart>(call, i));
    return parts;
  }

  static const std::vector<Kind>& Kinds() {
    static const std::vector<Kind> kinds = [] {
      std::vector<Kind> list;
      for (int k = 0; k < kKindCount; ++k) {
        if (static_cast<Kind>(k) != Kind::kRaggedAllToAll) list.push_back(static_cast<Kind>(k));
      }
      return list;
    }();
    return kinds;
  }
};

TEST_F(KindsTest, ValuesFromOneThreadInAnyOrder) {
  std::mt19937 random(1);
  for (Kind kind : Kinds()) {
    for (int members : {1, 2, 3, 5, 8, 16}) {
      for (int64_t count : {0, 1, 7, 1000, 100003}) {
        // Large messages of n blocks on n members take their time.
        if (members > 5 && count > 1000) count = members > 8 ? 3001 : 20011;
        for (int round = 0; round < 3; ++round) {
          KindParts parts = Parts(MakeCall(kind, Devices(members), count, &random));
          if (round > 0) std::shuffle(parts.begin(), parts.end(), random);
          for (auto& part : parts) part->Submit(/*staged_and_owned=*/round == 2);
          for (auto& part : parts) part->AwaitValues();
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(KindsTest, ValuesWithAThreadForEachMember) {
  std::mt19937 random(2);
  for (Kind kind : Kinds()) {
    for (int members : {2, 5, 8}) {
      for (int64_t count : {1, 1000, 50021}) {
        KindParts parts = Parts(MakeCall(kind, Devices(members), count, &random));
        std::vector<std::thread> threads;
        for (auto& part : parts) {
          threads.emplace_back([&part] {
            part->Submit();
            part->AwaitValues();
          });
        }
        for (std::thread& thread : threads) thread.join();
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(KindsTest, ValuesWrittenPastTheCaches) {
  InternalOptions internal;
  internal.streaming_bytes = 0;
  SetInternalOptions(internal);
  Start(RuntimeOptions());
  std::mt19937 random(4);
  for (Kind kind : Kinds()) {
    for (int64_t count : {1, 1003, 40'009}) {
      KindParts parts = Parts(MakeCall(kind, Devices(5), count, &random));
      for (auto& part : parts) part->Submit();
      for (auto& part : parts) part->AwaitValues();
      if (HasFatalFailure()) return;
    }
  }
}

// Collectives of all kinds over random groups, in an order of its own on every
// device, all started before the first is awaited.
TEST_F(KindsTest, MixedKindsInDisorder) {
  constexpr int kDevices = 10;
  std::mt19937 random(3);
  for (int round = 0; round < 6; ++round) {
    std::vector<KindParts> parts(kDevices);
    for (int i = 0; i < 300; ++i) {
      std::vector<int64_t> devices = Devices(kDevices);
      std::shuffle(devices.begin(), devices.end(), random);
      devices.resize(1 + random() % 6);
      const Call call = MakeCall(Kinds()[random() % Kinds().size()], devices,
                                 random() % 40 == 0 ? 20'000 : random() % 64, &random);
      for (int m = 0; m < call.members(); ++m) {
        parts[devices[m]].push_back(std::make_unique<KindPart>(call, m));
      }
    }
    std::vector<std::thread> threads;
    for (KindParts& own : parts) {
      std::shuffle(own.begin(), own.end(), random);
      threads.emplace_back([&own] {
        for (auto& part : own) part->Submit();
        for (auto& part : own) part->AwaitValues();
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (HasFatalFailure()) return;
  }
  const DeviceCounters counters = Sum(Runtime::Get().Report());
  EXPECT_EQ(counters.submitted, counters.completed);
  EXPECT_GT(counters.preemptions, 0u);
}

// Members finish as soon as those have come whom they need, not before, and
// whatever the size.
TEST_F(KindsTest, NobodyWaitsForWhomItDoesNotNeed) {
  std::mt19937 random(4);
  for (Kind kind : Kinds()) {
    for (int64_t count : {5, 60'000}) {
      const Call call = MakeCall(kind, Devices(6), count, &random);
      KindParts parts = Parts(call);
      std::vector<int> order = {0, 1, 2, 3, 4, 5};
      std::shuffle(order.begin(), order.end(), random);
      std::vector<bool> arrived(6);
      for (int member : order) {
        parts[member]->Submit();
        arrived[member] = true;
        for (int i = 0; i < 6; ++i) {
          if (!arrived[i]) continue;
          bool served = true;
          for (int peer = 0; peer < 6; ++peer) {
            served =
                served && (arrived[peer] || !Needs(call.signature, 6, i, peer, /*across=*/false));
          }
          const auto limit = std::chrono::steady_clock::now() + kLimit;
          while (served && !parts[i]->Finished()) {
            ASSERT_LT(std::chrono::steady_clock::now(), limit) << parts[i]->Text();
            std::this_thread::yield();
          }
          ASSERT_EQ(parts[i]->Finished(), served) << parts[i]->Text();
        }
      }
      for (auto& part : parts) part->AwaitValues();
      if (HasFatalFailure()) return;
    }
  }
}

// A member that has what it needs is not late, and does not wait in a report.
TEST_F(KindsTest, AMemberThatHasFinishedIsOutOfTheGame) {
  const Group* group = Runtime::Get().InternGroup(Devices(3));
  Call call{group, 1u << 20, {}};
  call.signature = {Kind::kBroadcast, ReduceOp::kSum, DType::kF32, 9, 0, nullptr};
  KindParts parts = Parts(call);
  parts[1]->Submit();
  FlightReport report = Runtime::Get().Report();
  ASSERT_EQ(report.in_flight.size(), 1u);
  EXPECT_EQ(report.in_flight[0].operation, "broadcast");
  EXPECT_EQ(report.in_flight[0].absent, std::vector<int64_t>{0});
  parts[0]->Submit();
  parts[1]->AwaitValues();
  report = Runtime::Get().Report();
  ASSERT_EQ(report.in_flight.size(), 1u);
  EXPECT_EQ(report.in_flight[0].device, 0);
  EXPECT_EQ(report.in_flight[0].absent, std::vector<int64_t>{2});
  // Its launch ends with an error, but its part was done: the others go on.
  Runtime::Get().Abandon(1, 0, 0, Status(StatusCode::kAborted, "late"));
  parts[2]->Submit();
  parts[0]->AwaitValues();
  parts[2]->AwaitValues();
}

TEST_F(KindsTest, AGroupThatIsTooLargeIsAnError) {
  std::mt19937 random(7);
  for (auto& part : Parts(MakeCall(Kind::kAllGather, Devices(300), 1, &random))) {
    part->Submit();
    const Status status = part->Await();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), "all_gather: groups of 300 members are more than it can serve");
  }
}

TEST_F(KindsTest, NobodyIsLateForThoseWhoHaveFinished) {
  RuntimeOptions options;
  options.timeout_ns = 50'000'000;
  Start(options);
  Call call{Runtime::Get().InternGroup(Devices(3)), 1u << 23, {}};
  call.signature = {Kind::kPermute, ReduceOp::kSum, DType::kF32, 9, 0, InternPairs({{0, 1}})};
  KindParts parts = Parts(call);
  for (int i : {0, 1}) parts[i]->Submit();
  for (int i : {0, 1}) parts[i]->AwaitValues();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  parts[2]->Submit();
  parts[2]->AwaitValues();
}

// Device 1 waits for the root, device 0, in a broadcast that device 2 has not come
// to, because it waits for device 1 in another one.
TEST_F(KindsTest, WhoIsNotNeededMakesNoCycle) {
  for (Kind kind : {Kind::kBroadcast, Kind::kAllReduce}) {
    const Instance first = RuntimeTest::Make({0, 1, 2}, 4), second = RuntimeTest::Make({1, 2}, 4);
    Part first0(first, 0), first1(first, 1), first2(first, 2), second1(second, 0),
        second2(second, 1);
    const auto submit = [kind](Part* part) {
      Submission submission = part->MakeSubmission();
      submission.signature.kind = kind;
      part->Submit(submission);
    };
    submit(&first1);
    second2.Submit();
    first1.Watch();
    second2.Watch();
    EXPECT_EQ(Runtime::Get().Report().cycles.size(), kind == Kind::kBroadcast ? 0u : 1u);
    submit(&first0);
    second1.Submit();
    submit(&first2);
    for (Part* part : {&first0, &first1, &first2, &second1, &second2}) {
      EXPECT_TRUE(part->Await().ok());
    }
  }
}

// Two devices have done all that the instance wants of them when the launch of the
// third fails: nobody is left to end it but who fails it.
TEST_F(KindsTest, AnInstanceWithoutUnfinishedMembersCanFail) {
  Call call{Runtime::Get().InternGroup(Devices(3)), 1u << 22, {}};
  call.signature = {Kind::kPermute, ReduceOp::kSum, DType::kF32, 9, 0, InternPairs({{0, 1}})};
  KindParts parts = Parts(call);
  for (int i : {0, 1}) parts[i]->Submit();
  for (int i : {0, 1}) parts[i]->AwaitValues();
  Runtime::Get().Abandon(2, 0, 0, Status(StatusCode::kAborted, "planted"));
  parts[2]->Submit();
  const Status status = parts[2]->Await();
  EXPECT_NE(status.message().find("planted"), std::string::npos) << status.message();
}

TEST_F(KindsTest, AMismatchIsFoundWhenOthersHaveFinished) {
  const Group* group = Runtime::Get().InternGroup(Devices(3));
  Call call{group, 1u << 21, {}};
  call.signature = {
      Kind::kPermute, ReduceOp::kSum, DType::kF32, 9, 0, InternPairs({{0, 1}, {2, 2}})};
  KindParts parts = Parts(call);
  parts[0]->Submit();
  parts[1]->Submit();
  parts[0]->AwaitValues();
  parts[1]->AwaitValues();
  Call other = call;
  other.signature.pairs = InternPairs({{0, 1}});
  KindPart wrong(other, 2);
  wrong.Submit();
  const Status status = wrong.Await();
  EXPECT_EQ(status.code(), StatusCode::kMismatch);
  EXPECT_NE(status.message().find("pairs [(0, 1), (2, 2)]"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("pairs [(0, 1)]."), std::string::npos) << status.message();
  EXPECT_TRUE(Runtime::Get().Report().in_flight.empty());
}

// Sizes by chance, in rows of three elements.
class RaggedTest : public RuntimeTest {
 protected:
  struct Member {
    RaggedPart part;
    std::vector<int32_t> source, result, initial, expected;
    Operation* operation = nullptr;
  };
  static constexpr int64_t kRow = 3;

  void Draw(int n, int most, std::mt19937* random) {
    members_ = std::vector<Member>(n);
    std::vector<std::vector<int64_t>> sizes(n, std::vector<int64_t>(n));
    for (auto& row : sizes) {
      for (int64_t& size : row) size = (*random)() % 3 == 0 ? 0 : (*random)() % (most + 1);
    }
    for (int r = 0; r < n; ++r) {
      RaggedPart& part = members_[r].part;
      part.send_sizes = sizes[r];
      int64_t input = (*random)() % 3;
      for (int p = 0; p < n; ++p) {
        part.input_offsets.push_back(input);
        input += sizes[r][p] + (*random)() % 2;
        part.recv_sizes.push_back(sizes[p][r]);
        part.output_offsets.push_back(0);
      }
      part.source_rows = input;
    }
    for (int r = 0; r < n; ++r) {
      int64_t output = 1;
      for (int p = n - 1; p >= 0; --p) {
        members_[p].part.output_offsets[r] = output;
        output += sizes[p][r];
      }
      Member& member = members_[r];
      member.part.result_rows = output + 2;
      for (int64_t i = 0; i < member.part.source_rows * kRow; ++i) {
        member.source.push_back(static_cast<int32_t>(1'000'000 * (r + 1) + i));
      }
      for (int64_t i = 0; i < member.part.result_rows * kRow; ++i) {
        member.initial.push_back(static_cast<int32_t>(-1 - i));
      }
      member.result.assign(member.initial.size(), 77);
      member.part.initial = member.initial.data();
    }
    for (Member& to : members_) {
      const auto r = &to - members_.data();
      to.expected = to.initial;
      for (Member& from : members_) {
        std::copy_n(from.source.begin() + from.part.input_offsets[r] * kRow,
                    from.part.send_sizes[r] * kRow,
                    to.expected.begin() + from.part.output_offsets[r] * kRow);
      }
    }
  }

  void Submit() {
    static uint64_t number = uint64_t{1} << 50;
    ++number;
    const int n = static_cast<int>(members_.size());
    const Group* group = Runtime::Get().InternGroup(Devices(n));
    for (int r = 0; r < n; ++r) {
      Submission submission;
      submission.device = r;
      submission.group = group;
      submission.member = r;
      submission.id = {number, number};
      submission.signature = {Kind::kRaggedAllToAll, ReduceOp::kSum, DType::kS32, kRow, 0, nullptr};
      submission.source = members_[r].source.data();
      submission.result = members_[r].result.data();
      RaggedPart part = members_[r].part;
      submission.ragged = &part;
      members_[r].operation = Runtime::Get().Submit(submission);
    }
  }

  Status Await(Member* member) {
    Status status;
    const auto limit = std::chrono::steady_clock::now() + kLimit;
    while (!Runtime::Get().Finished(member->operation, &status)) {
      if (std::chrono::steady_clock::now() > limit) std::abort();  // its buffers are in use
      std::this_thread::yield();
    }
    Runtime::Get().Release(member->operation);
    return status;
  }

  void ExpectFault(const std::string& fault) {
    Submit();
    for (Member& member : members_) {
      const Status status = Await(&member);
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_EQ(status.message(), "ragged_all_to_all: " + fault);
    }
  }

  std::vector<Member> members_;
};

TEST_F(RaggedTest, Values) {
  std::mt19937 random(5);
  for (int n : {1, 2, 3, 8}) {
    for (int most : {0, 1, 5, 5000}) {
      for (int round = 0; round < 5; ++round) {
        Draw(n, most, &random);
        Submit();
        for (Member& member : members_) {
          const Status status = Await(&member);
          ASSERT_TRUE(status.ok()) << status.message();
          ASSERT_EQ(member.result, member.expected);
        }
      }
    }
  }
}

TEST_F(RaggedTest, WhatDoesNotFitIsAnErrorOnAllMembers) {
  std::mt19937 random(6);
  const auto draw = [&] {
    do Draw(3, 4, &random);
    while (members_[2].part.send_sizes[1] != 4);
  };
  const auto text = [](int64_t value) { return std::to_string(value); };
  draw();
  members_[1].part.recv_sizes[2] = 3;
  ExpectFault("device 2 sends 4 rows to device 1, whose recv_sizes has 3 for them");
  draw();
  members_[2].part.send_sizes[1] = members_[1].part.recv_sizes[2] = -1;
  ExpectFault("device 2 sends -1 rows to device 1");
  for (const int64_t offset : {int64_t{-1}, int64_t{1000}, INT64_MAX}) {
    draw();
    members_[2].part.input_offsets[1] = offset;
    ExpectFault("device 2 sends 4 rows to device 1 from row " + text(offset) +
                " of its operand, which has " + text(members_[2].part.source_rows) + " rows");
    draw();
    members_[2].part.output_offsets[1] = offset;
    ExpectFault("device 2 sends 4 rows to device 1, to row " + text(offset) +
                " of its output, which has " + text(members_[1].part.result_rows) + " rows");
  }
}

}  // namespace
}  // namespace testing
}  // namespace dfccl
