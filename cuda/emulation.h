// SPDX-License-Identifier: Apache-2.0
// A GPU on host threads: the daemon's own code, with a block as a group of threads (or
// one), streams as threads that work a list off, and device memory from the heap.
#ifndef DFCCL_CUDA_EMULATION_H_
#define DFCCL_CUDA_EMULATION_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda/gpu.h"

namespace dfccl {
namespace gpu {

// Runs what is put into it in order.
class EmulatedStream {
 public:
  EmulatedStream();
  ~EmulatedStream();  // what has not begun is dropped; a wait ends
  void Put(std::function<void()> work);
  void Synchronize();
  // For work that waits: whether it may go on doing so.
  bool stopping() const { return stopping_.LoadAcquire() != 0; }

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool busy_ = false;
  Atomic<uint32_t> stopping_;
  std::thread thread_;
};

// Puts a wait for the word, whose memory `owner` keeps, into the stream.
void WaitFor(EmulatedStream* stream, Atomic<uint64_t>* word, uint64_t value,
             std::shared_ptr<void> owner);

// The kernel, to its end.
void RunDaemon(const DaemonArguments& arguments, uint32_t threads_of_a_block);

class EmulatedGpu : public Gpu {
 public:
  explicit EmulatedGpu(uint32_t threads_of_a_block) : threads_(threads_of_a_block) {}
  ~EmulatedGpu() override;

  Status Allocate(size_t bytes, void** memory) override;
  Status AllocateMapped(size_t bytes, void** memory) override { return Allocate(bytes, memory); }
  Status Upload(void* to, const void* from, size_t bytes) override;
  Status Clear(void* memory, size_t bytes) override;
  Status Download(Stream stream, void* to, const void* from, size_t bytes) override;
  Status Launch(const DaemonArguments& arguments) override;
  Status Write(Stream stream, Atomic<uint64_t>* word, uint64_t value) override;
  Status Wait(Stream stream, Atomic<uint64_t>* word, uint64_t value) override;
  Status Copy(Stream stream, void* to, const void* from, size_t bytes) override;
  Stream CopyStream() override { return &copy_stream_; }
  Status Reach(Gpu*) override { return Status(); }

  static EmulatedStream& StreamOf(Stream stream) { return *static_cast<EmulatedStream*>(stream); }

 private:
  const uint32_t threads_;
  std::mutex mutex_;
  // Kept by streams that have yet to use it, too: a driver waits for them when it frees.
  struct Memory {
    ~Memory();
    std::vector<void*> blocks;
  };
  const std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();
  EmulatedStream daemon_stream_;
  EmulatedStream copy_stream_;
};

}  // namespace gpu
}  // namespace dfccl

#endif  // DFCCL_CUDA_EMULATION_H_
