// SPDX-License-Identifier: Apache-2.0
// Circular waits between processes: found where no process can go on, and only there.
#include "core/daemon/stuck.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace dfccl {
namespace {

StuckProcess Process(int process, std::vector<DeviceWait> waits, bool serial = true) {
  return {process, 1, 1, serial, std::move(waits)};
}

DeviceWait Wait(int64_t device, std::vector<int64_t> awaits, std::string call, uint64_t id = 1) {
  return {device, std::move(awaits), std::move(call), {0, id}};
}

using Devices = std::vector<std::vector<int64_t>>;

Devices DevicesOf(const std::vector<StuckProcess>& processes) {
  Devices all;
  for (const StuckCycle& cycle : FindStuckCycles(processes)) {
    std::vector<int64_t>& devices = all.emplace_back();
    for (const StuckCycle::Link& link : cycle.links) devices.push_back(link.wait->device);
  }
  return all;
}

TEST(StuckTest, TwoProcessesInACircle) {
  const std::vector<StuckProcess> processes = {Process(0, {Wait(0, {8}, "a at x.py:1")}),
                                               Process(1, {Wait(8, {0}, "b at y.py:2")})};
  EXPECT_EQ(DevicesOf(processes), (Devices{{0, 8}}));
  EXPECT_EQ(Describe(FindStuckCycles(processes).front())
                .find("processes wait for each other: device 0 of process 0 waits in a "
                      "at x.py:1 for device 8 of process 1, which waits in b at y.py:2 "
                      "for device 0 of process 0."),
            0u);
}

TEST(StuckTest, AWayThatLeadsIntoACircleIsNotPartOfIt) {
  const std::vector<StuckProcess> processes = {
      Process(0, {Wait(0, {16}, "a")}), Process(1, {Wait(8, {16}, "b")}),
      Process(2, {Wait(16, {24}, "c")}), Process(3, {Wait(24, {8}, "d")})};
  EXPECT_EQ(DevicesOf(processes), (Devices{{8, 16, 24}}));
}

TEST(StuckTest, WhoWaitsForADeviceThatWaitsForNobodyIsNotStuck) {
  EXPECT_TRUE(FindStuckCycles({Process(0, {Wait(0, {8}, "a")}), Process(1, {})}).empty());
  EXPECT_TRUE(FindStuckCycles({Process(0, {Wait(0, {8}, "a")}), Process(1, {Wait(8, {16}, "b")}),
                               Process(2, {})})
                  .empty());
}

TEST(StuckTest, SeenOnceThoseAwaitedHaveSaidSoThemselves) {
  std::vector<StuckProcess> processes = {Process(0, {Wait(0, {8}, "a"), Wait(1, {0}, "c")}),
                                         Process(1, {Wait(8, {1}, "b")})};
  processes[0].activity = 3;
  processes[1].activity = 4;
  const auto heard = [&](int process, uint64_t words) {
    const std::vector<StuckCycle> cycles = FindStuckCycles(processes);
    EXPECT_EQ(cycles.size(), 1u);
    return cycles.front().HeardDirectly(process, words);
  };
  EXPECT_FALSE(heard(0, 100));  // only from others
  processes[1].direct_word = 7;
  processes[1].direct_activity = 3;  // of then
  EXPECT_FALSE(heard(0, 100));
  processes[1].direct_activity = 4;
  EXPECT_FALSE(heard(0, 6));  // after the waits were looked up
  EXPECT_TRUE(heard(0, 7));
  EXPECT_FALSE(heard(1, 7));  // which waits for process 0
  processes[0].direct_activity = 3;
  EXPECT_TRUE(heard(1, 7));
}

TEST(StuckTest, AProcessWithSeveralThreadsMayStillCome) {
  EXPECT_TRUE(FindStuckCycles({Process(0, {Wait(0, {8}, "a")}),
                               Process(1, {Wait(8, {0}, "b")}, /*serial=*/false)})
                  .empty());
}

// One of two waits of a device is in a circle: the other is no way out.
TEST(StuckTest, DevicesWithSeveralWaits) {
  const std::vector<StuckProcess> processes = {Process(0, {Wait(0, {24}, "a"), Wait(0, {8}, "b")}),
                                               Process(1, {Wait(8, {16, 0}, "c")})};
  EXPECT_EQ(DevicesOf(processes), (Devices{{0, 8}}));
}

TEST(StuckTest, CyclesThatHaveNothingInCommonAreAllFound) {
  const std::vector<StuckProcess> processes = {
      Process(0, {Wait(0, {24}, "a")}), Process(1, {Wait(8, {16}, "b")}),
      Process(2, {Wait(16, {8}, "c")}), Process(3, {Wait(24, {0, 8}, "d")})};
  EXPECT_EQ(DevicesOf(processes), (Devices{{0, 24}, {8, 16}}));
}

// What processes say of a cycle is equal if they see the same, from wherever they look,
// and only then.
TEST(StuckTest, TheHashIsThatOfTheWaits) {
  const auto hash = [](uint64_t activity, uint64_t id, bool with_tail) {
    std::vector<StuckProcess> processes = {Process(1, {Wait(8, {16}, "a")}),
                                           Process(2, {Wait(16, {8}, "b", id)})};
    processes[1].activity = activity;
    // It waits for the cycle, so the search begins with it.
    if (with_tail) processes.push_back(Process(0, {Wait(0, {16}, "c")}));
    const std::vector<StuckCycle> cycles = FindStuckCycles(processes);
    EXPECT_EQ(cycles.size(), 1u);
    EXPECT_EQ(cycles.front().FirstProcess(), 1);
    EXPECT_TRUE(cycles.front().Has(2));
    EXPECT_FALSE(cycles.front().Has(0));
    return cycles.front().Hash();
  };
  EXPECT_EQ(hash(1, 1, false), hash(1, 1, true));
  EXPECT_NE(hash(1, 1, false), hash(2, 1, false));
  EXPECT_NE(hash(1, 1, false), hash(1, 2, false));
}

}  // namespace
}  // namespace dfccl
