// SPDX-License-Identifier: Apache-2.0
// The handlers of the CUDA platform in several processes, each with the two GPUs of a
// stand-in for the driver: every kind over all of them, in orders of their own, beside
// collectives within a process; members that disagree, and a process that dies.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/identity.h"
#include "core/runtime.h"
#include "cuda/emulation.h"
#include "tests/core/daemon/kind_values.h"
#include "tests/core/daemon/wires.h"
#include "tests/xla_ffi/cuda_calls.h"
#include "tests/xla_ffi/fake_xla.h"
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
using testing::Wires;

constexpr int kGpus = 2;  // of a process

// A process of the job.
class Process {
 public:
  Process(int self, int processes, const Wires& wires) : self_(self), processes_(processes) {
    RuntimeOptions runtime;
    runtime.timeout_ns = 60'000'000'000;
    Runtime::Configure(runtime);
    std::unordered_map<int64_t, int> process_of;
    for (int i = 0; i < processes * kGpus; ++i) process_of[kFirst + i] = i / kGpus;
    EXPECT_TRUE(Runtime::Get().JoinCluster(self, process_of, {}, /*peer_timeout_ns=*/0).ok());
    testing::AddLinks(self, wires);
    CudaOptions options = testing::SmallOptions();
    options.service.several_processes = true;
    options.service.host_memory_bytes = size_t{4} << 20;
    options.devices.clear();
    for (int gpu = 0; gpu < kGpus; ++gpu) options.devices.push_back({gpu, Device(gpu)});
    ConfigureCuda(options);
    BeginExecutable();
    for (auto& stream : streams_) stream = std::make_unique<EmulatedStream>();
  }
  ~Process() {
    ShutdownCuda();
    Runtime::Shutdown();  // what it has sent counts, also for those who come later
  }

  int self() const { return self_; }
  int64_t Device(int gpu) const { return kFirst + self_ * kGpus + gpu; }
  std::vector<int64_t> AllDevices() const {
    std::vector<int64_t> devices;
    for (int i = 0; i < processes_ * kGpus; ++i) devices.push_back(kFirst + i);
    return devices;
  }
  std::vector<int64_t> OwnDevices() const { return {Device(0), Device(1)}; }
  Launch On(int gpu, int64_t run_id) { return {gpu, run_id, streams_[gpu].get()}; }
  void Synchronize() {
    for (auto& stream : streams_) stream->Synchronize();
  }
  static int MemberOf(const Call& call, int64_t device) { return call.group->IndexOf(device); }
  static bool Eventually(const std::function<bool()>& condition) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > limit) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

 private:
  const int self_;
  const int processes_;
  std::array<std::unique_ptr<EmulatedStream>, kGpus> streams_;
};

// Runs `body` in processes of their own. `ends_badly`: one that kills itself.
void RunProcesses(int processes, bool shared_memory, const std::function<void(Process*)>& body,
                  int ends_badly = -1) {
  const Wires wires = testing::Connect(processes, shared_memory);
  std::vector<pid_t> children;
  for (int self = 0; self < processes; ++self) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(120);
      {
        Process process(self, processes, wires);
        body(&process);
      }
      _exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    children.push_back(child);
  }
  testing::CloseAll(wires);
  for (int self = 0; self < processes; ++self) {
    int status;
    ASSERT_EQ(waitpid(children[self], &status, 0), children[self]);
    if (self == ends_badly) continue;
    EXPECT_TRUE(WIFEXITED(status)) << "process " << self << ", signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0) << "process " << self;
  }
}

