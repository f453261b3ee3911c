// SPDX-License-Identifier: Apache-2.0
// Device memory of a daemon: taken from the GPU once, handed out in powers of two. Not
// thread-safe.
#ifndef DFCCL_CUDA_MEMORY_H_
#define DFCCL_CUDA_MEMORY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace dfccl {
namespace gpu {

class MemoryPool {
 public:
  MemoryPool(void* memory, size_t bytes) : next_(static_cast<char*>(memory)), left_(bytes) {}

  // nullptr: there is not so much left.
  void* Take(size_t bytes) {
    const int size_class = ClassOf(bytes);
    std::vector<void*>& free = free_[size_class];
    void* memory;
    if (!free.empty()) {
      memory = free.back();
      free.pop_back();
    } else {
      const size_t size = size_t{1} << size_class;
      if (size > left_) return nullptr;
      memory = next_;
      next_ += size;
      left_ -= size;
    }
    class_of_[memory] = size_class;
    return memory;
  }

  void Give(void* memory) {
    if (memory == nullptr) return;
    free_[class_of_.at(memory)].push_back(memory);
  }

 private:
  static constexpr int kLeast = 8;  // 256 bytes, which is how XLA aligns buffers
  static int ClassOf(size_t bytes) {
    int size_class = kLeast;
    while ((size_t{1} << size_class) < bytes) ++size_class;
    return size_class;
  }

  char* next_;
  size_t left_;
  std::array<std::vector<void*>, 64> free_;
  std::unordered_map<void*, int> class_of_;
};

}  // namespace gpu
}  // namespace dfccl

#endif  // DFCCL_CUDA_MEMORY_H_
