// SPDX-License-Identifier: Apache-2.0
// Element-wise folds on host memory: the data step of the CPU daemon.
#ifndef DFCCL_CORE_REDUCE_REDUCE_H_
#define DFCCL_CORE_REDUCE_REDUCE_H_

#include <cstdint>

#include "core/collective.h"

namespace dfccl {

// f16, bf16 and fp8 accumulate in f32; every other type in itself.
DType AccumulationType(DType dtype);

// The type that stands for elements of `size` bytes where they are only moved.
DType PlainType(int64_t size);

// False for what has no meaning (kMin of complex, kXor of f32, kMean of ints...).
bool IsSupported(ReduceOp op, DType dtype);

struct ReduceSource {
  const void* data;
  bool accumulated;  // elements are of AccumulationType(dtype)
};
struct ReduceDestination {
  void* data;
  bool accumulated;
};

struct ReduceArgs {
  ReduceOp op;
  DType dtype;
  const ReduceSource* sources;
  int source_count;  // >= 1
  const ReduceDestination* destinations;
  int destination_count;  // >= 1
  int64_t count;          // elements
  int64_t mean_divisor;   // kMean: members of the group; 0: not the last fold
  bool streaming_stores;  // non-temporal stores: the result won't be read soon
};

// Folds the sources left to right in the accumulation type, rounds once, and
// writes every destination. A destination may be the same memory as a source
// (exactly, never partly overlapping). After streaming stores it fences, so
// that a later release store publishes them. Deterministic: bits depend only on
// the arguments, not on alignment, on the CPU's vector width or on the range
// split into several calls.
void Reduce(const ReduceArgs& args);

}  // namespace dfccl

#endif  // DFCCL_CORE_REDUCE_REDUCE_H_
