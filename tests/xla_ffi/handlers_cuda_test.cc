// SPDX-License-Identifier: Apache-2.0
// The handlers of the CUDA platform, called as XLA calls them, over a stand-in for the
// driver (DFCCL_DRIVER_STAND_IN) whose GPUs run the daemon on host threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/identity.h"
#include "core/runtime.h"
#include "cuda/emulation.h"
#include "tests/core/daemon/kind_values.h"
#include "tests/xla_ffi/cuda_calls.h"
#include "tests/xla_ffi/fake_xla.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/handlers.h"

namespace dfccl {
namespace {

using gpu::EmulatedStream;
using testing::Array;
using testing::Attributes;
using testing::Call;
using testing::CustomCall;
using testing::kDone;
using testing::kFirst;
using testing::kHandleStart;
using testing::kHandleWait;
using testing::kSingle;
using testing::kStart;
using testing::Launch;
using testing::Make;
using testing::MakeAttributes;
using testing::MakeCall;
using testing::Member;
using testing::SmallOptions;

class HandlersCudaTest : public ::testing::Test {
 protected:
  HandlersCudaTest() {
    ConfigureCuda(SmallOptions());
    BeginExecutable();
    for (auto& stream : streams_) stream = std::make_unique<EmulatedStream>();
  }
  ~HandlersCudaTest() override { End(); }

