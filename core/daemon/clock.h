// SPDX-License-Identifier: Apache-2.0
// The time: monotonic, in nanoseconds, cheap enough for one read per event.
#ifndef DFCCL_CORE_DAEMON_CLOCK_H_
#define DFCCL_CORE_DAEMON_CLOCK_H_

#include <chrono>
#include <cstdint>

namespace dfccl {

inline int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_CLOCK_H_
