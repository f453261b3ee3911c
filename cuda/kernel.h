// SPDX-License-Identifier: Apache-2.0
// The kernel as the host sees it: its name in the module, and its shape.
#ifndef DFCCL_CUDA_KERNEL_H_
#define DFCCL_CUDA_KERNEL_H_

#include <cstdint>

namespace dfccl {
namespace gpu {

constexpr uint32_t kThreads = 256;
constexpr char kKernelName[] = "dfccl_daemon";

}  // namespace gpu
}  // namespace dfccl

#endif  // DFCCL_CUDA_KERNEL_H_
