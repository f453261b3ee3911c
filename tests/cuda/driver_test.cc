// SPDX-License-Identifier: Apache-2.0
// GPUs by the driver's functions, over a stand-in for its library (DFCCL_DRIVER_STAND_IN):
// what is asked of the driver, and that collectives come out right. And what is said where
// there is no driver, no such GPU, no kernel.
#include "cuda/driver.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>

#include "tests/cuda/ranks.h"

namespace dfccl {
namespace gpu {
namespace {

constexpr char kImage[] = "a kernel";

std::unique_ptr<Gpu> OpenStandIn(int ordinal) {
  Status status;
  std::unique_ptr<Gpu> gpu = OpenGpu({DFCCL_DRIVER_STAND_IN, kImage}, ordinal, &status);
  EXPECT_TRUE(status.ok()) << status.message();
  return gpu;
}

TEST(DriverTest, EveryKind) {
  std::mt19937 random(1);
  Ranks ranks(4, SmallOptions(), {1, 1, OpenStandIn});
  RunAll(&ranks, {1, 2, 4}, {0, 7, 3001}, &random);
}

TEST(DriverTest, EveryKindOverTwoGpus) {
  std::mt19937 random(2);
  Ranks ranks(4, SmallOptions(), {1, 2, OpenStandIn});
  RunAll(&ranks, {4}, {5, 3001}, &random);
}

TEST(DriverTest, Disorder) { RunInDisorder({1, 2, OpenStandIn}, 4, 40); }

TEST(DriverTest, SaysWhatIsMissing) {
  Status status;
  EXPECT_EQ(OpenGpu({"libno-such-driver.so.7", kImage}, 0, &status), nullptr);
  EXPECT_NE(status.message().find("libno-such-driver.so.7"), std::string::npos) << status.message();
  EXPECT_EQ(OpenGpu({"libc.so.6", kImage}, 0, &status), nullptr);
  EXPECT_NE(status.message().find("has no cuInit"), std::string::npos) << status.message();
  EXPECT_EQ(OpenGpu({DFCCL_DRIVER_STAND_IN, kImage}, 9, &status), nullptr);
  EXPECT_NE(status.message().find("no GPU 9"), std::string::npos) << status.message();
  if (!HasKernelImage()) {
    EXPECT_EQ(OpenGpu({DFCCL_DRIVER_STAND_IN, nullptr}, 0, &status), nullptr);
    EXPECT_NE(status.message().find("built without its kernel"), std::string::npos)
        << status.message();
  }
}

TEST(DriverTest, SaysWhichFunctionFailed) {
  auto gpu = OpenStandIn(0);
  ASSERT_NE(gpu, nullptr);
  Atomic<uint64_t> unknown;
  EmulatedStream stream;
  const Status status = gpu->Write(&stream, &unknown, 1);
  EXPECT_NE(status.message().find("cuStreamWriteValue64 on GPU 0: CUDA_ERROR_INVALID_VALUE"),
            std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace gpu
}  // namespace dfccl
