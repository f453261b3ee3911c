// SPDX-License-Identifier: Apache-2.0
// What code of a block needs to know of the machine that it runs on. The daemon is
// written once, for a block type with
//   uint32_t thread(), threads();  this thread's index and their number
//   bool leader();                 thread 0, which takes the decisions
//   void Sync();                   all threads of the block meet; what each did before
//                                  is seen by all after
//   bool Any(bool mine);           Sync, and whether `mine` was true for any thread
//   void Pause();                  nothing moves: let others have the machine for a while
//   kCopiesInBulk                  whether it has
//   void CopyInBulk(Bulk*, from, to, count, bytes);   by the leader: a copy of `bytes` to
//                                  `count` places, all in multiples of kBulkAlign
// On a GPU that is a thread block (daemon.cu); on a machine without one a group of host
// threads (emulation.h).
#ifndef DFCCL_CUDA_DEVICE_H_
#define DFCCL_CUDA_DEVICE_H_

#if defined(__CUDACC__)
#define DFCCL_DEVICE __device__
#define DFCCL_DEVICE_CALL __device__ __noinline__
#define DFCCL_UNROLL _Pragma("unroll")
#else
#define DFCCL_DEVICE
#define DFCCL_DEVICE_CALL
#define DFCCL_UNROLL
#endif

#endif  // DFCCL_CUDA_DEVICE_H_
