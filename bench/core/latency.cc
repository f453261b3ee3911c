// SPDX-License-Identifier: Apache-2.0
// Latency of an 8-member all_reduce without XLA: one thread plays all members
// of a chain of dependent operations, driven by callbacks as XLA's thunks are.
// Usage: latency [members]
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
        runtime.OnFinish(operation_, &Member::OnFinish, this)) {
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

double Measure(int members, int64_t count, int64_t steps, uint64_t run) {
  Chain chain(members, count, steps, run);
  const auto begin = std::chrono::steady_clock::now();
  chain.Run();
  chain.Wait();
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
  return took.count() / static_cast<double>(steps);
}

}  // namespace

int main(int argc, char** argv) {
  const int members = argc > 1 ? std::atoi(argv[1]) : 8;
  uint64_t run = 0;
  std::printf("%d members\n%12s %14s %14s\n", members, "bytes", "ns (min)", "ns (median)");
  for (int64_t bytes : {int64_t{4}, int64_t{1} << 10, int64_t{4} << 10, int64_t{16} << 10,
                        int64_t{64} << 10, int64_t{256} << 10, int64_t{1} << 20,
                        int64_t{4} << 20, int64_t{16} << 20}) {
    const int64_t steps = std::max<int64_t>(10, std::min<int64_t>(20000, (int64_t{64} << 20) / bytes));
    std::vector<double> times;
    for (int i = 0; i < 9; ++i) times.push_back(Measure(members, bytes / 4, steps, ++run));
    std::sort(times.begin(), times.end());
    std::printf("%12lld %14.0f %14.0f\n", static_cast<long long>(bytes), times.front(),
                times[times.size() / 2]);
  }
  Runtime::Shutdown();
  return 0;
}
