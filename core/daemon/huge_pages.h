// SPDX-License-Identifier: Apache-2.0
// Large pages for memory that is about to be written for the first time.
#ifndef DFCCL_CORE_DAEMON_HUGE_PAGES_H_
#define DFCCL_CORE_DAEMON_HUGE_PAGES_H_

#include <sys/mman.h>

#include <cstdint>

namespace dfccl {

// Linux hands memory out in pages of 4 KiB, each with a fault of its own, and
// most systems give larger ones only to those who ask. XLA does not, so a
// program's fresh 64 MiB buffer costs 16384 faults. Only advice: no result.
inline void AdviseHugePages(void* memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (begin + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t last = (begin + static_cast<uintptr_t>(bytes)) & ~(kHugePage - 1);
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_HUGE_PAGES_H_
