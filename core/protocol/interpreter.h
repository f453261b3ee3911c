// SPDX-License-Identifier: Apache-2.0
// The interpreter of step lists: one state machine for every kind of daemon.
// It waits only at kWait steps, leaves only there and between the slices of a
// kReduce step, and keeps all its state in the dynamic context.
#ifndef DFCCL_CORE_PROTOCOL_INTERPRETER_H_
#define DFCCL_CORE_PROTOCOL_INTERPRETER_H_

#include <stdint.h>

#include "core/protocol/atomics.h"
#include "core/protocol/context.h"
#include "core/protocol/step.h"

namespace dfccl {

enum class Outcome : uint8_t {
  kDone,     // the last step has run
  kBlocked,  // the wait at `step` spent its budget
  kYielded,  // Machine::ShouldYield said so, between two slices
  kFailed,   // the collective has failed
};

// Runs `fixed.list` from `*dynamic` on. Machine is what one member can do:
//   bool Failed();                            the collective has failed
//   bool Reached(uint16_t member, uint32_t value);   acquire
//   void Signal(uint32_t value);              release
//   int64_t Count(const Step&);               elements of a block of a kReduce step
//   bool Reduce(const Step&, int64_t begin, int64_t end);  false: has failed
//   bool Check();                             false: has failed
//   void Send(const Step&);                   hands data over, never waits
//   bool ShouldYield();                       more important work is waiting
//   void Polled(uint32_t polls);              a wait that polled was passed
// `*progressed` is set when the dynamic context changed.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable  // what a machine can do may be for one side only
#endif
template <typename Machine>
DFCCL_HOST_DEVICE Outcome Interpret(const StaticContext& fixed, DynamicContext* dynamic,
                                    bool* progressed, Machine& machine) {
  const StepList& list = fixed.list;
  while (dynamic->step < list.step_count) {
    if (machine.Failed()) return Outcome::kFailed;
    const Step& step = list.steps[dynamic->step];
    switch (step.kind) {
      case StepKind::kSignal:
        machine.Signal(step.value);
        break;

      case StepKind::kWait: {
        uint32_t polls = 0;
        while (!machine.Reached(step.member, step.value)) {
          if (polls == dynamic->budget) return Outcome::kBlocked;
          ++polls;
          SpinPause();
        }
        if (polls > 0) machine.Polled(polls);
        break;
      }

      case StepKind::kReduce: {
        const int64_t count = machine.Count(step);
        const int64_t first = ChunkStart(count, step.chunk_begin, list.chunk_count, fixed.align);
        const int64_t last = ChunkStart(count, step.chunk_end, list.chunk_count, fixed.align);
        int64_t begin = first + dynamic->slice * fixed.slice_elements;
        while (begin < last) {
          int64_t end = begin + fixed.slice_elements;
          if (end > last) end = last;
          if (!machine.Reduce(step, begin, end)) return Outcome::kFailed;
          begin = end;
          ++dynamic->slice;
          *progressed = true;
          if (begin < last && machine.ShouldYield()) return Outcome::kYielded;
        }
        dynamic->slice = 0;
        break;
      }

      case StepKind::kCheck:
        if (!machine.Check()) return Outcome::kFailed;
        break;

      case StepKind::kSend:
        machine.Send(step);
        break;
    }
    ++dynamic->step;
    *progressed = true;
  }
  return Outcome::kDone;
}

}  // namespace dfccl

#endif  // DFCCL_CORE_PROTOCOL_INTERPRETER_H_
