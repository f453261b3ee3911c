// SPDX-License-Identifier: Apache-2.0
// GPUs by the CUDA driver. Never run on a GPU so far; tests run it over a stand-in for the
// driver's library (tests/cuda/driver_stand_in.cc).
#ifndef DFCCL_CUDA_DRIVER_H_
#define DFCCL_CUDA_DRIVER_H_

#include <cstddef>
#include <memory>
#include <string>

#include "core/status.h"
#include "cuda/gpu.h"

namespace dfccl {
namespace gpu {

struct DriverOptions {
  // Of the driver, by the rules of dlopen.
  std::string library = "libcuda.so.1";
  // The kernel, as nvcc made it; nullptr: that of the build, if it has one.
  const void* image = nullptr;
};

// Whether this build holds the kernel.
bool HasKernelImage();

// GPU `ordinal`, by its primary context, which XLA uses, too. The object must outlive its
// daemon. nullptr: *status says what is missing.
std::unique_ptr<Gpu> OpenGpu(const DriverOptions& options, int ordinal, Status* status);

}  // namespace gpu
}  // namespace dfccl

#endif  // DFCCL_CUDA_DRIVER_H_
