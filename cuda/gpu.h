// SPDX-License-Identifier: Apache-2.0
// What the service needs of a GPU: memory, its daemon's kernel, and the operations that
// it puts into streams. Driver (driver.h) is one on a real GPU, EmulatedGpu (emulation.h)
// one on host threads. Nothing here waits for a stream but Upload, Clear and Download, which
// are not for the way of a collective.
#ifndef DFCCL_CUDA_GPU_H_
#define DFCCL_CUDA_GPU_H_

#include <cstddef>
#include <cstdint>

#include "core/protocol/atomics.h"
#include "core/status.h"
#include "cuda/layout.h"

namespace dfccl {
namespace gpu {

using Stream = void*;  // a CUstream

class Gpu {
 public:
  virtual ~Gpu() = default;

  // Zeroed, and freed with the object. Mapped memory is the host's and has the same
  // address on both sides.
  virtual Status Allocate(size_t bytes, void** memory) = 0;
  virtual Status AllocateMapped(size_t bytes, void** memory) = 0;

  // Into device memory, on a stream of its own; waits until it is there.
  virtual Status Upload(void* to, const void* from, size_t bytes) = 0;
  virtual Status Clear(void* memory, size_t bytes) = 0;

  // From device memory, once `stream` has come here; waits for that.
  virtual Status Download(Stream stream, void* to, const void* from, size_t bytes) = 0;

  // The daemon, on its own stream, behind its last launch.
  virtual Status Launch(const DaemonArguments& arguments) = 0;

  // When `stream` comes to it: stores `value` with everything before it done; goes on
  // once the word has reached `value`; copies device memory or mapped memory.
  virtual Status Write(Stream stream, Atomic<uint64_t>* word, uint64_t value) = 0;
  virtual Status Wait(Stream stream, Atomic<uint64_t>* word, uint64_t value) = 0;
  virtual Status Copy(Stream stream, void* to, const void* from, size_t bytes) = 0;

  // A stream on which nothing waits.
  virtual Stream CopyStream() = 0;

  // Whether blocks of this GPU can use the peer's memory, and read, modify and write
  // words of it at once; made so if need be.
  virtual Status Reach(Gpu* peer) = 0;
};

}  // namespace gpu
}  // namespace dfccl

#endif  // DFCCL_CUDA_GPU_H_