  // After this nobody uses a buffer of a collective.
  void End() {
    ShutdownCuda();
    for (auto& stream : streams_) stream.reset();
  }
  Launch On(int gpu, int64_t run_id) { return {gpu, run_id, streams_[gpu].get()}; }
  void Synchronize() {
    for (auto& stream : streams_) stream->Synchronize();
  }
  static std::vector<int64_t> Devices(int count) {
    std::vector<int64_t> devices;
    for (int i = 0; i < count; ++i) devices.push_back(kFirst + i);
    return devices;
  }
  static gpu::ServiceCounters Counters() {
    gpu::ServiceCounters counters;
    EXPECT_TRUE(CudaCounters(&counters));
    return counters;
  }
  static bool Eventually(const std::function<bool()>& condition) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > limit) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  std::mt19937 random_{5};
  std::array<std::unique_ptr<EmulatedStream>, 2> streams_;
};

TEST_F(HandlersCudaTest, EveryKindOnTwoGpus) {
  int64_t site = 0;
  for (int k = 0; k < static_cast<int>(Kind::kRaggedAllToAll); ++k) {
    for (int64_t count : {1, 1003}) {
      const Call call = MakeCall(static_cast<Kind>(k), Devices(2), count, &random_);
      auto custom_call = Make(kSingle, MakeAttributes(call, site++, ""));
      for (int64_t run = 1; run <= 3; ++run) {
        Member members[] = {{call, 0}, {call, 1}};
        for (Member& member : members) {
          EXPECT_EQ(
              custom_call->Execute(On(member.member, run), {member.Source()}, member.Result()), "");
        }
        Synchronize();
        for (const Member& member : members) member.Check();
        if (HasFailure()) return End();
      }
    }
  }
}

// Programs of several members each, every member with calls of its own.
TEST_F(HandlersCudaTest, EveryKindWithSeveralMembersOnEachGpu) {
  constexpr int kMembers = 5;
  for (int k = 0; k < static_cast<int>(Kind::kRaggedAllToAll); ++k) {
    const Call call = MakeCall(static_cast<Kind>(k), Devices(kMembers), 301, &random_);
    std::vector<std::unique_ptr<CustomCall>> starts, dones;
    std::vector<std::unique_ptr<Member>> members;
    for (int i = 0; i < kMembers; ++i) {
      Attributes attributes = MakeAttributes(call, 10 * k + i, KindName(call.signature.kind));
      attributes.Set("as_device", kFirst + i);
      starts.push_back(Make(kStart, attributes));
      dones.push_back(Make(kDone, attributes));
      members.push_back(std::make_unique<Member>(call, i));
    }
    const auto run = [&](int i) { return On(i % 2, 70 + k); };
    for (int i = 0; i < kMembers; ++i) {
      EXPECT_EQ(starts[i]->Execute(run(i), {members[i]->Source()}, members[i]->Ticket()), "");
    }
    for (int i = kMembers; i-- > 0;) {
      EXPECT_EQ(dones[i]->Execute(run(i), {members[i]->Ticket(), members[i]->Source()},
                                  members[i]->Result()),
                "");
    }
    Synchronize();
    for (const auto& member : members) member->Check();
    if (HasFailure()) return End();
  }
}

// Two devices start two collectives in opposite order and await them in opposite order, in
// a loop; the results go over the sources' memory.
TEST_F(HandlersCudaTest, OppositeOrders) {
  const Call calls[] = {MakeCall(Kind::kAllReduce, Devices(2), 700, &random_),
                        MakeCall(Kind::kAllGather, Devices(2), 90, &random_)};
  std::unique_ptr<CustomCall> starts[2], dones[2];
  for (int c = 0; c < 2; ++c) {
    const Attributes attributes = MakeAttributes(calls[c], c, "");
    starts[c] = Make(kStart, attributes);
    dones[c] = Make(kDone, attributes);
  }
  for (int64_t run = 0; run < 20; ++run) {
    for (int iteration = 0; iteration < 3; ++iteration) {
      Member members[2][2] = {{{calls[0], 0}, {calls[0], 1}}, {{calls[1], 0}, {calls[1], 1}}};
      for (int device = 0; device < 2; ++device) {
        for (int turn = 0; turn < 2; ++turn) {
          const int c = (turn + device) % 2;
          Member& member = members[c][device];
          EXPECT_EQ(starts[c]->Execute(On(device, run), {member.Source()}, member.Ticket()), "");
        }
        for (int turn = 0; turn < 2; ++turn) {
          const int c = (turn + device) % 2;
          Member& member = members[c][device];
          EXPECT_EQ(dones[c]->Execute(On(device, run), {member.Ticket(), member.Source()},
                                      member.Result()),
                    "");
        }
      }
      Synchronize();
      for (const auto& of_call : members) {
        for (const Member& member : of_call) member.Check();
      }
      if (HasFailure()) return End();
    }
  }
}

// One call site has several starts before the first done, as in an unrolled loop: sources
// tell them apart.
TEST_F(HandlersCudaTest, SeveralStartsOfOneCallSite) {
  const Call call = MakeCall(Kind::kAllReduce, Devices(2), 50, &random_);
  const Call other = [&] {
    Call changed = call;
    ++changed.number;
    return changed;
  }();
  const Attributes attributes = MakeAttributes(call, 0, "");
  auto start = Make(kStart, attributes), done = Make(kDone, attributes);
  Member members[2][2] = {{{call, 0}, {call, 1}}, {{other, 0}, {other, 1}}};
  for (int device = 0; device < 2; ++device) {
    for (auto& of_call : members) {
      EXPECT_EQ(start->Execute(On(device, 1), {of_call[device].Source()}, of_call[device].Ticket()),
                "");
    }
  }
  for (int device = 0; device < 2; ++device) {
    for (int c : {1, 0}) {
      Member& member = members[c][device];
      EXPECT_EQ(done->Execute(On(device, 1), {member.Ticket(), member.Source()}, member.Result()),
                "");
    }
  }
  Synchronize();
  for (const auto& of_call : members) {
    for (const Member& member : of_call) member.Check();
  }
}

// The host reads keys once the stream has made them.
TEST_F(HandlersCudaTest, KeysAreReadFromDeviceMemory) {
  const Call calls[] = {MakeCall(Kind::kAllReduce, Devices(2), 40, &random_),
                        MakeCall(Kind::kAllReduce, Devices(2), 40, &random_)};
  Attributes attributes = MakeAttributes(calls[0], 0, "expert");
  attributes.Set("has_key", int64_t{1});
  attributes.Set("op", std::string("sum"));
  auto start = Make(kStart, attributes), done = Make(kDone, attributes);
  std::vector<std::unique_ptr<Member>> members;
  std::vector<std::unique_ptr<int32_t>> keys;
  for (int device = 0; device < 2; ++device) {
    for (int turn = 0; turn < 2; ++turn) {
      const int c = (turn + device) % 2;
      Call call = calls[c];
      call.signature.dtype = DType::kF32;
      call.signature.op = ReduceOp::kSum;
      members.push_back(std::make_unique<Member>(call, device));
      keys.push_back(std::make_unique<int32_t>(-1));
      streams_[device]->Put([key = keys.back().get(), c] { *key = c - 7; });
      EXPECT_EQ(
          start->Execute(On(device, 1),
                         {members.back()->Source(), {XLA_FFI_DataType_S32, keys.back().get(), {}}},
                         members.back()->Ticket()),
          "");
    }
  }
  for (auto& member : members) {
    EXPECT_EQ(done->Execute(On(member->member, 1), {member->Ticket(), member->Source()},
                            member->Result()),
              "");
  }
  Synchronize();
  for (const auto& member : members) member->Check();
}

TEST_F(HandlersCudaTest, RaggedExchange) {
  Call call = MakeCall(Kind::kBarrier, Devices(2), 1, &random_);
  call.signature.kind = Kind::kRaggedAllToAll;
  auto custom_call = Make(kSingle, MakeAttributes(call, 0, ""));
  // Rows that r sends to p: r + 2 * p; of 3 elements.
  constexpr int64_t kRow = 3;
  struct Side {
    std::vector<int32_t> input_offsets, send_sizes, output_offsets, recv_sizes;
    std::vector<float> source, initial, result;
  };
  const auto rows = [](int from, int to) { return from + 2 * to; };
  Side sides[2];
  for (int r = 0; r < 2; ++r) {
    Side& side = sides[r];
    side.input_offsets = {0, rows(r, 0)};
    side.send_sizes = {rows(r, 0), rows(r, 1)};
    for (int p = 0; p < 2; ++p) side.output_offsets.push_back(1 + (r == 1 ? rows(0, p) : 0));
    side.recv_sizes = {rows(0, r), rows(1, r)};
    side.source.resize(8 * kRow);
    for (size_t i = 0; i < side.source.size(); ++i) {
      side.source[i] = static_cast<float>(100 * r + static_cast<int>(i));
    }
    side.initial.assign(9 * kRow, -1.f);
    side.result.assign(9 * kRow, 55.f);
  }
  for (int r = 0; r < 2; ++r) {
    Side& side = sides[r];
    const auto index = [](std::vector<int32_t>& values) {
      return Array{XLA_FFI_DataType_S32, values.data(), {2}};
    };
    EXPECT_EQ(custom_call->Execute(On(r, 1),
                                   {{XLA_FFI_DataType_F32, side.source.data(), {8, kRow}},
                                    {XLA_FFI_DataType_F32, side.initial.data(), {9, kRow}},
                                    index(side.input_offsets),
                                    index(side.send_sizes),
                                    index(side.output_offsets),
                                    index(side.recv_sizes)},
                                   {XLA_FFI_DataType_F32, side.result.data(), {9, kRow}}),
              "");
  }
  Synchronize();
  for (int r = 0; r < 2; ++r) {
    std::vector<float> expected(sides[r].initial);
    for (int p = 0; p < 2; ++p) {
      for (int64_t i = 0; i < rows(p, r) * kRow; ++i) {
        expected[sides[p].output_offsets[r] * kRow + i] =
            sides[p].source[sides[p].input_offsets[r] * kRow + i];
      }
    }
    EXPECT_EQ(sides[r].result, expected) << "member " << r;
  }
}

// Both sides hear of it, with the lines where the calls are; and what the failed launch
// had started besides is ended, on its peers, too.
TEST_F(HandlersCudaTest, ADisagreementEndsTheLaunch) {
  const Call call = MakeCall(Kind::kAllReduce, Devices(2), 60, &random_);
  Call longer = call;
  longer.signature.count = 61;
  const Attributes attributes = MakeAttributes(call, 3, "");
  Runtime::Get().RegisterSite(4711, 3, {"all_reduce(sum)", "", "train.py:12 (step)", "jit_f", {}});
  auto single = Make(kSingle, attributes);
  const Attributes besides = MakeAttributes(call, 4, "");
  auto start = Make(kStart, besides), done = Make(kDone, besides);

  Member first(call, 0), second(longer, 1), started(call, 1), peer(call, 0);
  EXPECT_EQ(start->Execute(On(0, 1), {peer.Source()}, peer.Ticket()), "");
  EXPECT_EQ(start->Execute(On(1, 1), {started.Source()}, started.Ticket()), "");
  EXPECT_EQ(single->Execute(On(0, 1), {first.Source()}, first.Result()), "");
  const std::string error = single->Execute(On(1, 1), {second.Source()}, second.Result());
  EXPECT_NE(error.find("jax_dfccl: members disagree: all_reduce"), std::string::npos) << error;
  EXPECT_NE(error.find("on device 101 of [100, 101] at train.py:12 (step)"), std::string::npos)
      << error;
  EXPECT_NE(error.find("on device 100 at train.py:12 (step)"), std::string::npos) << error;
  Synchronize();  // nothing waits any more
  // XLA does not know of the failure on device 0 yet; its next call says so.
  EXPECT_NE(done->Execute(On(0, 1), {peer.Ticket(), peer.Source()}, peer.Result()), "");
  Synchronize();
  ASSERT_TRUE(Eventually([] {
    const gpu::ServiceCounters counters = Counters();
    return counters.completed + counters.failed == counters.submitted;
  }));
  EXPECT_NE(done->Execute(On(1, 1), {started.Ticket(), started.Source()}, started.Result()), "");

  // Nothing is left of it when the program is run again.
  Member again[] = {{call, 0}, {call, 1}};
  for (Member& member : again) {
    EXPECT_EQ(single->Execute(On(member.member, 2), {member.Source()}, member.Result()), "");
  }
  Synchronize();
  for (const Member& member : again) member.Check();
}

// Launches whose dones never come.
TEST_F(HandlersCudaTest, WhatNobodyAwaitsIsGivenUp) {
  const Call call = MakeCall(Kind::kAllReduce, Devices(1), 1000, &random_);
  auto start = Make(kStart, MakeAttributes(call, 0, ""));
  Member member(call, 0);
  // More than there is memory for at a time.
  const auto launches = static_cast<int64_t>((size_t{8} << 20) / 1024);
  for (int64_t run = 0; run < launches; ++run) {
    const std::string error = start->Execute(On(0, run), {member.Source()}, member.Ticket());
    EXPECT_EQ(error, "") << run;
    if (HasFailure()) break;
  }
  Synchronize();
  End();  // the daemon may still read the last ones' source
}

// A handle is started by one program and waited for by another, in opposite orders on two
// devices; the operand is the program's again at once, and XLA may copy the ticket.
TEST_F(HandlersCudaTest, HandlesOfEveryKind) {
  for (int k = 0; k < static_cast<int>(Kind::kRaggedAllToAll); ++k) {
    std::vector<Call> calls;
    std::vector<std::unique_ptr<CustomCall>> starts, waits;
    std::vector<std::unique_ptr<Member>> members;
    for (int c = 0; c < 2; ++c) {
      calls.push_back(MakeCall(static_cast<Kind>(k), Devices(2), c == 0 ? 1500 : 70, &random_));
      const int64_t site = 2 * k + c;
      starts.push_back(Make(kHandleStart, MakeAttributes(calls[c], site, "")));
      Attributes later = MakeAttributes(calls[c], site, "");
      later.Set("program", int64_t{4712});
      waits.push_back(Make(kHandleWait, later));
      for (int device = 0; device < 2; ++device) {
        members.push_back(std::make_unique<Member>(calls[c], device));
      }
    }
    uint64_t copies[2][2] = {};
    for (int device = 0; device < 2; ++device) {
      for (int turn = 0; turn < 2; ++turn) {
        const int c = (turn + device) % 2;
        Member& member = *members[2 * c + device];
        EXPECT_EQ(starts[c]->Execute(On(device, 1 + k), {member.Source()}, member.Ticket()), "");
        streams_[device]->Put([&member, copy = &copies[c][device]] {
          std::fill(member.source.begin(), member.source.end(), '\x33');
          *copy = std::exchange(member.ticket, 0);
        });
      }
      for (int turn = 0; turn < 2; ++turn) {
        const int c = turn;  // the other order on one of them
        Member& member = *members[2 * c + device];
        const Array ticket = {XLA_FFI_DataType_U64, &copies[c][device], {1}};
        EXPECT_EQ(waits[c]->Execute(On(device, 1000 + k), {ticket}, member.Result()), "");
      }
    }
    Synchronize();
    for (const auto& member : members) member->Check();
    if (HasFailure()) return End();
  }
}

TEST_F(HandlersCudaTest, WhatBecomesOfHandles) {
  Runtime::Get().RegisterSite(4711, 0, {"all_reduce(sum)", "", "train.py:7 (begin)", "jit_g", {}});
  const Call call = MakeCall(Kind::kAllReduce, Devices(2), 500, &random_);
  auto start = Make(kHandleStart, MakeAttributes(call, 0, ""));
  auto wait = Make(kHandleWait, MakeAttributes(call, 1, ""));
  const Call alone[] = {MakeCall(Kind::kBarrier, {kFirst}, 5, &random_),
                        MakeCall(Kind::kBarrier, {kFirst + 1}, 5, &random_)};
  auto plain = Make(kSingle, MakeAttributes(alone[0], 2, ""));
  auto plain_there = Make(kSingle, MakeAttributes(alone[1], 3, ""));
  // What a later call of the device returns.
  int64_t run = 100;
  const auto error_of = [&](int device) {
    std::string error;
    EXPECT_TRUE(Eventually([&] {
      Member part(alone[device], 0);
      error = (device == 0 ? plain : plain_there)
                  ->Execute(On(device, run++), {part.Source()}, part.Result());
      Synchronize();
      return !error.empty();
    }));
    return error;
  };

  Member first(call, 0), second(call, 1);
  EXPECT_EQ(start->Execute(On(0, 1), {first.Source()}, first.Ticket()), "");
  streams_[0]->Synchronize();
  EXPECT_EQ(StateOfCudaHandle(first.ticket), HandleState::kPending);
  const std::vector<FlightEntry> entries = CudaInFlight();
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_EQ(entries[0].device, kFirst);
  EXPECT_EQ(entries[0].operation, "all_reduce(sum)");
  EXPECT_EQ(entries[0].source, "train.py:7 (begin)");
  EXPECT_EQ(entries[0].state, "waiting for members");
  EXPECT_EQ(entries[0].absent, std::vector<int64_t>{kFirst + 1});
  EXPECT_EQ(start->Execute(On(1, 1), {second.Source()}, second.Ticket()), "");
  ASSERT_TRUE(
      Eventually([&] { return StateOfCudaHandle(first.ticket) == HandleState::kFinished; }));
  EXPECT_TRUE(Eventually([] { return CudaInFlight().empty(); }));
  EXPECT_FALSE(CancelCudaHandle(first.ticket));
  EXPECT_EQ(wait->Execute(On(0, 2), {first.Ticket()}, first.Result()), "");
  Synchronize();
  first.Check();
  EXPECT_EQ(StateOfCudaHandle(first.ticket), HandleState::kGone);
  EXPECT_FALSE(DropCudaHandle(first.ticket));

  // Twice, and on another device: errors of later calls, and the handle stays as it was.
  EXPECT_EQ(wait->Execute(On(0, 3), {first.Ticket()}, first.Result()), "");
  EXPECT_NE(error_of(0).find("has been waited for"), std::string::npos);
  EXPECT_EQ(wait->Execute(On(0, 4), {second.Ticket()}, first.Result()), "");
  EXPECT_NE(error_of(0).find("a handle of device 101 is waited for on device 100"),
            std::string::npos);
  EXPECT_EQ(wait->Execute(On(1, 2), {second.Ticket()}, second.Result()), "");
  Synchronize();
  second.Check();

  // Cancelled: the error is that of who waits, and of who comes later.
  Member cancelled(call, 0), late(call, 1);
  EXPECT_EQ(start->Execute(On(0, 50), {cancelled.Source()}, cancelled.Ticket()), "");
  streams_[0]->Synchronize();
  EXPECT_TRUE(CancelCudaHandle(cancelled.ticket));
  EXPECT_EQ(wait->Execute(On(0, 51), {cancelled.Ticket()}, cancelled.Result()), "");
  EXPECT_NE(error_of(0).find("has cancelled its handle"), std::string::npos);
  EXPECT_NE(start->Execute(On(1, 50), {late.Source()}, late.Ticket()).find("has cancelled"),
            std::string::npos);
}

// Their memory is given back.
TEST_F(HandlersCudaTest, HandlesThatAreDropped) {
  const Call call = MakeCall(Kind::kAllGather, Devices(2), 9000, &random_);
  auto start = Make(kHandleStart, MakeAttributes(call, 0, ""));
  for (int64_t run = 0; run < 300; ++run) {
    Member members[] = {{call, 0}, {call, 1}};
    for (Member& member : members) {
      EXPECT_EQ(start->Execute(On(member.member, run), {member.Source()}, member.Ticket()), "");
    }
    Synchronize();
    for (Member& member : members) EXPECT_TRUE(DropCudaHandle(member.ticket));
    ASSERT_TRUE(Eventually([] { return CudaInFlight().empty(); }));
    if (HasFailure()) return End();
  }
}

TEST_F(HandlersCudaTest, WrongCallsAreRefused) {
  const Call call = MakeCall(Kind::kAllReduce, Devices(2), 10, &random_);
  const Attributes attributes = MakeAttributes(call, 0, "");
  auto single = Make(kSingle, attributes), start = Make(kStart, attributes),
       done = Make(kDone, attributes);
  Member member(call, 0), other(call, 0);
  const auto expect = [](const std::string& error, const char* text) {
    EXPECT_NE(error.find(text), std::string::npos) << error;
  };
  expect(single->Execute({7, 1, streams_[0].get()}, {member.Source()}, member.Result()),
         "GPU 7 is not known");
  expect(single->Execute(On(0, 1), {member.Source(), member.Source()}, member.Result()),
         "expected 1 operands, got 2");
  Array wrong = member.Result();
  wrong.dims = {9};
  expect(single->Execute(On(0, 1), {member.Source()}, wrong), "does not go with the operand");
  expect(start->Execute(On(0, 1), {member.Source()}, member.Result()), "must be a uint64[1]");
  expect(done->Execute(On(0, 1), {member.Ticket(), member.Source()}, member.Result()),
         "a done without its start");
  EXPECT_EQ(start->Execute(On(0, 2), {member.Source()}, member.Ticket()), "");
  expect(done->Execute(On(0, 2), {member.Ticket(), other.Source()}, member.Result()),
         "moved between start and done");
  Synchronize();
  auto wait = Make(kHandleWait, attributes);
  expect(wait->Execute(On(0, 3), {}, member.Result()), "a wait needs a ticket");
  expect(wait->Execute(On(0, 3), {member.Source()}, member.Result()), "must be a uint64[1]");
  Attributes with_tag = attributes;
  with_tag.Set("has_tag", int64_t{1});
  auto tagged = Make(kHandleStart, with_tag);
  expect(tagged->Execute(On(0, 3), {member.Source(), member.Source()}, member.Ticket()),
         "on CPU devices only");
  Attributes without_pass = attributes;
  without_pass.Set("site", int64_t{-1});
  std::string error;
  const CustomCall refused(CudaTargets()[kSingle], CudaCallState::type_info, without_pass, &error);
  expect(error, "without jax_dfccl's module pass");
}

TEST_F(HandlersCudaTest, ADriverThatIsMissingIsSaidByTheFirstCall) {
  CudaOptions options = SmallOptions();
  options.driver.library = "libno-such-driver.so.7";
  ConfigureCuda(options);
  const Call call = MakeCall(Kind::kAllReduce, Devices(1), 10, &random_);
  auto single = Make(kSingle, MakeAttributes(call, 0, ""));
  Member member(call, 0);
  for (int64_t run = 0; run < 2; ++run) {
    const std::string error = single->Execute(On(0, run), {member.Source()}, member.Result());
    EXPECT_NE(error.find("libno-such-driver.so.7"), std::string::npos) << error;
  }
  gpu::ServiceCounters counters;
  EXPECT_FALSE(CudaCounters(&counters));
}

TEST_F(HandlersCudaTest, AfterTheEndCallsAreRefused) {
  const Call call = MakeCall(Kind::kAllReduce, Devices(1), 10, &random_);
  auto single = Make(kSingle, MakeAttributes(call, 0, ""));
  Member member(call, 0);
  EXPECT_EQ(single->Execute(On(0, 1), {member.Source()}, member.Result()), "");
  Synchronize();
  member.Check();
  ShutdownCuda();
  const std::string error = single->Execute(On(0, 2), {member.Source()}, member.Result());
  EXPECT_NE(error.find("shut down"), std::string::npos) << error;
}

// What XLA asks every handler for when it is registered. The trait for command buffers
// would have XLA replay a call without the handler.
TEST(HandlersCudaMetadataTest, AreNotForCommandBuffers) {
  CudaCallState::id.type_id = 77;
  for (int i = 0; i < kTargetCount; ++i) {
    for (XLA_FFI_Handler* handler : {CudaTargets()[i].execute, CudaTargets()[i].instantiate}) {
      XLA_FFI_Metadata metadata = {};
      metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
      metadata.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
      metadata.traits = 99;
      XLA_FFI_Metadata_Extension extension = {};
      extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
      extension.extension_base.type = XLA_FFI_Extension_Metadata;
      extension.metadata = &metadata;
      XLA_FFI_CallFrame frame = {};
      frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
      frame.api = testing::FakeApi();
      frame.extension_start = &extension.extension_base;
      EXPECT_EQ(handler(&frame), nullptr);
      EXPECT_EQ(metadata.traits, 0u) << CudaTargets()[i].name;
      EXPECT_EQ(metadata.api_version.major_version, XLA_FFI_API_MAJOR);
    }
  }
}

}  // namespace
}  // namespace dfccl
