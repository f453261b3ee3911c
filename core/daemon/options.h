// SPDX-License-Identifier: Apache-2.0
// What only tests and benchmarks change.
#ifndef DFCCL_CORE_DAEMON_OPTIONS_H_
#define DFCCL_CORE_DAEMON_OPTIONS_H_

#include <cstdint>

namespace dfccl {

struct InternalOptions {
  uint64_t queue_capacity = 1024;  // of a submission queue; a power of two
  // What all members read and write from this size on stays in no cache, so results
  // are written past it.
  int64_t streaming_bytes = int64_t{48} << 20;
};

// For runtimes made from now on.
void SetInternalOptions(const InternalOptions& options);

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_OPTIONS_H_
