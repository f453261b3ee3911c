// SPDX-License-Identifier: Apache-2.0
// Kernels for every CPU of the architecture the build targets.
#include <cstdint>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace dfccl {
namespace {

constexpr int kVectorBytes = 16;

typedef int64_t StreamedVector __attribute__((vector_size(16)));

inline void StoreStreaming(void* to, StreamedVector value) {
#if defined(__x86_64__)
  _mm_stream_si128(static_cast<__m128i*>(to), (__m128i)value);
#else
  __builtin_memcpy(to, &value, sizeof(value));
#endif
}

}  // namespace
}  // namespace dfccl

#define DFCCL_KERNELS kBaselineKernels
#define DFCCL_KERNELS_NAME "baseline"
#include "core/reduce/kernels_inl.h"
