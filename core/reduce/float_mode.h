// SPDX-License-Identifier: Apache-2.0
// Floating-point mode of the calling thread. Thread pools of frameworks like to
// flush subnormals to zero; folds must give the same bits on every thread.
#ifndef DFCCL_CORE_REDUCE_FLOAT_MODE_H_
#define DFCCL_CORE_REDUCE_FLOAT_MODE_H_

#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace dfccl {

// While it lives: round to nearest even, keep subnormals, no traps.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : saved_(Get()) {
    if ((saved_ & kMask) != kDefault) Set((saved_ & ~kMask) | kDefault);
  }
  ~DefaultFloatMode() {
    if ((saved_ & kMask) != kDefault) Set(saved_);
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  static constexpr Word kMask = 0xffc0;  // all but the sticky exception flags
  static constexpr Word kDefault = 0x1f80;
  static Word Get() { return _mm_getcsr(); }
  static void Set(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kMask = 0x07ff9f07;  // rounding, flush and trap bits
  static constexpr Word kDefault = 0;
  static Word Get() {
    Word word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void Set(Word word) { __asm__ volatile("msr fpcr, %0" : : "r"(word)); }
#else
  using Word = uint32_t;
  static constexpr Word kMask = 0;
  static constexpr Word kDefault = 0;
  static Word Get() { return 0; }
  static void Set(Word) {}
#endif
  const Word saved_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_REDUCE_FLOAT_MODE_H_
