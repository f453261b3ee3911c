// SPDX-License-Identifier: Apache-2.0
// What only tests and benchmarks change.
#ifndef DFCCL_CORE_DAEMON_OPTIONS_H_
#define DFCCL_CORE_DAEMON_OPTIONS_H_

#include <cstdint>

namespace dfccl {

struct InternalOptions {
  uint64_t queue_capacity = 1024;  // of a submission queue; a power of two
};

// For runtimes made from now on.
void SetInternalOptions(const InternalOptions& options);

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_OPTIONS_H_
