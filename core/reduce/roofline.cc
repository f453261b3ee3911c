// SPDX-License-Identifier: Apache-2.0
// Times the plain loops of kernels.h.
#include "core/reduce/roofline.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "core/protocol/atomics.h"
#include "core/reduce/float_mode.h"
#include "core/reduce/kernels.h"

namespace dfccl {
namespace {

constexpr int64_t kPage = 4096;
// Threads share lines of results only if there are less lines than threads.
constexpr int64_t kLine = 64 / sizeof(float);

struct alignas(kCacheLine) Turn {
  Atomic<int> value;
};

// Spins, and lets others run now and then in case there are more threads than cores.
void WaitFor(const Turn& turn, int value) {
  // Acquire: pairs with the StoreRelease of whoever passes the turn on.
  for (int spins = 1; turn.value.LoadAcquire() != value; ++spins) {
    SpinPause();
    if (spins % 4096 == 0) std::this_thread::yield();
  }
}

}  // namespace

void Roofline::Free::operator()(float* buffer) const { std::free(buffer); }

Roofline::Roofline(int members, int64_t bytes, int threads)
    : count_(std::max<int64_t>(1, bytes / static_cast<int64_t>(sizeof(float)))), threads_(threads) {
  const int64_t rounded =
      (count_ * static_cast<int64_t>(sizeof(float)) + kPage - 1) / kPage * kPage;
  for (int b = 0; b < 2 * members; ++b) {
    auto* memory = static_cast<float*>(std::aligned_alloc(kPage, rounded));
    if (memory == nullptr) throw std::bad_alloc();
    buffers_.emplace_back(memory);
    std::fill(memory, memory + count_, 1.0f);
    if (b < members) {
      from_.push_back(memory);
    } else {
      to_.push_back(memory);
    }
  }
}

int64_t Roofline::ShareStart(int thread) const {
  const int64_t lines = (count_ + kLine - 1) / kLine;
  return std::min(count_, (lines * thread + threads_ - 1) / threads_ * kLine);
}

double Roofline::Seconds(int repetitions, bool streaming) {
  using Clock = std::chrono::steady_clock;
  const int members = static_cast<int>(from_.size());
  const PlainLoopFunction loop = BestKernels().plain_loop;
  const auto run_share = [&](int thread) {
    const int64_t begin = ShareStart(thread), end = ShareStart(thread + 1);
    if (begin == end) return;
    loop(from_.data(), to_.data(), members, begin, end, streaming);
    if (streaming) FenceStreamingStores();
  };

  // Round r starts when `start` is r, and thread t has ended it when done[t] is r.
  Turn start;
  const auto done = std::make_unique<Turn[]>(threads_);
  std::vector<std::thread> helpers;
  for (int t = 1; t < threads_; ++t) {
    helpers.emplace_back([&, t] {
      const DefaultFloatMode mode;
      for (int round = 1; round <= repetitions + 1; ++round) {
        WaitFor(start, round);
        run_share(t);
        done[t].value.StoreRelease(round);  // pairs with the LoadAcquire in WaitFor
      }
    });
  }
  const DefaultFloatMode mode;
  std::vector<double> seconds;
  for (int round = 1; round <= repetitions + 1; ++round) {
    const auto begin = Clock::now();
    start.value.StoreRelease(round);  // pairs with the LoadAcquire in WaitFor
    run_share(0);
    for (int t = 1; t < threads_; ++t) {
      if (ShareStart(t) != ShareStart(t + 1)) WaitFor(done[t], round);
    }
    if (round > 1) seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    // Helpers without a share must not miss their turn either.
    for (int t = 1; t < threads_; ++t) WaitFor(done[t], round);
  }
  for (std::thread& helper : helpers) helper.join();
  std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
  return seconds[seconds.size() / 2];
}

}  // namespace dfccl
