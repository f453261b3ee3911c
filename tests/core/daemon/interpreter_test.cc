// SPDX-License-Identifier: Apache-2.0
// The interpreter on a machine that only takes notes.
#include "core/protocol/interpreter.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace dfccl {
namespace {

struct Notes {
  bool Failed() const { return failed; }
  bool Reached(uint16_t, uint32_t value) {
    ++looks;
    return value <= reached;
  }
  void Signal(uint32_t value) { text += "signal " + std::to_string(value) + "; "; }
  int64_t Count(const Step&) const { return 25; }
  void Send(const Step& step) { text += "send to " + std::to_string(step.member) + "; "; }
  bool Check() {
    text += "check; ";
    return !failed;
  }
  bool Reduce(const Step&, int64_t begin, int64_t end) {
    if (failed) return false;
    text += "[" + std::to_string(begin) + ", " + std::to_string(end) + "); ";
    return true;
  }
  bool ShouldYield() const { return yield; }
  void Polled(uint32_t polls) { polled = polls; }

  bool failed = false;
  bool yield = false;
  uint32_t reached = 0;
  uint32_t looks = 0;
  uint32_t polled = 0;
  std::string text;
};

Step Wait(uint32_t value) {
  Step step{};
  step.kind = StepKind::kWait;
  step.value = value;
  return step;
}
Step Signal(uint32_t value) {
  Step step{};
  step.kind = StepKind::kSignal;
  step.value = value;
  return step;
}
Step Reduce(uint32_t begin, uint32_t end) {
  Step step{};
  step.kind = StepKind::kReduce;
  step.chunk_begin = begin;
  step.chunk_end = end;
  return step;
}

class InterpreterTest : public ::testing::Test {
 protected:
  Outcome Run(const std::vector<Step>& steps) {
    const StaticContext fixed = {
        {steps.data(), nullptr, static_cast<uint32_t>(steps.size()), 2, 0}, 1, 5};
    progressed = false;
    return Interpret(fixed, &dynamic, &progressed, notes);
  }
  Notes notes;
  DynamicContext dynamic = {};
  bool progressed = false;
};

TEST_F(InterpreterTest, WaitsOnlyAtWaitsAndResumesThere) {
  const std::vector<Step> steps = {Signal(2), Wait(1), Reduce(0, 1), Signal(3)};
  EXPECT_EQ(Run(steps), Outcome::kBlocked);
  EXPECT_TRUE(progressed);
  EXPECT_EQ(dynamic.step, 1u);
  EXPECT_EQ(Run(steps), Outcome::kBlocked);
  EXPECT_FALSE(progressed);
  EXPECT_EQ(notes.text, "signal 2; ");
  notes.reached = 1;
  EXPECT_EQ(Run(steps), Outcome::kDone);
  EXPECT_EQ(notes.text, "signal 2; [0, 5); [5, 10); [10, 12); signal 3; ");
}

TEST_F(InterpreterTest, PollsAsOftenAsItMay) {
  dynamic.budget = 7;
  EXPECT_EQ(Run({Wait(1)}), Outcome::kBlocked);
  EXPECT_EQ(notes.looks, 8u);
  EXPECT_EQ(notes.polled, 0u);
}

TEST_F(InterpreterTest, YieldsBetweenSlicesAndResumesAtTheNext) {
  const std::vector<Step> steps = {Reduce(1, 2), Signal(2)};
  notes.yield = true;
  EXPECT_EQ(Run(steps), Outcome::kYielded);
  EXPECT_EQ(notes.text, "[12, 17); ");
  EXPECT_EQ(Run(steps), Outcome::kYielded);
  EXPECT_EQ(notes.text, "[12, 17); [17, 22); ");
  EXPECT_EQ(Run(steps), Outcome::kDone);
  EXPECT_EQ(notes.text, "[12, 17); [17, 22); [22, 25); signal 2; ");
}

TEST_F(InterpreterTest, EndsWhenTheCollectiveHasFailed) {
  notes.failed = true;
  EXPECT_EQ(Run({Signal(2)}), Outcome::kFailed);
  EXPECT_EQ(Run({Reduce(0, 2)}), Outcome::kFailed);
  EXPECT_EQ(notes.text, "");
}

}  // namespace
}  // namespace dfccl
