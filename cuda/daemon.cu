// SPDX-License-Identifier: Apache-2.0
// The kernel: a block of the daemon is a thread block.
#include "cuda/daemon.h"
#include "cuda/kernel.h"
#include "cuda/thread_block.h"

// So that something of a multiprocessor stays for others' kernels: half of it, or, where
// registers would be spilled, a quarter.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define DFCCL_BOUND __maxnreg__(192)
#else
#define DFCCL_BOUND __launch_bounds__(dfccl::gpu::kThreads, 2)
#endif

extern "C" __global__ void DFCCL_BOUND dfccl_daemon(const dfccl::gpu::DaemonArguments arguments) {
  using dfccl::gpu::ThreadBlock;
  __shared__ dfccl::gpu::Shared shared;
  ThreadBlock block;
  dfccl::gpu::Daemon<ThreadBlock> daemon(arguments, blockIdx.x, &shared, block);
  daemon.Run();
}
