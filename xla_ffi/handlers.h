// SPDX-License-Identifier: Apache-2.0
// The handlers that bindings.cc registers with XLA.
#ifndef DFCCL_XLA_FFI_HANDLERS_H_
#define DFCCL_XLA_FFI_HANDLERS_H_

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace dfccl {

struct TargetHandlers {
  const char* name;
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* execute;
};

// dfccl_collective        (source[, ragged][, key]) -> result
// dfccl_collective_start  (source[, ragged][, key]) -> ticket u64[1]
// dfccl_collective_done   (ticket, source, more tickets...) -> result
// ragged, for ragged_all_to_all: what the result holds before, and the four index
// arrays in the order of RaggedPart (core/runtime.h)
constexpr int kCpuTargetCount = 3;
const TargetHandlers* CpuTargets();

// Operations that were started and whose done has not come.
int64_t OpenTicketCount();

}  // namespace dfccl

#endif  // DFCCL_XLA_FFI_HANDLERS_H_
