// SPDX-License-Identifier: Apache-2.0
// Latency of an 8-member all_reduce without XLA: one thread plays all members
// of a chain of dependent operations, driven by callbacks as XLA's thunks are.
// The last column is processor time of the whole process, which is steadier on
// a busy machine.
// Usage: latency_benchmark [members [bytes]]
#include <time.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "core/runtime.h"

namespace {

using dfccl::Operation;
using dfccl::Runtime;

class Chain;

// A member's program: submit, and on each result submit the next.
class Member {
 public:
  void Initialize(Chain* chain, int index, int64_t count);
  void Go();

 private:
  void End();
  static void OnFinish(void* self) {
    Member* member = static_cast<Member*>(self);
    member->End();
    member->Go();
  }

  Chain* chain_ = nullptr;
  int index_ = 0;
  int64_t count_ = 0;
  int64_t step_ = 0;
  Operation* operation_ = nullptr;
  std::vector<float> source_;
  std::vector<float> result_;
};

class Chain {
 public:
  Chain(int members, int64_t count, int64_t steps, uint64_t run) : steps(steps), run(run) {
    std::vector<int64_t> devices(members);
    for (int i = 0; i < members; ++i) devices[i] = i;
    group = Runtime::Get().InternGroup(devices);
    members_.resize(members);
    for (int i = 0; i < members; ++i) members_[i].Initialize(this, i, count);
  }
  void Run() {
    for (Member& member : members_) member.Go();
  }
  void End() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++ended_;
    condition_.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    condition_.wait(lock, [this] { return ended_ == static_cast<int>(members_.size()); });
  }

  const dfccl::Group* group;
  const int64_t steps;
  const uint64_t run;

 private:
  std::vector<Member> members_;
  std::mutex mutex_;
  std::condition_variable condition_;
  int ended_ = 0;
};

void Member::Initialize(Chain* chain, int index, int64_t count) {
  chain_ = chain;
  index_ = index;
  count_ = count;
  source_.assign(count, static_cast<float>(index));
  result_.assign(count, 0.f);
}

void Member::Go() {
  Runtime& runtime = Runtime::Get();
  while (step_ < chain_->steps) {
    dfccl::Submission submission;
    submission.device = index_;
    submission.group = chain_->group;
    submission.member = index_;
    submission.id = {chain_->run, static_cast<uint64_t>(step_) * 0x9e3779b97f4a7c15u};
    submission.signature.count = count_;
    submission.source = source_.data();
    submission.result = result_.data();
    operation_ = runtime.Submit(submission);
    ++step_;
    dfccl::Status status;
    if (!runtime.Finished(operation_, &status) &&
        runtime.OnFinish(operation_, &Member::OnFinish, this, /*blocks=*/true)) {
      return;
    }
    End();
  }
  chain_->End();
}

void Member::End() {
  Runtime& runtime = Runtime::Get();
  dfccl::Status status;
  if (!runtime.Finished(operation_, &status) || !status.ok()) {
    std::fprintf(stderr, "failed: %s\n", status.message().c_str());
    std::exit(1);
  }
  runtime.Release(operation_);
}

struct Times {
  double wall_ns;
  double cpu_ns;
};

double CpuNs() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return 1e9 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec);
}

Times Measure(int members, int64_t count, int64_t steps, uint64_t run) {
  Chain chain(members, count, steps, run);
  const auto begin = std::chrono::steady_clock::now();
  const double begin_cpu_ns = CpuNs();
  chain.Run();
  chain.Wait();
  const std::chrono::duration<double, std::nano> wall = std::chrono::steady_clock::now() - begin;
  return {wall.count() / static_cast<double>(steps),
          (CpuNs() - begin_cpu_ns) / static_cast<double>(steps)};
}

}  // namespace

int main(int argc, char** argv) {
  const int members = argc > 1 ? std::atoi(argv[1]) : 8;
  std::vector<int64_t> sizes;
  if (argc > 2) {
    sizes.push_back(std::atoll(argv[2]));
  } else {
    for (int shift : {2, 10, 12, 14, 16, 18, 20, 22, 24}) sizes.push_back(int64_t{1} << shift);
  }
  uint64_t run = 0;
  std::printf("%d members, ns per all_reduce\n%12s %12s %12s %12s\n", members, "bytes", "min",
              "median", "min CPU");
  for (int64_t bytes : sizes) {
    const int64_t steps =
        std::max<int64_t>(10, std::min<int64_t>(20'000, (int64_t{64} << 20) / bytes));
    std::vector<double> wall, cpu;
    for (int i = 0; i < 9; ++i) {
      const Times times = Measure(members, bytes / 4, steps, ++run);
      wall.push_back(times.wall_ns);
      cpu.push_back(times.cpu_ns);
    }
    std::sort(wall.begin(), wall.end());
    std::sort(cpu.begin(), cpu.end());
    std::printf("%12lld %12.0f %12.0f %12.0f\n", static_cast<long long>(bytes), wall.front(),
                wall[wall.size() / 2], cpu.front());
  }
  Runtime::Shutdown();
  return 0;
}
