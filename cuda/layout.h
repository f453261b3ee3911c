// SPDX-License-Identifier: Apache-2.0
// What a host and the CUDA daemon of a GPU share, and what the daemon keeps between its
// launches. Nothing here owns memory. "Mapped" memory is the host's, and both read and
// write it; each word of it has one writer. Memory that is all zero is a valid start for
// everything but the wiring.
//
//   host                                       block of the daemon
//   submissions[block] ----------------------> Task, in the block's table
//     (mapped, SpscQueue)                        meets others in a Record (device memory)
//   completions[block] <---------------------- one entry for each task
//   OperationWords.ready  (by the stream) ---> the operands are there: the task may begin
//   OperationWords.done   <------------------- the stream may go on
//   Door.stop ------------------------------->
//   Door.parked <----------------------------- this launch has left
#ifndef DFCCL_CUDA_LAYOUT_H_
#define DFCCL_CUDA_LAYOUT_H_

#include <stddef.h>
#include <stdint.h>

#include "core/collective.h"
#include "core/protocol/atomics.h"
#include "core/protocol/context.h"
#include "core/protocol/flagged_word.h"
#include "core/protocol/order.h"
#include "core/protocol/progress.h"
#include "core/protocol/roll.h"
#include "core/protocol/spsc_queue.h"
#include "core/protocol/stickiness.h"

namespace dfccl {
namespace gpu {

// Sources and destinations of one data step. Plans with more are refused by the host.
constexpr uint32_t kMostBuffers = 512;
// Blocked tasks that a block looks at in one turn.
constexpr uint32_t kScan = 64;
// What a member needs of the others' posted sources, each block rounded up to so many bytes.
constexpr uint32_t kMostPostedBytes = 16 << 10;
constexpr uint32_t kPostedAlign = 16;
// Copies in bulk go through shared memory, so many pieces at a time.
constexpr uint32_t kBulkPieces = 4;
constexpr uint32_t kBulkPieceBytes = kMostPostedBytes / kBulkPieces;
constexpr uint32_t kBulkAlign = 16;
constexpr int64_t kLeastBulkBytes = 4 * kBulkPieceBytes;

// What a stream and the daemon tell each other about an operation. Sequence numbers
// of operations that use the same words one after the other only grow.
struct OperationWords {
  alignas(kCacheLine) Atomic<uint64_t> ready;     // by the stream
  alignas(kCacheLine) Atomic<uint64_t> done;      // by the daemon
  alignas(kCacheLine) Atomic<uint64_t> released;  // by the stream: a staged result was copied
  // What a stream copies to device memory at the start of an operation that is kept, and
  // from there at a wait.
  alignas(kCacheLine) uint64_t ticket;
};

// Whether one of these words has come to `sequence`, in the order of a counter that goes
// around. Acquire: partner is the write of a stream or a block.
DFCCL_HOST_DEVICE inline bool Reached(const Atomic<uint64_t>& word, uint64_t sequence) {
  return static_cast<int64_t>(word.LoadAcquire() - sequence) >= 0;
}

// A member's index arrays of a ragged exchange, in device memory; see core/runtime.h.
struct RaggedArrays {
  const void* input_offsets;
  const void* send_sizes;
  const void* output_offsets;
  const void* recv_sizes;
  const void* initial;
  int64_t source_rows;
  int64_t result_rows;
  uint32_t wide;  // 1: int64, 0: int32
};

// A large collective is carried out in lanes: each is a share of the elements of every
// block of the message, with words of its own, and may be run by another block. One of
// these for each member and lane; written by the member before it says "arrived".
struct alignas(kCacheLine) Slot {
  ProgressWord progress;
  const void* source;
  void* result;
  void* scratch;
  RaggedArrays ragged;
};

// Why a member has failed its collective.
enum class Reason : uint16_t {
  kNone = 0,   // the host has, and knows why
  kRagged,     // the rows that member `peer` sends to it do not fit
  kImpossible  // a step that this daemon cannot carry out
};

struct Cause {
  Reason reason;
  uint16_t member;
  uint32_t peer;

  DFCCL_HOST_DEVICE uint64_t Word() const {
    return static_cast<uint64_t>(reason) << 48 | static_cast<uint64_t>(member) << 32 | peer;
  }
  static Cause Of(uint64_t word) {
    return {static_cast<Reason>(word >> 48), static_cast<uint16_t>(word >> 32),
            static_cast<uint32_t>(word)};
  }
};

// Where the members of one instance meet, in device memory: this, the slots of all lanes,
// and a word for each member. All zero when it is not in use. Where sources are posted, there
// is nothing but these behind it, of one member after the other, block after block.
struct alignas(kCacheLine) Record {
  Roll roll;               // of all members' lanes; posted: only whether it has failed
  Atomic<uint64_t> cause;  // a Cause: written before it fails, read by who has seen that

