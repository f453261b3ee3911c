// SPDX-License-Identifier: Apache-2.0
// The only file that knows atomics and memory orders. Every operation says its
// order in its name; whoever uses an acquire or release names its partner.
// Three implementations: std::atomic on the host, cuda::atomic (system scope)
// under nvcc, with the same layout, and relacy's in the model (DFCCL_MODEL).
// There are no stand-alone fences: store/look pairs use the SeqCst operations.
#ifndef DFCCL_CORE_PROTOCOL_ATOMICS_H_
#define DFCCL_CORE_PROTOCOL_ATOMICS_H_

#include <stddef.h>
#include <stdint.h>

#if defined(DFCCL_MODEL)
#include <relacy/relacy.hpp>
// relacy replaces words of the language; its tracked operator new stays.
#undef new
#undef delete
#undef malloc
#undef calloc
#undef realloc
#undef free
#undef assert
#undef errno
#elif defined(__CUDACC__)
// No word is in a thread's own memory, of which each operation would make sure otherwise:
// that doubled the code. (The name before and after CUDA 13.1.)
#define _LIBCUDACXX_ATOMIC_UNSAFE_AUTOMATIC_STORAGE
#define _CCCL_ATOMIC_UNSAFE_AUTOMATIC_STORAGE
#include <cuda/atomic>
#else
#include <atomic>
#endif

#if defined(__CUDACC__)
#define DFCCL_HOST_DEVICE __host__ __device__
#else
#define DFCCL_HOST_DEVICE
#endif

#if defined(DFCCL_MODEL)
#define DFCCL_WORD(word) word(RL_INFO)
#else
#define DFCCL_WORD(word) word
#endif

namespace dfccl {

namespace atomics_internal {
#if defined(DFCCL_MODEL)
template <typename T>
using Word = rl::atomic<T>;
constexpr rl::memory_order kRelaxed = rl::mo_relaxed;
constexpr rl::memory_order kAcquire = rl::mo_acquire;
constexpr rl::memory_order kRelease = rl::mo_release;
constexpr rl::memory_order kAcqRel = rl::mo_acq_rel;
constexpr rl::memory_order kSeqCst = rl::mo_seq_cst;
#elif defined(__CUDACC__)
template <typename T>
using Word = cuda::atomic<T, cuda::thread_scope_system>;
constexpr cuda::memory_order kRelaxed = cuda::memory_order_relaxed;
constexpr cuda::memory_order kAcquire = cuda::memory_order_acquire;
constexpr cuda::memory_order kRelease = cuda::memory_order_release;
constexpr cuda::memory_order kAcqRel = cuda::memory_order_acq_rel;
constexpr cuda::memory_order kSeqCst = cuda::memory_order_seq_cst;
#else
template <typename T>
using Word = std::atomic<T>;
constexpr std::memory_order kRelaxed = std::memory_order_relaxed;
constexpr std::memory_order kAcquire = std::memory_order_acquire;
constexpr std::memory_order kRelease = std::memory_order_release;
constexpr std::memory_order kAcqRel = std::memory_order_acq_rel;
constexpr std::memory_order kSeqCst = std::memory_order_seq_cst;
#endif
}  // namespace atomics_internal

// Words with different writers are kept this far apart.
#if defined(DFCCL_MODEL)
constexpr size_t kCacheLine = 16;  // the model has no caches, and a plain allocator
#else
constexpr size_t kCacheLine = 64;
#endif

// An atomic word of an integer, enumeration or pointer type. CompareExchange
// is strong and stores the value it found in `expected` when it fails.
template <typename T>
class Atomic {
 public:
  DFCCL_HOST_DEVICE Atomic() : word_(T()) {}
  DFCCL_HOST_DEVICE explicit Atomic(T value) : word_(value) {}
  Atomic(const Atomic&) = delete;
  Atomic& operator=(const Atomic&) = delete;

  DFCCL_HOST_DEVICE T LoadRelaxed() const {
    return DFCCL_WORD(word_).load(atomics_internal::kRelaxed);
  }
  DFCCL_HOST_DEVICE T LoadAcquire() const {
    return DFCCL_WORD(word_).load(atomics_internal::kAcquire);
  }
  DFCCL_HOST_DEVICE T LoadSeqCst() const {
    return DFCCL_WORD(word_).load(atomics_internal::kSeqCst);
  }

