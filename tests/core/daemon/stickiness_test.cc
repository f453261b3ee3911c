// SPDX-License-Identifier: Apache-2.0
// The policy of two-phase blocking: position, success, failure, and its bounds.
#include "core/protocol/stickiness.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace dfccl {
namespace {

TEST(StickinessTest, TheFrontOfTheQueueIsMostPatient) {
  Stickiness stickiness;
  stickiness.Resize(8, 8);
  uint32_t before = stickiness.Budget(0);
  EXPECT_GT(before, 0u);
  for (uint32_t position = 1; position < 5; ++position) {
    const uint32_t budget = stickiness.Budget(position);
    EXPECT_TRUE(budget < before || budget == 0) << position;
    before = budget;
  }
  EXPECT_EQ(stickiness.Budget(1000), 0u);
}

TEST(StickinessTest, SuccessRaisesAndFailureLowers) {
  Stickiness stickiness;
  stickiness.Resize(8, 8);
  const uint32_t start = stickiness.patience();
  stickiness.Succeeded(start);
  EXPECT_GT(stickiness.patience(), start);
  const uint32_t raised = stickiness.patience();
  stickiness.Failed();
  EXPECT_LT(stickiness.patience(), raised);
  for (int i = 0; i < 100; ++i) stickiness.Failed();
  EXPECT_EQ(stickiness.patience(), 0u);
}

TEST(StickinessTest, ItIsBoundedForAnyHistory) {
  Stickiness stickiness;
  stickiness.Resize(1, 1);
  for (uint32_t polls : {1u, 1000u, 0x7fffffffu, 0xffffffffu}) {
    for (int i = 0; i < 100; ++i) stickiness.Succeeded(polls);
    EXPECT_GT(stickiness.patience(), 0u);
    EXPECT_LE(stickiness.Budget(0), 64u);
  }
}

// With more daemons than threads the awaited member mostly isn't running.
TEST(StickinessTest, ManyDaemonsOnFewThreadsDoNotPoll) {
  Stickiness stickiness;
  stickiness.Resize(2, 256);
  stickiness.Succeeded(1000);
  EXPECT_LE(stickiness.patience(), 1u);
  uint32_t polls = 0;
  stickiness.Failed();
  for (int i = 0; i < 1000; ++i) polls += stickiness.Budget(0);
  EXPECT_LE(polls, 1000u / 16);
}

// After a long drought it notices when polling pays again.
TEST(StickinessTest, ProbesWhenPatienceIsGone) {
  Stickiness stickiness;
  stickiness.Resize(2, 2);
  for (int i = 0; i < 100; ++i) stickiness.Failed();
  uint32_t budget = 0;
  for (int i = 0; i < 100 && budget == 0; ++i) budget = stickiness.Budget(0);
  ASSERT_GT(budget, 0u);
  stickiness.Succeeded(budget);
  EXPECT_GT(stickiness.patience(), budget);
}

}  // namespace
}  // namespace dfccl
