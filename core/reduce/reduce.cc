// SPDX-License-Identifier: Apache-2.0
// Chooses the kernels, and folds narrow types block by block through f32.
#include "core/reduce/reduce.h"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>

#include "core/reduce/float_mode.h"
#include "core/reduce/kernels.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace dfccl {
namespace {

// Elements of a block, and sources decoded (or destinations written) at a time:
// 18 KiB, which stays in L1.
constexpr int kBlock = 512;
constexpr int kGroup = 8;

bool IsNarrow(DType dtype) { return AccumulationType(dtype) != dtype; }

// A mean is a sum until its last fold.
ReduceOp FoldOp(const ReduceArgs& args) {
  return args.op == ReduceOp::kMean && args.mean_divisor == 0 ? ReduceOp::kSum : args.op;
}

const char* At(const ReduceSource& source, int64_t element, int64_t size) {
  return static_cast<const char*>(source.data) + element * size;
}
char* At(const ReduceDestination& destination, int64_t element, int64_t size) {
  return static_cast<char*>(destination.data) + element * size;
}

// One block of a narrow type: elements [begin, begin + count).
class NarrowFold {
 public:
  NarrowFold(const Kernels& kernels, const ReduceArgs& args)
      : kernels_(kernels),
        args_(args),
        size_(DTypeSize(args.dtype)),
        fold_(kernels.fold(FoldOp(args), DType::kF32)),
        sum_(kernels.fold(args.op == ReduceOp::kMean ? ReduceOp::kSum : args.op, DType::kF32)),
        decode_(kernels.decode(args.dtype)),
        encode_(kernels.encode(args.dtype)) {}

  void Run(int64_t begin, int count) {
    FoldBlock(begin, count);
    WriteBlock(begin, count);
  }

 private:
  // Folds the sources into value_, kGroup at a time.
  void FoldBlock(int64_t begin, int count) {
    ReduceSource group[1 + kGroup];
    const ReduceDestination value = {value_, true};
    for (int s = 0; s < args_.source_count;) {
      int n = 0;
      if (s > 0) group[n++] = {value_, true};
      const int end = std::min(args_.source_count, s + kGroup);
      for (int slot = 0; s < end; ++s, ++slot) {
        const ReduceSource& source = args_.sources[s];
        if (source.accumulated) {
          group[n++] = {At(source, begin, sizeof(float)), true};
        } else {
          decode_(At(source, begin, size_), decoded_[slot], count);
          group[n++] = {decoded_[slot], true};
        }
      }
      FoldArgs fold{group, n, &value, 1, count * int64_t{sizeof(float)}, args_.mean_divisor, false};
      (s == args_.source_count ? fold_ : sum_)(fold);
    }
  }

  void WriteBlock(int64_t begin, int count) {
    alignas(64) char codes[kBlock * 2];
    bool encoded = false;
    for (int d = 0; d < args_.destination_count; ++d) encoded |= !args_.destinations[d].accumulated;
    if (encoded) {
      encode_(value_, codes, count);
      CopyTo(false, codes, size_, begin, count);
    }
    CopyTo(true, reinterpret_cast<const char*>(value_), sizeof(float), begin, count);
  }

  // Writes a block to the destinations of one kind, some at a time.
  void CopyTo(bool accumulated, const char* block, int64_t size, int64_t begin, int count) {
    const ReduceSource source = {block, accumulated};
    ReduceDestination group[kGroup];
    int n = 0;
    for (int d = 0; d < args_.destination_count; ++d) {
      const ReduceDestination& destination = args_.destinations[d];
      if (destination.accumulated == accumulated) {
        group[n++] = {At(destination, begin, size), accumulated};
      }
      if (n == kGroup || (n > 0 && d + 1 == args_.destination_count)) {
        kernels_.copy({&source, 1, group, n, count * size, 0, args_.streaming_stores});
        n = 0;
      }
    }
  }

