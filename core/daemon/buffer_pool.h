// SPDX-License-Identifier: Apache-2.0
// Memory for scratch slots, staged sources and runtime-owned results: blocks of
// power-of-two sizes, kept for the next operation up to a bound.
#ifndef DFCCL_CORE_DAEMON_BUFFER_POOL_H_
#define DFCCL_CORE_DAEMON_BUFFER_POOL_H_

#include <cstddef>
#include <cstdint>

#include "core/daemon/spin_lock.h"

namespace dfccl {

class BufferPool {
 public:
  BufferPool() = default;
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // At least `bytes` bytes, aligned to a cache line; bytes > 0. Thread-safe.
  void* Allocate(size_t bytes);
  void Free(void* memory);  // nullptr is allowed

 private:
  static constexpr size_t kMostCachedBytes = size_t{256} << 20;
  static constexpr int kClasses = 48;

  struct Block {  // in front of the memory, one cache line
    Block* next;
    int size_class;
  };

  SpinLock lock_;
  size_t cached_bytes_ = 0;
  Block* free_[kClasses] = {};
};

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_BUFFER_POOL_H_