  DFCCL_HOST_DEVICE void StoreRelaxed(T value) {
    DFCCL_WORD(word_).store(value, atomics_internal::kRelaxed);
  }
  DFCCL_HOST_DEVICE void StoreRelease(T value) {
    DFCCL_WORD(word_).store(value, atomics_internal::kRelease);
  }
  DFCCL_HOST_DEVICE void StoreSeqCst(T value) {
    DFCCL_WORD(word_).store(value, atomics_internal::kSeqCst);
  }

  DFCCL_HOST_DEVICE T ExchangeAcquire(T value) {
    return DFCCL_WORD(word_).exchange(value, atomics_internal::kAcquire);
  }
  DFCCL_HOST_DEVICE T ExchangeAcqRel(T value) {
    return DFCCL_WORD(word_).exchange(value, atomics_internal::kAcqRel);
  }
  DFCCL_HOST_DEVICE T ExchangeSeqCst(T value) {
    return DFCCL_WORD(word_).exchange(value, atomics_internal::kSeqCst);
  }

  DFCCL_HOST_DEVICE bool CompareExchangeRelaxed(T& expected, T value) {
    return DFCCL_WORD(word_).compare_exchange_strong(expected, value, atomics_internal::kRelaxed,
                                                     atomics_internal::kRelaxed);
  }
  DFCCL_HOST_DEVICE bool CompareExchangeRelease(T& expected, T value) {
    return DFCCL_WORD(word_).compare_exchange_strong(expected, value, atomics_internal::kRelease,
                                                     atomics_internal::kRelaxed);
  }
  DFCCL_HOST_DEVICE bool CompareExchangeAcqRel(T& expected, T value) {
    return DFCCL_WORD(word_).compare_exchange_strong(expected, value, atomics_internal::kAcqRel,
                                                     atomics_internal::kAcquire);
  }
  DFCCL_HOST_DEVICE bool CompareExchangeSeqCst(T& expected, T value) {
    return DFCCL_WORD(word_).compare_exchange_strong(expected, value, atomics_internal::kSeqCst,
                                                     atomics_internal::kSeqCst);
  }

  DFCCL_HOST_DEVICE T FetchAddRelaxed(T value) {
    return DFCCL_WORD(word_).fetch_add(value, atomics_internal::kRelaxed);
  }
  DFCCL_HOST_DEVICE T FetchAddAcqRel(T value) {
    return DFCCL_WORD(word_).fetch_add(value, atomics_internal::kAcqRel);
  }
  DFCCL_HOST_DEVICE T FetchAddSeqCst(T value) {
    return DFCCL_WORD(word_).fetch_add(value, atomics_internal::kSeqCst);
  }
  DFCCL_HOST_DEVICE T FetchSubRelaxed(T value) {
    return DFCCL_WORD(word_).fetch_sub(value, atomics_internal::kRelaxed);
  }
  DFCCL_HOST_DEVICE T FetchSubAcqRel(T value) {
    return DFCCL_WORD(word_).fetch_sub(value, atomics_internal::kAcqRel);
  }
  DFCCL_HOST_DEVICE T FetchSubSeqCst(T value) {
    return DFCCL_WORD(word_).fetch_sub(value, atomics_internal::kSeqCst);
  }
  DFCCL_HOST_DEVICE T FetchOrAcqRel(T value) {
    return DFCCL_WORD(word_).fetch_or(value, atomics_internal::kAcqRel);
  }
  DFCCL_HOST_DEVICE T FetchAndAcqRel(T value) {
    return DFCCL_WORD(word_).fetch_and(value, atomics_internal::kAcqRel);
  }

 private:
  atomics_internal::Word<T> word_;
};

// Data that an atomic word guards. The model checks every access for races;
// elsewhere it is the bare value.
template <typename T>
class Plain {
 public:
  DFCCL_HOST_DEVICE Plain() : value_() {}
  Plain(const Plain&) = delete;
  Plain& operator=(const Plain&) = delete;
#if defined(DFCCL_MODEL)
  T Load() const { return value_(RL_INFO).load(); }
  void Store(const T& value) { value_(RL_INFO).store(value); }

 private:
  rl::var<T> value_;
#else
  DFCCL_HOST_DEVICE const T& Load() const { return value_; }
  DFCCL_HOST_DEVICE void Store(const T& value) { value_ = value; }

 private:
  T value_;
#endif
};

// One turn of a polling loop: lets the core's other thread, or the model's
// scheduler, go on.
DFCCL_HOST_DEVICE inline void SpinPause() {
#if defined(DFCCL_MODEL)
  rl::yield(1, RL_INFO);
#elif defined(__CUDA_ARCH__)
  __nanosleep(20);
#elif defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace dfccl

#undef DFCCL_WORD

#endif  // DFCCL_CORE_PROTOCOL_ATOMICS_H_
