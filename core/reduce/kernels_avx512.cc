// SPDX-License-Identifier: Apache-2.0
// Kernels for x86-64 CPUs with AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "core/reduce/kernels.h"  // before the instruction set is turned on

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

namespace dfccl {
namespace {

constexpr int kVectorBytes = 64;

typedef int64_t StreamedVector __attribute__((vector_size(64)));

inline __attribute__((always_inline)) void StoreStreaming(void* to, StreamedVector value) {
  _mm512_stream_si512(static_cast<__m512i*>(to), (__m512i)value);
}

}  // namespace
}  // namespace dfccl

#define DFCCL_KERNELS kAvx512Kernels
#define DFCCL_KERNELS_NAME "avx512"
#include "core/reduce/kernels_inl.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__
