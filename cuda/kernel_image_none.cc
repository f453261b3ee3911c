// SPDX-License-Identifier: Apache-2.0
// In builds without nvcc.
namespace dfccl {
namespace gpu {

extern const void* const kKernelImage;
const void* const kKernelImage = nullptr;

}  // namespace gpu
}  // namespace dfccl
