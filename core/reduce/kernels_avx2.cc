// SPDX-License-Identifier: Apache-2.0
// Kernels for x86-64 CPUs with AVX2.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "core/reduce/kernels.h"  // before the instruction set is turned on

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

namespace dfccl {
namespace {

constexpr int kVectorBytes = 32;

typedef int64_t StreamedVector __attribute__((vector_size(32)));

inline __attribute__((always_inline)) void StoreStreaming(void* to, StreamedVector value) {
  _mm256_stream_si256(static_cast<__m256i*>(to), (__m256i)value);
}

}  // namespace
}  // namespace dfccl

#define DFCCL_KERNELS kAvx2Kernels
#define DFCCL_KERNELS_NAME "avx2"
#include "core/reduce/kernels_inl.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__
