// SPDX-License-Identifier: Apache-2.0
// One member's part of one collective instance, as its daemon and its owner see
// it. Operations come from their device's pool and go back there; their memory
// lives as long as the runtime.
#ifndef DFCCL_CORE_DAEMON_OPERATION_H_
#define DFCCL_CORE_DAEMON_OPERATION_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "core/collective.h"
#include "core/protocol/atomics.h"
#include "core/protocol/context.h"
#include "core/protocol/order.h"
#include "core/protocol/wake_list.h"
#include "core/runtime.h"
#include "core/status.h"

namespace dfccl {

class Daemon;
struct Record;
struct Slot;

// What people want to know about an operation. Plain data.
struct OperationInfo {
  int64_t device = 0;
  uint64_t sequence = 0;  // n-th operation of the device
  uint64_t program = 0;
  uint64_t launch = 0;
  uint64_t occurrence = 0;
  int64_t key = 0;
  const std::string* name = nullptr;  // interned; nullptr: unnamed
  int64_t submit_ns = 0;
  int64_t timeout_ns = 0;
  int32_t site = -1;
  bool has_key = false;
};

// The outcome word of an operation: its generation (the memory is used again
// and again) and one of these. Written by the owner (pending, registered: with a
// callback, for which the program waits or does not) and by the daemon (finished).
enum class OperationState : uint64_t {
  kPending = 0,
  kRegistered = 1,
  kFinished = 2,
  kRegisteredUnawaited = 3
};

// The one string with this value; nullptr for an empty one. Names come from
// programs, so they are few; never freed.
const std::string* InternName(std::string_view name);

inline uint64_t StateWord(uint64_t generation, OperationState state) {
  return generation << 2 | static_cast<uint64_t>(state);
}
inline OperationState StateOf(uint64_t word) { return static_cast<OperationState>(word & 3); }

struct alignas(kCacheLine) Operation : WakeNode, OrderNode {
  // The task: used by whoever drives the daemon.
  Daemon* daemon = nullptr;
  Record* record = nullptr;  // nullptr: failed before it could join one
  Slot* slot = nullptr;
  uint16_t member = 0;
  bool started = false;
  DynamicContext saved = {};
  StaticContext fixed = {};

  // The outcome.
  Atomic<uint64_t> state;
  Status status;
  Runtime::Callback callback = nullptr;  // set before "registered"
  void* argument = nullptr;
  uint32_t site_hash = 0;
  bool closed = false;  // see Submission

  // Memory of the runtime that the operation holds.
  void* staged_source = nullptr;
  void* owned_result = nullptr;
  void* scratch = nullptr;
  void* ragged = nullptr;  // RaggedSlot and its arrays

  // For the flight record.
  OperationInfo info;
  const Group* group = nullptr;
  Signature signature;
  int64_t bytes = 0;  // of the larger of source and result
  int64_t result_bytes = 0;

  uint64_t generation = 0;
  Operation* next = nullptr;  // in the pool's or a daemon's list
};

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_OPERATION_H_
