// SPDX-License-Identifier: Apache-2.0
// How the threads of a process share the duty to poll. Doorbells are armed only while
// nobody does: the first thread to begin disarms them, and the last to stop, whoever it
// is, arms them and looks again.
//
//   the last poller                        whoever leaves work for a poller
//   leaves the count                       publishes the work (SeqCst store)
//   looks for work again (SeqCst loads)    if (!Any()) wakes the sleeping thread
//
// Both store, then look, in one total order: at least one of them sees the other.
#ifndef DFCCL_CORE_PROTOCOL_POLLERS_H_
#define DFCCL_CORE_PROTOCOL_POLLERS_H_

#include <stdint.h>

#include "core/protocol/atomics.h"

namespace dfccl {

class Pollers {
 public:
#if defined(__CUDACC__)
#pragma nv_exec_check_disable  // `disarm` may be a host function
#endif
  template <typename Disarm>
  DFCCL_HOST_DEVICE void Begin(Disarm disarm) {
    // A bell that is armed nevertheless, by a last poller that is slow, is harmless;
    // and none is disarmed too late: this comes before the thread's own End.
    if (count_.FetchAddSeqCst(1) == 0) disarm();
  }

  // `arm()` arms the doorbells, looks for work again, and returns false if it found
  // some. Then so does this: nobody polls, and somebody must.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable  // `arm` may be a host function
#endif
  template <typename Arm>
  DFCCL_HOST_DEVICE bool End(Arm arm) {
    return count_.FetchSubSeqCst(1) != 1 || arm();
  }

  // After work was published: whether somebody polls, and so will see it.
  DFCCL_HOST_DEVICE bool Any() const { return count_.LoadSeqCst() != 0; }

  // For a poller: whether there are others. A hint.
  DFCCL_HOST_DEVICE bool Others() const { return count_.LoadRelaxed() > 1; }

 private:
  alignas(kCacheLine) Atomic<uint32_t> count_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_PROTOCOL_POLLERS_H_
