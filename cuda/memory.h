// SPDX-License-Identifier: Apache-2.0
// Memory taken from a GPU once and handed out in powers of two, which are joined again
// when both halves are free. Not thread-safe.
#ifndef DFCCL_CUDA_MEMORY_H_
#define DFCCL_CUDA_MEMORY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <unordered_map>

namespace dfccl {
namespace gpu {

class MemoryPool {
 public:
  MemoryPool(void* memory, size_t bytes) : memory_(static_cast<char*>(memory)) {
    size_t offset = 0;
    for (int c = kClasses - 1; c >= kLeast; --c) {
      if ((bytes & Size(c)) == 0) continue;
      free_[c].insert(offset);
      offset += Size(c);
    }
  }

  // nullptr: there is not so much left in one piece.
  void* Take(size_t bytes) {
    int wanted = kLeast;
    while (wanted < kClasses - 1 && Size(wanted) < bytes) ++wanted;
    int found = wanted;
    while (found < kClasses && free_[found].empty()) ++found;
    if (found == kClasses) return nullptr;
    const size_t offset = *free_[found].begin();
    free_[found].erase(free_[found].begin());
    while (found > wanted) {
      --found;
      free_[found].insert(offset + Size(found));
    }
    class_of_[offset] = wanted;
    return memory_ + offset;
  }

  void Give(void* memory) {
    if (memory == nullptr) return;
    size_t offset = static_cast<size_t>(static_cast<char*>(memory) - memory_);
    const auto taken = class_of_.find(offset);
    int c = taken->second;
    class_of_.erase(taken);
    // Pieces lie at multiples of their size, so the other half differs in one bit.
    for (; free_[c].erase(offset ^ Size(c)) > 0; ++c) offset &= ~Size(c);
    free_[c].insert(offset);
  }

 private:
  static constexpr int kLeast = 8;  // 256 bytes, which is how XLA aligns buffers
  static constexpr int kClasses = 63;
  static constexpr size_t Size(int size_class) { return size_t{1} << size_class; }

  char* const memory_;
  std::array<std::set<size_t>, kClasses> free_;  // offsets
  std::unordered_map<size_t, int> class_of_;     // of what is taken
};

}  // namespace gpu
}  // namespace dfccl

#endif  // DFCCL_CUDA_MEMORY_H_
