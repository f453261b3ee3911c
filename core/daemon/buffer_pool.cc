// SPDX-License-Identifier: Apache-2.0
// The free lists of BufferPool.
#include "core/daemon/buffer_pool.h"

#include <mutex>
#include <new>

namespace dfccl {
namespace {

constexpr size_t kHeader = kCacheLine;

size_t ClassBytes(int size_class) { return size_t{64} << size_class; }

}  // namespace

BufferPool::~BufferPool() {
  for (Block* block : free_) {
    while (block != nullptr) {
      Block* next = block->next;
      ::operator delete(block, std::align_val_t{kCacheLine});
      block = next;
    }
  }
}

void* BufferPool::Allocate(size_t bytes) {
  int size_class = 0;
  while (ClassBytes(size_class) < bytes) ++size_class;
  Block* block;
  {
    std::lock_guard<SpinLock> lock(lock_);
    block = free_[size_class];
    if (block != nullptr) {
      free_[size_class] = block->next;
      cached_bytes_ -= ClassBytes(size_class);
    }
  }
  if (block == nullptr) {
    block = static_cast<Block*>(
        ::operator new(kHeader + ClassBytes(size_class), std::align_val_t{kCacheLine}));
    block->size_class = size_class;
  }
  return reinterpret_cast<char*>(block) + kHeader;
}

void BufferPool::Free(void* memory) {
  if (memory == nullptr) return;
  Block* block = reinterpret_cast<Block*>(static_cast<char*>(memory) - kHeader);
  const size_t bytes = ClassBytes(block->size_class);
  {
    std::lock_guard<SpinLock> lock(lock_);
    if (cached_bytes_ + bytes <= kMostCachedBytes) {
      cached_bytes_ += bytes;
      block->next = free_[block->size_class];
      free_[block->size_class] = block;
      return;
    }
  }
  ::operator delete(block, std::align_val_t{kCacheLine});
}

}  // namespace dfccl
