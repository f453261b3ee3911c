// SPDX-License-Identifier: Apache-2.0
// What the interpreter needs to know to run, leave and resume one member's part
// of a collective. The static context is loaded and never saved; the dynamic
// context is the whole state of a preempted task.
#ifndef DFCCL_CORE_PROTOCOL_CONTEXT_H_
#define DFCCL_CORE_PROTOCOL_CONTEXT_H_

#include <stdint.h>

#include "core/protocol/step.h"

namespace dfccl {

struct StaticContext {
  StepList list;
  int64_t align;           // chunk boundaries are multiples of this many elements
  int64_t slice_elements;  // a data step leaves room for others after this many
};

struct DynamicContext {
  uint32_t step;    // index into the step list
  uint32_t slice;   // slices of that step already done
  uint32_t budget;  // polls a wait may use before the task is preempted
};

}  // namespace dfccl

#endif  // DFCCL_CORE_PROTOCOL_CONTEXT_H_