  DFCCL_HOST_DEVICE FlaggedWord* posted() { return reinterpret_cast<FlaggedWord*>(this + 1); }
  DFCCL_HOST_DEVICE Slot* slots() { return reinterpret_cast<Slot*>(this + 1); }
  // Lanes of a member that have finished.
  DFCCL_HOST_DEVICE Atomic<uint32_t>* finished(uint32_t members, uint32_t lanes) {
    return reinterpret_cast<Atomic<uint32_t>*>(slots() + members * lanes);
  }
  // `posted_words`: of all members; 0: nothing is posted.
  static size_t Bytes(uint32_t members, uint32_t lanes, uint32_t posted_words) {
    if (posted_words > 0) return sizeof(Record) + posted_words * sizeof(FlaggedWord);
    return sizeof(Record) + members * lanes * sizeof(Slot) + members * sizeof(Atomic<uint32_t>);
  }
};

enum class EntryKind : uint32_t {
  kJoin = 0,  // a member's lane
  kFail,      // fails the collective of a task, if it is still the same
};

// From the host to a block. Steps and refs are in device memory.
struct SubmissionEntry {
  uint64_t sequence;  // of the operation
  EntryKind kind;
  uint32_t task;  // in the block's table
  OperationWords* words;
  Record* record;
  StepList list;
  const void* source;
  void* result;
  void* scratch;
  RaggedArrays ragged;
  int64_t count;       // elements of a block of the message (ragged: of a row)
  int64_t lane_begin;  // the lane's share of each block
  int64_t lane_end;
  int64_t align;
  int64_t slice_elements;
  int32_t priority;
  uint32_t members;
  uint32_t lanes;
  uint32_t generation;    // of the words that sources are posted in; 0: nothing is posted
  uint32_t block_words;   // of a block of a posted source
  uint32_t source_words;  // of a posted source
  uint16_t member;
  uint16_t lane;
  uint16_t is_ragged;
  uint8_t element_size;
  uint8_t accumulated_size;
  ReduceOp op;
  DType dtype;
};

// From a block to the host.
struct CompletionEntry {
  uint64_t sequence;
  uint32_t task;
  uint32_t failed;         // 1: without a result
  uint64_t cause;          // a Cause, if failed
  uint32_t last;           // 1: the operation's last lane
  uint32_t record_failed;  // 1: the record is not all zero again
};

enum class Phase : uint32_t {
  kFree = 0,
  kAwaitsReady,
  kSteps,
  kDraining,  // it has failed, and waits until nobody touches its buffers
};

// A member's lane in its block's table. Used by the block only.
struct Task : OrderNode {
  SubmissionEntry entry;
  DynamicContext saved;
  Phase phase;
  uint32_t started;
  const FlaggedWord* awaited;  // what it is blocked at, where sources are posted;
  uint16_t wait_member;        // elsewhere
  uint32_t wait_value;
};

// Mapped; for reports.
struct alignas(kCacheLine) BlockCounters {
  Atomic<uint64_t> turns;
  Atomic<uint64_t> preemptions;
  Atomic<uint64_t> saves;
  Atomic<uint64_t> loads;
  Atomic<uint64_t> bulk_copies;
};

// Where a block's parts are; set by the host before the first launch.
struct BlockWiring {
  SpscEnds* submission_ends;
  Plain<SubmissionEntry>* submissions;
  uint64_t submission_capacity;
  SpscEnds* completion_ends;
  Plain<CompletionEntry>* completions;
  uint64_t completion_capacity;
  Task* tasks;
  uint32_t* blocked;  // as many as there are tasks
  BlockCounters* counters;
};

// What a block keeps from launch to launch; its leader's only.
struct BlockState {
  uint32_t initialized;
  uint32_t blocked_count;
  uint32_t cursor;  // in the list of the blocked
  alignas(Order) char order[sizeof(Order)];
  alignas(Stickiness) char stickiness[sizeof(Stickiness)];
  alignas(uint64_t) char submissions[sizeof(SpscConsumer<SubmissionEntry>)];
  alignas(uint64_t) char completions[sizeof(SpscProducer<CompletionEntry>)];
};

// Device memory that the blocks of a daemon share.
struct Grid {
  alignas(kCacheLine) Atomic<uint64_t> activity;  // grows while anything moves
  alignas(kCacheLine) Atomic<uint32_t> closing;   // 1: everybody leaves
  alignas(kCacheLine) Atomic<uint32_t> left;      // blocks that have left
};

// Mapped.
struct Door {
  alignas(kCacheLine) Atomic<uint64_t> parked;  // by the daemon: the last launch that has left
  alignas(kCacheLine) Atomic<uint32_t> stop;    // by the host
};

struct DaemonArguments {
  const BlockWiring* wiring;  // [blocks]
  BlockState* states;         // [blocks]
  Grid* grid;
  Door* door;
  uint32_t blocks;
  uint32_t quit_polls;  // turns in which nothing moves after which the daemon leaves
  uint32_t bulk;        // 1: large copies are done in bulk, where the GPU can
  uint64_t launch;
};

// In shared memory.
struct Bulk {
  alignas(128) char pieces[kBulkPieces][kBulkPieceBytes];
  uint64_t arrived[kBulkPieces];  // barriers of the hardware
};

// Of a block, in shared memory: what its threads must all know.
struct Shared {
  Task* task;  // to run in this turn; nullptr: none
  uint32_t leave;
  uint32_t reload;
  Phase phase;
  uint32_t changed;        // `context` differs from what is saved
  Task* resident;          // whose contexts are here
  DynamicContext context;  // the dynamic context
  SubmissionEntry entry;   // the static context
  uint32_t movable[kScan];
  uint64_t buffers[kMostBuffers];
  // See Daemon::awaited.
  alignas(uint64_t) char awaited[sizeof(Atomic<uint64_t>)];
  union {
    // What was posted, without the flags.
    alignas(kPostedAlign) char sources[kMostPostedBytes];
    Bulk bulk;
  };
};

}  // namespace gpu
}  // namespace dfccl

#endif  // DFCCL_CUDA_LAYOUT_H_
