// SPDX-License-Identifier: Apache-2.0
// What the stress tests share: a seed that is printed, so that a failure can be
// run again (DFCCL_SEED), and random pauses that vary the interleaving.
#ifndef DFCCL_TESTS_CORE_PROTOCOL_STRESS_H_
#define DFCCL_TESTS_CORE_PROTOCOL_STRESS_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

namespace dfccl {

inline uint32_t StressSeed() {
  const char* given = std::getenv("DFCCL_SEED");
  const uint32_t seed = given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10))
                                         : std::random_device{}();
  std::printf("DFCCL_SEED=%u\n", seed);
  return seed;
}

class RandomPause {
 public:
  explicit RandomPause(uint32_t seed) : random_(seed) {}
  void operator()() {
    if (random_() % 16 == 0) std::this_thread::yield();
  }

 private:
  std::minstd_rand random_;
};

}  // namespace dfccl

#endif  // DFCCL_TESTS_CORE_PROTOCOL_STRESS_H_
