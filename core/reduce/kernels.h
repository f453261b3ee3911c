// SPDX-License-Identifier: Apache-2.0
// Inner loops of the folds, compiled once per instruction set from kernels_inl.h
// and chosen at run time. All sets give the same bits.
#ifndef DFCCL_CORE_REDUCE_KERNELS_H_
#define DFCCL_CORE_REDUCE_KERNELS_H_

#include <cstdint>

#include "core/collective.h"
#include "core/reduce/reduce.h"

namespace dfccl {

// Sources and destinations hold the same element type, `bytes` of it each;
// their `accumulated` is not looked at.
struct FoldArgs {
  const ReduceSource* sources;
  int source_count;
  const ReduceDestination* destinations;
  int destination_count;
  int64_t bytes;
  int64_t mean_divisor;  // read by mean kernels only
  bool streaming;        // non-temporal stores where alignment allows; no fence
};
using FoldFunction = void (*)(const FoldArgs& args);

// Codes of a narrow type to f32 and back. Both work on whole groups of
// kNarrowGroup elements: `values` is read or written up to the next multiple;
// codes are never read or written beyond `count`.
constexpr int kNarrowGroup = 16;
using DecodeFunction = void (*)(const void* codes, float* values, int count);
using EncodeFunction = void (*)(const float* values, void* codes, int count);

// The loop of the roofline (roofline.h): the f32 sums of all `from` at elements
// [begin, end) are written to all `to`.
using PlainLoopFunction = void (*)(const float* const* from, float* const* to, int members,
                                   int64_t begin, int64_t end, bool streaming);

struct Kernels {
  const char* name;
  // Fold of a type that accumulates in itself; kMean means "sum, then divide".
  // Null if not supported.
  FoldFunction (*fold)(ReduceOp op, DType dtype);
  FoldFunction copy;
  DecodeFunction (*decode)(DType dtype);
  EncodeFunction (*encode)(DType dtype);
  PlainLoopFunction plain_loop;
};

constexpr int kMaxKernelSets = 3;
// Sets this CPU can run, slowest first; the number of them is returned.
int SupportedKernels(const Kernels* (&sets)[kMaxKernelSets]);

// The last of them.
const Kernels& BestKernels();

// Orders streaming stores before later release stores.
void FenceStreamingStores();

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

// Reduce() with a chosen set.
void ReduceWith(const Kernels& kernels, const ReduceArgs& args);

}  // namespace dfccl

#endif  // DFCCL_CORE_REDUCE_KERNELS_H_
