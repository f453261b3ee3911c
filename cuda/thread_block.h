// SPDX-License-Identifier: Apache-2.0
// A block of the daemon as a block of threads of a GPU.
#ifndef DFCCL_CUDA_THREAD_BLOCK_H_
#define DFCCL_CUDA_THREAD_BLOCK_H_

#include <stdint.h>

#include "cuda/fold.h"
#include "cuda/layout.h"

namespace dfccl {
namespace gpu {

class ThreadBlock {
 public:
  __device__ uint32_t thread() const { return threadIdx.x; }
  __device__ uint32_t threads() const { return blockDim.x; }
  __device__ bool leader() const { return threadIdx.x == 0; }
  __device__ void Sync() { __syncthreads(); }
  __device__ bool Any(bool mine) { return __syncthreads_or(mine ? 1 : 0) != 0; }
  __device__ void Pause() { __nanosleep(200); }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr bool kCopiesInBulk = true;
#else
  static constexpr bool kCopiesInBulk = false;
#endif

  // A load into shared memory says by a barrier that it has come. A store has left its piece
  // when its group has been waited for. Both are of the asynchronous proxy, which sees what
  // others have written before only after a fence; waiting brings back what it has written.
  __device__ __noinline__ void CopyInBulk(Bulk* bulk, const char* from, const uint64_t* to,
                                          uint32_t count, int64_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const auto shared = [](const void* address) {
      return static_cast<uint32_t>(__cvta_generic_to_shared(address));
    };
    const auto size = [bytes](int64_t piece) {
      const int64_t left = bytes - piece * kBulkPieceBytes;
      return static_cast<uint32_t>(left < kBulkPieceBytes ? left : kBulkPieceBytes);
    };
    const auto load = [&](int64_t piece) {
      const uint32_t arrived = shared(&bulk->arrived[piece % kBulkPieces]);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived),
                   "r"(size(piece))
                   : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(shared(bulk->pieces[piece % kBulkPieces])),
          "l"(__cvta_generic_to_global(from + piece * kBulkPieceBytes)), "r"(size(piece)),
          "r"(arrived)
          : "memory");
    };
    for (uint64_t& arrived : bulk->arrived) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&arrived)) : "memory");
    }
    asm volatile("fence.proxy.async;" ::: "memory");
    const int64_t pieces = (bytes + kBulkPieceBytes - 1) / kBulkPieceBytes;
    for (int64_t piece = 0; piece < kBulkPieces && piece < pieces; ++piece) load(piece);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const uint32_t arrived = shared(&bulk->arrived[piece % kBulkPieces]);
      const auto parity = static_cast<uint32_t>(piece / kBulkPieces % 2);
      uint32_t done = 0;
      while (done == 0) {
        asm volatile(
            "{ .reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(arrived), "r"(parity)
            : "memory");
      }
      for (uint32_t i = 0; i < count; ++i) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                         __cvta_generic_to_global(BufferOf(to[i]) + piece * kBulkPieceBytes)),
                     "r"(shared(bulk->pieces[piece % kBulkPieces])), "r"(size(piece))
                     : "memory");
      }
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      // The piece before has been read: its place is free.
      if (piece > 0 && piece - 1 + kBulkPieces < pieces) {
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        load(piece - 1 + kBulkPieces);
      }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    for (uint64_t& arrived : bulk->arrived) {
      asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared(&arrived)) : "memory");
    }
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
  }
};

}  // namespace gpu
}  // namespace dfccl

#endif  // DFCCL_CUDA_THREAD_BLOCK_H_
