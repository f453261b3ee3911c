// SPDX-License-Identifier: Apache-2.0
// The least time an all_reduce in memory can take on this machine: a plain loop
// that reads every member's buffer once and writes every member's result once.
// What benchmarks measure the runtime against.
#ifndef DFCCL_CORE_REDUCE_ROOFLINE_H_
#define DFCCL_CORE_REDUCE_ROOFLINE_H_

#include <cstdint>
#include <memory>
#include <vector>

namespace dfccl {

// Owns `members` sources and `members` results of `bytes` each (f32, touched),
// and runs the loop on `threads` threads, each on its share of the range. The
// better of the two loops counts: non-temporal stores win for large messages,
// normal ones for those that fit the caches.
class Roofline {
 public:
  Roofline(int members, int64_t bytes, int threads);
  Roofline(const Roofline&) = delete;
  Roofline& operator=(const Roofline&) = delete;

  // Medians of `repetitions` runs, after one that isn't counted. Threads are
  // started before and wait spinning, so only the loop is timed.
  // With non-temporal stores: what counts for messages larger than the caches.
  double StreamingSeconds(int repetitions) { return Seconds(repetitions, true); }
  // With normal stores: results, and the next run's sources, stay in the caches.
  double CachedSeconds(int repetitions) { return Seconds(repetitions, false); }

 private:
  struct Free {
    void operator()(float* buffer) const;
  };
  using Buffer = std::unique_ptr<float[], Free>;

  double Seconds(int repetitions, bool streaming);
  int64_t ShareStart(int thread) const;

  const int64_t count_;
  const int threads_;
  std::vector<Buffer> buffers_;
  std::vector<const float*> from_;
  std::vector<float*> to_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_REDUCE_ROOFLINE_H_