// Every kind twice, as single calls in launches from `first_run` on.
void RunEveryKind(Process* process, int64_t first_run) {
  std::mt19937 random(5);  // the same in all processes
  int64_t site = 0;
  for (int k = 0; k < static_cast<int>(Kind::kRaggedAllToAll); ++k) {
    for (int64_t count : {1, 1003}) {
      const Call call = MakeCall(static_cast<Kind>(k), process->AllDevices(), count, &random);
      auto custom_call = Make(kSingle, MakeAttributes(call, site++, ""));
      for (int64_t run = first_run; run < first_run + 2; ++run) {
        std::vector<std::unique_ptr<Member>> members;
        for (int gpu = 0; gpu < kGpus; ++gpu) {
          members.push_back(
              std::make_unique<Member>(call, Process::MemberOf(call, process->Device(gpu))));
          EXPECT_EQ(custom_call->Execute(process->On(gpu, run), {members[gpu]->Source()},
                                         members[gpu]->Result()),
                    "");
        }
        process->Synchronize();
        for (const auto& member : members) member->Check();
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

void EveryKind(Process* process) {
  RunEveryKind(process, 1);
  gpu::ServiceCounters counters;
  EXPECT_TRUE(CudaCounters(&counters));
  EXPECT_EQ(counters.relayed, counters.submitted);
  EXPECT_GT(counters.relayed, 0u);
}

// Starts and dones in an order of each device's own, some calls over a process's own GPUs.
void Disorder(Process* process) {
  constexpr int kCalls = 12;
  std::mt19937 random(6);
  std::vector<Call> calls;
  std::vector<std::unique_ptr<CustomCall>> starts, dones;
  for (int i = 0; i < kCalls; ++i) {
    const std::vector<int64_t> devices = i % 4 == 3 ? process->OwnDevices() : process->AllDevices();
    const auto kind = static_cast<Kind>(i % static_cast<int>(Kind::kRaggedAllToAll));
    calls.push_back(MakeCall(kind, devices, 1 + i * 97, &random));
    const Attributes attributes = MakeAttributes(calls[i], i, i % 2 == 0 ? KindName(kind) : "");
    starts.push_back(Make(kStart, attributes));
    dones.push_back(Make(kDone, attributes));
  }
  for (int64_t run = 1; run <= 5; ++run) {
    std::vector<std::unique_ptr<Member>> members[kGpus];
    std::vector<std::thread> threads;
    for (int gpu = 0; gpu < kGpus; ++gpu) {
      for (const Call& call : calls) {
        members[gpu].push_back(
            std::make_unique<Member>(call, Process::MemberOf(call, process->Device(gpu))));
      }
      threads.emplace_back([&, gpu] {
        std::mt19937 own(static_cast<uint32_t>(process->Device(gpu) * 100 + run));
        std::vector<int> order(kCalls);
        for (int i = 0; i < kCalls; ++i) order[i] = i;
        std::shuffle(order.begin(), order.end(), own);
        for (int i : order) {
          Member& member = *members[gpu][i];
          EXPECT_EQ(starts[i]->Execute(process->On(gpu, run), {member.Source()}, member.Ticket()),
                    "");
        }
        std::shuffle(order.begin(), order.end(), own);
        for (int i : order) {
          Member& member = *members[gpu][i];
          EXPECT_EQ(dones[i]->Execute(process->On(gpu, run), {member.Ticket(), member.Source()},
                                      member.Result()),
                    "");
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    process->Synchronize();
    for (const auto& of_gpu : members) {
      for (const auto& member : of_gpu) member->Check();
    }
    if (::testing::Test::HasFailure()) return;
  }
}

// Handles, waited for in a later launch and in an order of each device's own. The host's
// runtime and the service tell together what is in flight.
void Handles(Process* process) {
  constexpr int kCalls = 6;
  std::mt19937 random(9);
  std::vector<Call> calls;
  std::vector<std::unique_ptr<CustomCall>> starts, waits;
  for (int i = 0; i < kCalls; ++i) {
    calls.push_back(MakeCall(static_cast<Kind>(2 * i), process->AllDevices(), 200 + i, &random));
    starts.push_back(Make(kHandleStart, MakeAttributes(calls[i], i, "")));
    waits.push_back(Make(kHandleWait, MakeAttributes(calls[i], kCalls + i, "")));
  }
  std::mt19937 own(static_cast<uint32_t>(process->self()));
  for (int64_t run = 1; run < 10; run += 2) {
    std::vector<std::unique_ptr<Member>> members[kGpus];
    for (int gpu = 0; gpu < kGpus; ++gpu) {
      for (const Call& call : calls) {
        members[gpu].push_back(
            std::make_unique<Member>(call, Process::MemberOf(call, process->Device(gpu))));
      }
      for (int i = 0; i < kCalls; ++i) {
        Member& member = *members[gpu][i];
        EXPECT_EQ(starts[i]->Execute(process->On(gpu, run), {member.Source()}, member.Ticket()),
                  "");
      }
      std::vector<int> order = {0, 1, 2, 3, 4, 5};
      std::shuffle(order.begin(), order.end(), own);
      for (int i : order) {
        Member& member = *members[gpu][i];
        EXPECT_EQ(waits[i]->Execute(process->On(gpu, run + 1), {member.Ticket()}, member.Result()),
                  "");
      }
    }
    process->Synchronize();
    for (const auto& of_gpu : members) {
      for (const auto& member : of_gpu) {
        member->Check();
        EXPECT_EQ(StateOfCudaHandle(member->ticket), HandleState::kGone);
      }
    }
    if (::testing::Test::HasFailure()) return;
  }
  // One that nobody else starts, before and after its operand is there.
  const Call call = MakeCall(Kind::kAllReduce, process->AllDevices(), 20, &random);
  auto start = Make(kHandleStart, MakeAttributes(call, 2 * kCalls, ""));
  Member member(call, Process::MemberOf(call, process->Device(0)));
  Atomic<uint32_t> go;
  const Launch launch = process->On(0, 100);
  // All count this launch, though one of them has more to do in it.
  const Call before = MakeCall(Kind::kBarrier, process->AllDevices(), 5, &random);
  auto single = Make(kSingle, MakeAttributes(before, 3 * kCalls, ""));
  Member others[kGpus] = {{before, Process::MemberOf(before, process->Device(0))},
                          {before, Process::MemberOf(before, process->Device(1))}};
  for (int gpu = 0; gpu < kGpus; ++gpu) {
    EXPECT_EQ(single->Execute(process->On(gpu, 100), {others[gpu].Source()}, others[gpu].Result()),
              "");
  }
  process->Synchronize();
  static_cast<EmulatedStream*>(launch.stream)->Put([&] {
    while (go.LoadAcquire() == 0) std::this_thread::yield();
  });
  if (process->self() == 0) {
    EXPECT_EQ(start->Execute(launch, {member.Source()}, member.Ticket()), "");
    const std::vector<FlightEntry> unready = CudaInFlight();
    EXPECT_EQ(unready.size(), 1u);
    EXPECT_EQ(unready.empty() ? "" : unready[0].state, "waiting for its operand");
    EXPECT_TRUE(Runtime::Get().Report().in_flight.empty());
    go.StoreRelease(1);
    EXPECT_TRUE(Process::Eventually([] { return Runtime::Get().Report().in_flight.size() == 1; }));
    EXPECT_TRUE(CudaInFlight().empty());
    process->Synchronize();
    EXPECT_EQ(StateOfCudaHandle(member.ticket), HandleState::kPending);
    EXPECT_TRUE(CancelCudaHandle(member.ticket));
    EXPECT_TRUE(Process::Eventually(
        [&] { return StateOfCudaHandle(member.ticket) == HandleState::kFinished; }));
    EXPECT_TRUE(DropCudaHandle(member.ticket));
  }
  go.StoreRelease(1);
  RunEveryKind(process, 200);  // and so nobody has left before
}

// Members of different processes disagree: all hear of it from their next calls, and then
// all is well again.
void Disagreement(Process* process) {
  std::mt19937 random(7);
  Call call = MakeCall(Kind::kAllReduce, process->AllDevices(), 60, &random);
  auto single = Make(kSingle, MakeAttributes(call, 3, ""));
  Call mine = call;
  if (process->self() == 1) mine.signature.count = 61;
  std::vector<std::unique_ptr<Member>> members;
  for (int gpu = 0; gpu < kGpus; ++gpu) {
    members.push_back(
        std::make_unique<Member>(mine, Process::MemberOf(mine, process->Device(gpu))));
    std::string error =
        single->Execute(process->On(gpu, 1), {members[gpu]->Source()}, members[gpu]->Result());
    process->Synchronize();  // its part has ended
    // Over one device, so that it meets nobody.
    const Call alone = MakeCall(Kind::kBarrier, {process->Device(gpu)}, 5, &random);
    auto next = Make(kSingle, MakeAttributes(alone, 10 + gpu, ""));
    for (int64_t run = 0; error.empty() && run < 3; ++run) {
      Member part(alone, 0);
      error = next->Execute(process->On(gpu, 2 + run), {part.Source()}, part.Result());
      process->Synchronize();
    }
    EXPECT_NE(error.find("disagree"), std::string::npos) << error;
  }
  RunEveryKind(process, 100);
}

// Process 1 dies while the other waits for it.
void Death(Process* process) {
  std::mt19937 random(8);
  const Call call = MakeCall(Kind::kAllGather, process->AllDevices(), 60, &random);
  auto single = Make(kSingle, MakeAttributes(call, 0, ""));
  Member first[kGpus] = {{call, Process::MemberOf(call, process->Device(0))},
                         {call, Process::MemberOf(call, process->Device(1))}};
  for (int gpu = 0; gpu < kGpus; ++gpu) {
    EXPECT_EQ(single->Execute(process->On(gpu, 1), {first[gpu].Source()}, first[gpu].Result()), "");
  }
  process->Synchronize();
  for (const Member& member : first) member.Check();
  if (process->self() == 1) _exit(0);
  for (int gpu = 0; gpu < kGpus; ++gpu) {
    std::string error;
    Member member(call, Process::MemberOf(call, process->Device(gpu)));
    for (int64_t run = 2; error.empty() && run < 10; ++run) {
      error = single->Execute(process->On(gpu, run), {member.Source()}, member.Result());
      process->Synchronize();  // it does not wait for ever
    }
    EXPECT_NE(error.find("process 1"), std::string::npos) << error;
  }
}

TEST(HandlersAcrossTest, EveryKindOverRings) { RunProcesses(2, true, EveryKind); }
TEST(HandlersAcrossTest, EveryKindOverSockets) { RunProcesses(3, false, EveryKind); }
TEST(HandlersAcrossTest, Disorder) { RunProcesses(2, true, Disorder); }
TEST(HandlersAcrossTest, Handles) { RunProcesses(2, true, Handles); }
TEST(HandlersAcrossTest, Disagreement) { RunProcesses(2, true, Disagreement); }
TEST(HandlersAcrossTest, Death) { RunProcesses(2, true, Death, /*ends_badly=*/1); }

}  // namespace
}  // namespace dfccl
