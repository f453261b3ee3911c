// SPDX-License-Identifier: Apache-2.0
// The kernel: a block of the daemon is a thread block.
#include "cuda/daemon.h"
#include "cuda/kernel.h"

namespace dfccl {
namespace gpu {
namespace {

class ThreadBlock {
 public:
  __device__ uint32_t thread() const { return threadIdx.x; }
  __device__ uint32_t threads() const { return blockDim.x; }
  __device__ bool leader() const { return threadIdx.x == 0; }
  __device__ void Sync() { __syncthreads(); }
  __device__ bool Any(bool mine) { return __syncthreads_or(mine ? 1 : 0) != 0; }
  __device__ void Pause() { __nanosleep(200); }
};

}  // namespace
}  // namespace gpu
}  // namespace dfccl

extern "C" __global__ void __launch_bounds__(dfccl::gpu::kThreads, 1)
    dfccl_daemon(const dfccl::gpu::DaemonArguments arguments) {
  using dfccl::gpu::ThreadBlock;
  __shared__ dfccl::gpu::Shared shared;
  ThreadBlock block;
  dfccl::gpu::Daemon<ThreadBlock> daemon(arguments, blockIdx.x, &shared, block);
  daemon.Run();
}