  const Kernels& kernels_;
  const ReduceArgs& args_;
  const int64_t size_;
  const FoldFunction fold_;
  const FoldFunction sum_;  // folds before the last one
  const DecodeFunction decode_;
  const EncodeFunction encode_;
  alignas(64) float value_[kBlock];
  alignas(64) float decoded_[kGroup][kBlock];
};

// One source that needs no arithmetic. (Bools become 0 or 1, so they do.)
bool IsCopy(const ReduceArgs& args) {
  if (args.dtype == DType::kBool || args.source_count != 1 ||
      (args.op == ReduceOp::kMean && args.mean_divisor != 0)) {
    return false;
  }
  if (!IsNarrow(args.dtype)) return true;
  for (int d = 0; d < args.destination_count; ++d) {
    if (args.destinations[d].accumulated != args.sources[0].accumulated) return false;
  }
  return true;
}

}  // namespace

DType AccumulationType(DType dtype) {
  switch (dtype) {
    case DType::kF16:
    case DType::kBF16:
    case DType::kF8E3M4:
    case DType::kF8E4M3:
    case DType::kF8E4M3FN:
    case DType::kF8E4M3FNUZ:
    case DType::kF8E4M3B11FNUZ:
    case DType::kF8E5M2:
    case DType::kF8E5M2FNUZ:
    case DType::kF8E8M0FNU:
      return DType::kF32;
    default:
      return dtype;
  }
}

DType PlainType(int64_t size) {
  switch (size) {
    case 1:
      return DType::kU8;
    case 2:
      return DType::kU16;
    case 4:
      return DType::kU32;
    case 8:
      return DType::kU64;
    default:
      return DType::kC128;
  }
}

bool IsSupported(ReduceOp op, DType dtype) {
  return kBaselineKernels.fold(op, AccumulationType(dtype)) != nullptr;
}

int SupportedKernels(const Kernels* (&sets)[kMaxKernelSets]) {
  int count = 0;
  sets[count++] = &kBaselineKernels;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) {
    sets[count++] = &kAvx2Kernels;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      sets[count++] = &kAvx512Kernels;
    }
  }
#endif
  return count;
}

const Kernels& BestKernels() {
  static const Kernels* const best = [] {
    const Kernels* sets[kMaxKernelSets];
    return sets[SupportedKernels(sets) - 1];
  }();
  return *best;
}

void FenceStreamingStores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

void ReduceWith(const Kernels& kernels, const ReduceArgs& args) {
  assert(IsSupported(args.op, args.dtype));
  assert(args.source_count >= 1 && args.destination_count >= 1);
  if (args.count <= 0) return;
  const bool copy = IsCopy(args);
  const bool accumulated = copy && args.sources[0].accumulated;
  const int64_t size = DTypeSize(accumulated ? AccumulationType(args.dtype) : args.dtype);
  if (copy && !args.streaming_stores) {
    // Large ones don't fetch the lines that they write over, as loops of stores do.
    const void* from = args.sources[0].data;
    for (int d = 0; d < args.destination_count; ++d) {
      void* to = args.destinations[d].data;
      if (to != from) std::memcpy(to, from, static_cast<size_t>(args.count * size));
    }
    return;
  }
  if (copy || !IsNarrow(args.dtype)) {
    const DefaultFloatMode mode;
    (copy ? kernels.copy : kernels.fold(FoldOp(args), args.dtype))(
        {args.sources, args.source_count, args.destinations, args.destination_count,
         args.count * size, args.mean_divisor, args.streaming_stores});
  } else {
    const DefaultFloatMode mode;
    NarrowFold fold(kernels, args);
    for (int64_t begin = 0; begin < args.count; begin += kBlock) {
      fold.Run(begin, static_cast<int>(std::min<int64_t>(kBlock, args.count - begin)));
    }
  }
  if (args.streaming_stores) FenceStreamingStores();
}

void Reduce(const ReduceArgs& args) { ReduceWith(BestKernels(), args); }

}  // namespace dfccl
