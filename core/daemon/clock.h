// SPDX-License-Identifier: Apache-2.0
// Times in nanoseconds.
#ifndef DFCCL_CORE_DAEMON_CLOCK_H_
#define DFCCL_CORE_DAEMON_CLOCK_H_

#include <time.h>

#include <chrono>
#include <cstdint>

namespace dfccl {

// Monotonic, and cheap enough for one read per event.
inline int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The processor time of the calling thread. A system call.
inline int64_t ThreadCpuNs() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

// That of all threads of the process.
inline int64_t ProcessCpuNs() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_CLOCK_H_
