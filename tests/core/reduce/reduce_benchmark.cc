// SPDX-License-Identifier: Apache-2.0
// Reduce() against the memory roofline: f32 sums of 8 members' buffers, written
// to 8 results, by one thread and by two that each do half.
//
//   reduce_benchmark [seconds per row]
//
// Prints the 25th percentile of each side and their ratio; both run in turns in
// the same program, because times alone mean little on a shared machine.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "core/protocol/atomics.h"
#include "core/reduce/kernels.h"
#include "core/reduce/reduce.h"
#include "core/reduce/roofline.h"

namespace dfccl {
namespace {

constexpr int kMembers = 8;
using Clock = std::chrono::steady_clock;

double Since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double LowQuartile(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 4];
}

class Folds {
 public:
  Folds(int64_t count, DType dtype) : count_(count), dtype_(dtype) {
    const int64_t bytes = (count * DTypeSize(dtype) + 4095) / 4096 * 4096;
    for (int b = 0; b < 2 * kMembers; ++b) {
      auto* memory = static_cast<char*>(std::aligned_alloc(4096, bytes));
      std::fill(memory, memory + bytes, 0);
      memory_.emplace_back(memory, std::free);
      if (b < kMembers) {
        sources_.push_back({memory, false});
      } else {
        destinations_.push_back({memory, false});
      }
    }
  }

  void Run(int64_t begin, int64_t end, bool streaming) const {
    ReduceSource sources[kMembers];
    ReduceDestination destinations[kMembers];
    const int64_t offset = begin * DTypeSize(dtype_);
    for (int m = 0; m < kMembers; ++m) {
      sources[m] = {static_cast<const char*>(sources_[m].data) + offset, false};
      destinations[m] = {static_cast<char*>(destinations_[m].data) + offset, false};
    }
    Reduce({ReduceOp::kSum, dtype_, sources, kMembers, destinations, kMembers, end - begin, 0,
            streaming});
  }

  // Median of `repetitions` runs by one or two threads, after one not counted.
  double Seconds(int threads, bool streaming, int repetitions) const {
    const int64_t half = threads == 1 ? count_ : (count_ / 2 + 15) / 16 * 16;
    const bool helped = threads == 2 && half < count_;
    Atomic<int> start, done;
    std::thread helper;
    if (helped) {
      helper = std::thread([&] {
        for (int round = 1; round <= repetitions + 1; ++round) {
          while (start.LoadAcquire() != round) SpinPause();  // pairs with start.StoreRelease
          Run(half, count_, streaming);
          done.StoreRelease(round);  // pairs with done.LoadAcquire
        }
      });
    }
    std::vector<double> seconds;
    for (int round = 1; round <= repetitions + 1; ++round) {
      const auto begin = Clock::now();
      start.StoreRelease(round);  // pairs with start.LoadAcquire
      Run(0, std::min(half, count_), streaming);
      while (helped && done.LoadAcquire() != round) SpinPause();  // pairs with done.StoreRelease
      if (round > 1) seconds.push_back(Since(begin));
    }
    if (helped) helper.join();
    std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
    return seconds[seconds.size() / 2];
  }

 private:
  const int64_t count_;
  const DType dtype_;
  std::vector<std::unique_ptr<char, decltype(&std::free)>> memory_;
  std::vector<ReduceSource> sources_;
  std::vector<ReduceDestination> destinations_;
};

void Row(int64_t bytes, int threads, double budget) {
  Folds folds(bytes / 4, DType::kF32);
  Roofline roofline(kMembers, bytes, threads);
  const int repetitions = bytes <= (1 << 16) ? 101 : (bytes <= (1 << 20) ? 21 : 3);
  std::vector<double> cached, streaming, roof_cached, roof_streaming;
  const auto begin = Clock::now();
  do {
    cached.push_back(folds.Seconds(threads, false, repetitions));
    roof_cached.push_back(roofline.CachedSeconds(repetitions));
    streaming.push_back(folds.Seconds(threads, true, repetitions));
    roof_streaming.push_back(roofline.StreamingSeconds(repetitions));
  } while (Since(begin) < budget || cached.size() < 5);
  const double c = LowQuartile(cached), s = LowQuartile(streaming);
  const double rc = LowQuartile(roof_cached), rs = LowQuartile(roof_streaming);
  std::printf("%9lld %2d | %10.2f %10.2f %5.0f%% | %10.2f %10.2f %5.0f%% | %5.0f%%\n",
              static_cast<long long>(bytes), threads, c * 1e6, rc * 1e6, rc / c * 100, s * 1e6,
              rs * 1e6, rs / s * 100, std::min(rc, rs) / std::min(c, s) * 100);
  std::fflush(stdout);
}

// One thread, all types: elements per nanosecond, in cache.
void Types() {
  constexpr int64_t kCount = 1 << 14;
  std::printf("\n%-16s %12s %14s %12s\n", "type", "1 elem, ns", "16384, us", "elem/ns");
  for (int d = 0; d <= static_cast<int>(DType::kF8E8M0FNU); ++d) {
    const auto dtype = static_cast<DType>(d);
    if (!IsSupported(ReduceOp::kSum, dtype)) continue;
    Folds folds(kCount, dtype);
    std::vector<double> ones, alls;
    for (int round = 0; round < 41; ++round) {
      auto begin = Clock::now();
      for (int i = 0; i < 100; ++i) folds.Run(i, i + 1, false);
      ones.push_back(Since(begin) / 100);
      begin = Clock::now();
      folds.Run(0, kCount, false);
      alls.push_back(Since(begin));
    }
    const double all = LowQuartile(alls);
    std::printf("%-16s %12.1f %14.2f %12.2f\n", DTypeName(dtype), LowQuartile(ones) * 1e9,
                all * 1e6, kCount / all * 1e-9);
  }
}

}  // namespace
}  // namespace dfccl

int main(int argc, char** argv) {
  const double budget = argc > 1 ? std::atof(argv[1]) : 0.3;
  std::printf("kernels: %s; 8 members, f32 sum, us\n", dfccl::BestKernels().name);
  std::printf("%9s %2s | %10s %10s %6s | %10s %10s %6s | %6s\n", "bytes", "t", "cached", "roof",
              "part", "streaming", "roof", "part", "best");
  for (int threads : {1, 2}) {
    for (int64_t bytes = 4; bytes <= 64 << 20; bytes *= 4) dfccl::Row(bytes, threads, budget);
  }
  dfccl::Types();
  return 0;
}
