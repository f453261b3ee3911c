// SPDX-License-Identifier: Apache-2.0
// Who has come, who has left, and what a failure changes.
#include "core/protocol/roll.h"

#include <gtest/gtest.h>

namespace dfccl {
namespace {

TEST(RollTest, TheLastToLeaveIsToldSo) {
  Roll roll;
  for (int use = 0; use < 2; ++use) {
    EXPECT_TRUE(roll.Arrive());
    EXPECT_EQ(roll.Leave(3), Roll::Left::kOthersRemain);  // before the others have come
    EXPECT_TRUE(roll.Arrive());
    EXPECT_TRUE(roll.Arrive());
    EXPECT_EQ(roll.Leave(3), Roll::Left::kOthersRemain);
    EXPECT_EQ(roll.Leave(3), Roll::Left::kLast);
    roll.Reset();
  }
}

TEST(RollTest, AFailureIsQuietOnceAllWhoCameHaveLeft) {
  Roll roll;
  EXPECT_TRUE(roll.Arrive());
  EXPECT_TRUE(roll.Arrive());
  EXPECT_FALSE(roll.Failed());
  roll.Fail();
  EXPECT_TRUE(roll.Failed());
  EXPECT_EQ(roll.Leave(3), Roll::Left::kFailed);
  EXPECT_FALSE(roll.Quiet());
  EXPECT_FALSE(roll.Arrive());  // late: it must not touch anything
  EXPECT_EQ(roll.Leave(3), Roll::Left::kFailed);
  EXPECT_FALSE(roll.Quiet());
  EXPECT_EQ(roll.Leave(3), Roll::Left::kFailed);
  EXPECT_TRUE(roll.Quiet());
}

}  // namespace
}  // namespace dfccl
