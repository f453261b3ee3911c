// SPDX-License-Identifier: Apache-2.0
// The roofline's loop moves what it claims to move, for every kernel set.
#include "core/reduce/roofline.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "core/reduce/kernels.h"

namespace dfccl {
namespace {

TEST(RooflineTest, PlainLoopWritesEverySumOnce) {
  constexpr int kMembers = 3;
  constexpr int64_t kCount = 777, kBegin = 32, kEnd = 771;
  const Kernels* sets[kMaxKernelSets];
  const int set_count = SupportedKernels(sets);
  for (int s = 0; s < set_count; ++s) {
    for (bool streaming : {false, true}) {
      struct alignas(64) Buffer {
        float values[kCount];
      };
      std::vector<Buffer> sources(kMembers), results(kMembers);
      const float* from[kMembers];
      float* to[kMembers];
      for (int m = 0; m < kMembers; ++m) {
        for (int64_t i = 0; i < kCount; ++i) {
          sources[m].values[i] = static_cast<float>(i * (m + 1));
          results[m].values[i] = -1;
        }
        from[m] = sources[m].values;
        to[m] = results[m].values;
      }
      sets[s]->plain_loop(from, to, kMembers, kBegin, kEnd, streaming);
      FenceStreamingStores();
      for (int m = 0; m < kMembers; ++m) {
        for (int64_t i = 0; i < kCount; ++i) {
          const bool inside = i >= kBegin && i < kEnd;
          ASSERT_EQ(results[m].values[i], inside ? static_cast<float>(6 * i) : -1.0f)
              << sets[s]->name << " member " << m << " element " << i;
        }
      }
    }
  }
}

TEST(RooflineTest, AnySizeAndNumberOfThreads) {
  for (int64_t bytes : {int64_t{1}, int64_t{4}, int64_t{100}, int64_t{4096}, int64_t{100000}}) {
    for (int threads : {1, 2, 3}) {
      Roofline roofline(4, bytes, threads);
      EXPECT_GT(roofline.StreamingSeconds(3), 0) << bytes << " bytes, " << threads << " threads";
      EXPECT_GT(roofline.CachedSeconds(3), 0) << bytes << " bytes, " << threads << " threads";
    }
  }
}

}  // namespace
}  // namespace dfccl
