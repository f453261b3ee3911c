// SPDX-License-Identifier: Apache-2.0
// Circular waits between processes: found where no process can go on, and only there.
#include "core/daemon/stuck.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace dfccl {
namespace {

StuckProcess Process(int process, std::vector<DeviceWait> waits, bool serial = true) {
  return {process, 1, 1, serial, std::move(waits)};
}

std::vector<int64_t> Devices(const StuckCycle& cycle) {
  std::vector<int64_t> devices;
  for (const StuckCycle::Link& link : cycle.links) devices.push_back(link.wait->device);
  return devices;
}

TEST(StuckTest, TwoProcessesInACircle) {
  const std::vector<StuckProcess> processes = {Process(0, {{0, {8}, "a at x.py:1"}}),
                                               Process(1, {{8, {0}, "b at y.py:2"}})};
  const StuckCycle cycle = FindStuckCycle(processes);
  EXPECT_EQ(Devices(cycle), (std::vector<int64_t>{0, 8}));
  EXPECT_EQ(Describe(cycle).find("processes wait for each other: device 0 of process 0 waits in a "
                                 "at x.py:1 for device 8 of process 1, which waits in b at y.py:2 "
                                 "for device 0 of process 0."),
            0u);
}

TEST(StuckTest, AWayThatLeadsIntoACircleIsNotPartOfIt) {
  const std::vector<StuckProcess> processes = {
      Process(0, {{0, {16}, "a"}}), Process(1, {{8, {16}, "b"}}), Process(2, {{16, {24}, "c"}}),
      Process(3, {{24, {8}, "d"}})};
  EXPECT_EQ(Devices(FindStuckCycle(processes)), (std::vector<int64_t>{16, 24, 8}));
}

TEST(StuckTest, WhoWaitsForADeviceThatWaitsForNobodyIsNotStuck) {
  EXPECT_TRUE(FindStuckCycle({Process(0, {{0, {8}, "a"}}), Process(1, {})}).links.empty());
  EXPECT_TRUE(
      FindStuckCycle({Process(0, {{0, {8}, "a"}}), Process(1, {{8, {16}, "b"}}), Process(2, {})})
          .links.empty());
}

TEST(StuckTest, AProcessWithSeveralThreadsMayStillCome) {
  EXPECT_TRUE(
      FindStuckCycle({Process(0, {{0, {8}, "a"}}), Process(1, {{8, {0}, "b"}}, /*serial=*/false)})
          .links.empty());
}

// One of two waits of a device is in a circle: the other is no way out.
TEST(StuckTest, DevicesWithSeveralWaits) {
  const std::vector<StuckProcess> processes = {Process(0, {{0, {24}, "a"}, {0, {8}, "b"}}),
                                               Process(1, {{8, {16, 0}, "c"}})};
  EXPECT_EQ(Devices(FindStuckCycle(processes)), (std::vector<int64_t>{0, 8}));
}

}  // namespace
}  // namespace dfccl
