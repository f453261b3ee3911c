// SPDX-License-Identifier: Apache-2.0
// Operations between processes: children that are connected by socket pairs and
// shared memory submit in random orders, and check the values they get.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/runtime.h"
#include "tests/core/daemon/wires.h"

namespace dfccl {
namespace {

using testing::AddLinks;
using testing::CloseAll;
using testing::Connect;
using testing::Wires;

constexpr auto kLimit = std::chrono::seconds(100);

struct Job {
  int processes;
  int devices_each;
  int hosts = 1;  // several: processes know of them
  int members() const { return processes * devices_each; }
};

// Joins process `self` to the others.
void Join(const Job& job, int self, const Wires& wires) {
  RuntimeOptions options;
  options.timeout_ns = 60'000'000'000;
  Runtime::Configure(options);
  std::unordered_map<int64_t, int> process_of;
  for (int device = 0; device < job.members(); ++device) {
    process_of[device] = device / job.devices_each;
  }
  std::vector<int> host_of;
  for (int process = 0; process < job.processes && job.hosts > 1; ++process) {
    host_of.push_back(process * job.hosts / job.processes);
  }
  if (!Runtime::Get().JoinCluster(self, process_of, host_of, /*peer_timeout_ns=*/0).ok()) _exit(10);
  AddLinks(self, wires);
}

// One member's part of one instance, with what it must get.
struct Call {
  Submission submission;
  std::vector<int32_t> source;
  std::vector<int32_t> result;
  std::vector<int32_t> right;
  Operation* operation = nullptr;
};

int32_t ValueAt(int instance, int member, int64_t element) {
  return static_cast<int32_t>(instance * 1'000'003 + member * 7919 + element * 31 % 1009);
}

// What member `r` of `n` must get of elements [0, count) of each block.
std::vector<int32_t> RightFor(Kind kind, int instance, int n, int r, int64_t count, int root) {
  std::vector<int32_t> right(count * ResultBlocks(kind, n));
  const auto value = [&](int member, int block, int64_t i) {
    return ValueAt(instance, member, block * count + i);
  };
  for (int64_t i = 0; i < count; ++i) {
    uint32_t sum = 0;  // wraps
    switch (kind) {
      case Kind::kAllReduce:
        for (int p = 0; p < n; ++p) sum += static_cast<uint32_t>(value(p, 0, i));
        right[i] = static_cast<int32_t>(sum);
        break;
      case Kind::kReduceScatter:
        for (int p = 0; p < n; ++p) sum += static_cast<uint32_t>(value(p, r, i));
        right[i] = static_cast<int32_t>(sum);
        break;
      case Kind::kScan:
        for (int p = 0; p <= r; ++p) sum += static_cast<uint32_t>(value(p, 0, i));
        right[i] = static_cast<int32_t>(sum);
        break;
      case Kind::kAllGather:
        for (int p = 0; p < n; ++p) right[p * count + i] = value(p, 0, i);
        break;
      case Kind::kAllToAll:
        for (int p = 0; p < n; ++p) right[p * count + i] = value(p, r, i);
        break;
      case Kind::kBroadcast:
        right[i] = value(root, 0, i);
        break;
      default:
        right[i] = value(r, 0, i);  // kBarrier
    }
  }
  return right;
}

constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kReduceScatter, Kind::kScan,   Kind::kAllGather,
                           Kind::kAllToAll,  Kind::kBroadcast,     Kind::kBarrier};

// Everything that `device` takes part in, the same instances in every process.
std::vector<std::unique_ptr<Call>> CallsOf(int64_t device, const Job& job, int instances) {
  std::mt19937 random(7);
  std::vector<std::unique_ptr<Call>> calls;
  for (int instance = 0; instance < instances; ++instance) {
    std::vector<int64_t> members(job.members());
    for (int i = 0; i < job.members(); ++i) members[i] = i;
    std::shuffle(members.begin(), members.end(), random);
    members.resize(2 + random() % (job.members() - 1));
    Kind kind = kKinds[random() % std::size(kKinds)];
    int64_t count = random() % 8 == 0 ? 20'000 + random() % 9000 : random() % 600;
    if (job.hosts > 1 && instance % 4 == 0) {  // goes from host to host
      members.resize(job.members());
      for (int i = 0; i < job.members(); ++i) members[i] = i;
      kind = Kind::kAllReduce;
      count = 20'000 + random() % 40'000;
    }
    const int n = static_cast<int>(members.size());
    const int root = static_cast<int>(random() % n);
    const auto found = std::find(members.begin(), members.end(), device);
    if (found == members.end()) continue;
    auto call = std::make_unique<Call>();
    const int member = static_cast<int>(found - members.begin());
    call->source.resize(count * SourceBlocks(kind, n));
    for (size_t i = 0; i < call->source.size(); ++i) {
      call->source[i] = ValueAt(instance, member, static_cast<int64_t>(i));
    }
    call->result.resize(count * ResultBlocks(kind, n));
    call->right = RightFor(kind, instance, n, member, count, root);
    Submission& submission = call->submission;
    submission.device = device;
    submission.group = Runtime::Get().InternGroup(members);
    submission.member = member;
    submission.id = {static_cast<uint64_t>(instance) * 0x9e3779b97f4a7c15u + 1,
                     static_cast<uint64_t>(instance)};
    submission.signature.kind = kind;
    submission.signature.dtype = DType::kS32;
    submission.signature.count = count;
    submission.signature.root = kind == Kind::kBroadcast ? root : 0;
    submission.source = call->source.data();
    submission.result = call->result.data();
    calls.push_back(std::move(call));
  }
  return calls;
}

// In a child: 0 if all values are right.
int RunProcess(const Job& job, int self, int instances, const Wires& wires) {
  Join(job, self, wires);
  std::vector<std::thread> threads;
  std::vector<int> wrong(job.devices_each);
  for (int i = 0; i < job.devices_each; ++i) {
    threads.emplace_back([&, i] {
      const int64_t device = self * job.devices_each + i;
      const auto calls = CallsOf(device, job, instances);
      std::vector<Call*> order;
      for (const auto& call : calls) order.push_back(call.get());
      std::mt19937 random(static_cast<uint32_t>(100 + device));
      std::shuffle(order.begin(), order.end(), random);
      Runtime& runtime = Runtime::Get();
      for (Call* call : order) call->operation = runtime.Submit(call->submission);
      const auto limit = std::chrono::steady_clock::now() + kLimit;
      for (Call* call : order) {
        Status status;
        while (!runtime.Finished(call->operation, &status)) {
          if (std::chrono::steady_clock::now() > limit) _exit(12);
          std::this_thread::yield();
        }
        if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
        if (!status.ok() || call->result != call->right) ++wrong[i];
        runtime.Release(call->operation);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int count : wrong) {
    if (count > 0) return 1;
  }
  return 0;
}

class AcrossTest : public ::testing::TestWithParam<std::pair<Job, bool>> {};

TEST_P(AcrossTest, RandomOrders) {
  const auto [job, shared_memory] = GetParam();
  const Wires wires = Connect(job.processes, shared_memory);
  std::vector<pid_t> children;
  for (int self = 0; self < job.processes; ++self) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const int status = RunProcess(job, self, /*instances=*/300, wires);
      Runtime::Shutdown();  // what it has sent counts, also for those who come later
      _exit(status);
    }
    children.push_back(child);
  }
  CloseAll(wires);
  for (int self = 0; self < job.processes; ++self) {
    int status;
    ASSERT_EQ(waitpid(children[self], &status, 0), children[self]);
    EXPECT_TRUE(WIFEXITED(status)) << "process " << self << ", signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0) << "process " << self;
  }
}

std::string LayoutName(const ::testing::TestParamInfo<std::pair<Job, bool>>& info) {
  const Job& job = info.param.first;
  return std::to_string(job.processes) + "x" + std::to_string(job.devices_each) +
         (job.hosts > 1 ? "_on" + std::to_string(job.hosts) : "") +
         (info.param.second ? "_rings" : "_sockets");
}

INSTANTIATE_TEST_SUITE_P(Layouts, AcrossTest,
                         ::testing::Values(std::pair(Job{2, 1}, true), std::pair(Job{2, 1}, false),
                                           std::pair(Job{2, 2}, true), std::pair(Job{3, 2}, false),
                                           std::pair(Job{4, 2}, true),
                                           std::pair(Job{4, 1, 2}, false),
                                           std::pair(Job{4, 2, 2}, true),
                                           std::pair(Job{6, 1, 3}, false)),
                         LayoutName);

}  // namespace
}  // namespace dfccl
