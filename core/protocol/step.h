// SPDX-License-Identifier: Apache-2.0
// A step of a plan: the only things an interpreter can do. Plain data that the
// CPU daemon, the CUDA daemon, the verifier and the simulator all read.
//
// Members of a collective share one progress word each: written only by its
// member (release), read by all (acquire), and it only grows. A kSignal step
// stores a new value into the member's own word; a kWait step is passed when
// the named member's word (or every member's) has reached a value. kWait steps
// are the only places where an interpreter can wait. Before its first step
// runs, a member has published its buffers and its progress word is 1
// ("arrived"), so a plan's own signals start at 2.
//
// A kReduce step folds the listed sources in list order and writes the value to
// every listed destination; with one source it is a copy, without any it writes
// zeros. Its range is [chunk_begin, chunk_end) of the plan's chunk_count equal
// chunks of a block of the message (ChunkStart below gives elements).
//
// In a group that is spread over processes, members of other processes cannot
// read its memory. A kSend step hands a piece of one buffer to the transport,
// and never waits; when the piece has been put where the step says, in a process
// that it names, the member's word *as that process sees it* becomes the step's
// value. A member's own word is seen in its own process only. A wait for
// kOwnSends is passed when so many of the member's sends have left its buffers.
//
// A kCheck step looks at what only run-time values of all members tell (the index
// arrays of a ragged exchange, which count as one more block of the source), and
// fails the collective if it is wrong.
#ifndef DFCCL_CORE_PROTOCOL_STEP_H_
#define DFCCL_CORE_PROTOCOL_STEP_H_

#include <stdint.h>

#include "core/protocol/atomics.h"

namespace dfccl {

enum class StepKind : uint8_t { kSignal = 0, kWait = 1, kReduce = 2, kCheck = 3, kSend = 4 };

// kSource and kResult hold elements of the message's type. kScratch slots hold
// elements of its accumulation type, so partial sums are never rounded.
enum class BufferKind : uint8_t { kSource = 0, kResult = 1, kScratch = 2 };

struct BufferRef {
  BufferKind kind;
  uint16_t block;   // which block of a source or result, or which scratch slot
  uint16_t member;  // whose buffer
};

constexpr uint16_t kEveryMember = 0xffff;
constexpr uint16_t kOwnSends = 0xfffe;
constexpr uint32_t kArrived = 1;

struct Step {
  StepKind kind;
  // kReduce: apply the operator's last step (kMean divides). kSend: nothing more
  // goes from this member to that process.
  bool finalize;
  bool first;       // kSend: nothing has gone to that process before
  uint16_t member;  // kWait: whose word, or kEveryMember; kSend: to which process
  uint32_t value;   // kSignal, kWait; kSend: 0 for none
  uint32_t chunk_begin;
  uint32_t chunk_end;
  uint32_t source_begin;  // kReduce, kSend: ranges in the plan's ref list
  uint32_t source_end;
  uint32_t destination_begin;
  uint32_t destination_end;
};

// One member's program: `steps` and `refs` belong to a Plan that outlives it.
struct StepList {
  const Step* steps;
  const BufferRef* refs;
  uint32_t step_count;
  uint32_t chunk_count;    // chunks of a block
  uint32_t scratch_slots;  // block-sized scratch slots each member owns
};

// First element of chunk `chunk` of `chunk_count`, for `count` elements, with
// boundaries on multiples of `align` elements (so that members never share a
// cache line of a result). ChunkStart(chunk_count) == count.
DFCCL_HOST_DEVICE inline int64_t ChunkStart(int64_t count, uint32_t chunk, uint32_t chunk_count,
                                            int64_t align) {
  // Unsigned: the product below reaches 2^64 - 2^33 + 1, and no sum leaves int64_t.
  const uint64_t blocks = static_cast<uint64_t>(count / align) + (count % align != 0);
  const uint64_t start = blocks / chunk_count * chunk +
                         blocks % chunk_count * static_cast<uint64_t>(chunk) / chunk_count;
  return start < blocks ? static_cast<int64_t>(start) * align : count;
}

}  // namespace dfccl

#endif  // DFCCL_CORE_PROTOCOL_STEP_H_
