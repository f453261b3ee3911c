// SPDX-License-Identifier: Apache-2.0
// What planners build plans with.
#ifndef DFCCL_CORE_PLANS_PROGRAM_H_
#define DFCCL_CORE_PLANS_PROGRAM_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/plans/plan.h"
#include "core/protocol/step.h"

namespace dfccl {

// Ranges of a plan's refs and of its chunks.
struct RefRange {
  uint32_t begin;
  uint32_t end;
};
struct ChunkRange {
  uint32_t begin;
  uint32_t end;
};

inline BufferRef Source(int member, int block = 0) {
  return {BufferKind::kSource, static_cast<uint16_t>(block), static_cast<uint16_t>(member)};
}
inline BufferRef Result(int member, int block = 0) {
  return {BufferKind::kResult, static_cast<uint16_t>(block), static_cast<uint16_t>(member)};
}
inline BufferRef Scratch(int member, int slot) {
  return {BufferKind::kScratch, static_cast<uint16_t>(slot), static_cast<uint16_t>(member)};
}

inline RefRange AddRefs(Plan* plan, const std::vector<BufferRef>& refs) {
  const auto begin = static_cast<uint32_t>(plan->refs.size());
  plan->refs.insert(plan->refs.end(), refs.begin(), refs.end());
  return {begin, static_cast<uint32_t>(plan->refs.size())};
}

// Appends steps to one member's program.
class Program {
 public:
  Program(Plan* plan, int member) : plan_(plan), steps_(&plan->member[member].steps) {}

  void Wait(int member, uint32_t value) {
    Step step{};
    step.kind = StepKind::kWait;
    step.member = static_cast<uint16_t>(member);
    step.value = value;
    steps_->push_back(step);
  }

  // Signals the next value of the member's word.
  void Signal() {
    Step step{};
    step.kind = StepKind::kSignal;
    step.value = ++word_;
    steps_->push_back(step);
  }

  // Of one buffer's chunks, to where `destination` is in process `process`. There
  // the member's word becomes `value`, unless that is 0.
  void Send(int process, BufferRef source, BufferRef destination, ChunkRange chunks, uint32_t value,
            bool last) {
    Step step = SendStep(process, value, last);
    step.chunk_begin = chunks.begin;
    step.chunk_end = chunks.end;
    const RefRange from = AddRefs(plan_, {source});
    const RefRange to = AddRefs(plan_, {destination});
    step.source_begin = from.begin;
    step.source_end = from.end;
    step.destination_begin = to.begin;
    step.destination_end = to.end;
    steps_->push_back(step);
    ++sends_;
  }
  // Without data.
  void Tell(int process, uint32_t value, bool last) {
    steps_->push_back(SendStep(process, value, last));
  }
  void WaitForSends() {
    if (sends_ > 0) Wait(kOwnSends, sends_);
  }

  void Check() {
    Step step{};
    step.kind = StepKind::kCheck;
    steps_->push_back(step);
  }

  void Reduce(RefRange sources, RefRange destinations, ChunkRange chunks, bool finalize) {
    Step step{};
    step.kind = StepKind::kReduce;
    step.finalize = finalize;
    step.chunk_begin = chunks.begin;
    step.chunk_end = chunks.end;
    step.source_begin = sources.begin;
    step.source_end = sources.end;
    step.destination_begin = destinations.begin;
    step.destination_end = destinations.end;
    steps_->push_back(step);
  }

  // Of all chunks.
  void Copy(BufferRef source, const std::vector<BufferRef>& destinations) {
    const RefRange sources = AddRefs(plan_, {source});
    Reduce(sources, AddRefs(plan_, destinations), {0, plan_->chunk_count}, /*finalize=*/false);
  }
  void FillWithZeros(const std::vector<BufferRef>& destinations) {
    Reduce({0, 0}, AddRefs(plan_, destinations), {0, plan_->chunk_count}, /*finalize=*/false);
  }

 private:
  Step SendStep(int process, uint32_t value, bool last) {
    if (static_cast<size_t>(process) >= told_.size()) told_.resize(process + 1);
    Step step{};
    step.kind = StepKind::kSend;
    step.first = !told_[process];
    told_[process] = true;
    step.finalize = last;
    step.member = static_cast<uint16_t>(process);
    step.value = value;
    return step;
  }

  Plan* plan_;
  std::vector<Step>* steps_;
  uint32_t word_ = kArrived;
  uint32_t sends_ = 0;
  std::vector<bool> told_;  // processes
};

}  // namespace dfccl

#endif  // DFCCL_CORE_PLANS_PROGRAM_H_
