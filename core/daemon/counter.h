// SPDX-License-Identifier: Apache-2.0
// A count with one writer at a time (no read-modify-write) and any readers.
#ifndef DFCCL_CORE_DAEMON_COUNTER_H_
#define DFCCL_CORE_DAEMON_COUNTER_H_

#include <cstdint>

#include "core/protocol/atomics.h"

namespace dfccl {

class Counter {
 public:
  void Add(uint64_t n) { value_.StoreRelaxed(value_.LoadRelaxed() + n); }
  void Max(uint64_t n) {
    if (n > value_.LoadRelaxed()) value_.StoreRelaxed(n);
  }
  void Reset() { value_.StoreRelaxed(0); }
  uint64_t Load() const { return value_.LoadRelaxed(); }

 private:
  Atomic<uint64_t> value_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_COUNTER_H_
