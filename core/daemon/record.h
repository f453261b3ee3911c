// SPDX-License-Identifier: Apache-2.0
// Records: where the members of one collective instance meet. The first member
// to arrive makes the record, the last to finish frees it, and a record that
// fails keeps its status for the members that are still to come.
//
// Who may touch what:
//  * a member that has arrived and not finished: all shared words and every
//    arrived slot's buffers; the record cannot go away under it;
//  * anyone holding the lock of the record's shard: everything that is written
//    only under that lock or before arrival (so the monitor and reports can
//    look while the job is stuck).
//
// Members in other processes have slots, too, without an operation: whoever
// receives from their process (core/daemon/cluster.h) moves their words. Between
// BeginReceive and EndReceive such a member counts as one in a data step.
#ifndef DFCCL_CORE_DAEMON_RECORD_H_
#define DFCCL_CORE_DAEMON_RECORD_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/collective.h"
#include "core/daemon/buffer_pool.h"
#include "core/daemon/counter.h"
#include "core/daemon/operation.h"
#include "core/daemon/spin_lock.h"
#include "core/group.h"
#include "core/plans/plan.h"
#include "core/protocol/atomics.h"
#include "core/protocol/progress.h"
#include "core/status.h"

namespace dfccl {

// A member's part of a ragged exchange, in one piece with its index arrays, as it
// also goes to other processes.
struct RaggedSlot {
  int64_t source_rows;
  int64_t result_rows;
  int64_t members;

  // Each has an entry for each member.
  const int64_t* input_offsets() const { return Array(0); }
  const int64_t* send_sizes() const { return Array(1); }
  const int64_t* output_offsets() const { return Array(2); }
  const int64_t* recv_sizes() const { return Array(3); }
  const int64_t* Array(int number) const {
    return reinterpret_cast<const int64_t*>(this + 1) + number * members;
  }
  static int64_t Bytes(int members) {
    return static_cast<int64_t>(sizeof(RaggedSlot) + 4 * members * sizeof(int64_t));
  }
};

struct Record;

// One member's place in a record.
struct alignas(kCacheLine) Slot {
  Record* record = nullptr;  // for ever

  // Written under the shard lock before the member's word says kArrived.
  const void* source = nullptr;  // of a member elsewhere: where its source would begin
  void* result = nullptr;
  void* scratch = nullptr;
  bool arrived = false;
  Operation* operation = nullptr;  // nullptr: has not arrived, or is elsewhere
  uint64_t generation = 0;         // of the operation
  OperationInfo info;
  const RaggedSlot* ragged = nullptr;

  // Of a member elsewhere: the part of its source that is sent here, from byte
  // `kept_begin` of it on; and whether nothing more comes from it. Written under
  // the shard lock.
  void* kept = nullptr;
  int64_t kept_begin = 0;
  int64_t kept_bytes = 0;
  bool received_all = false;

  // 1 while the member is in a data step. Written by the member; read by the
  // members of a failed record (see Record::Quiet).
  Atomic<uint32_t> in_data_step;
  Counter preemptions;  // written by the member, read by reports
  // Sends that have left the member's buffers.
  Atomic<uint32_t> sent;

  ProgressWord progress;
  SleepWord sleep;

  // The member has arrived and its operation has finished; of a member elsewhere:
  // as far as this process is concerned.
  bool ended() const {
    if (operation == nullptr) return received_all;
    const uint64_t word = operation->state.LoadRelaxed();
    return word >> 2 != generation || StateOf(word) == OperationState::kFinished;
  }
};

// A plan and which kinds of waits it has: what a signal must look for.
struct ChosenPlan {
  const Plan* plan = nullptr;
  bool waits_for_one = false;
  bool waits_for_all = false;
};
ChosenPlan ChoosePlan(const PlanKey& key);

// How a collective is carried out: a function of its group and signature.
struct Shape {
  ChosenPlan chosen;
  int64_t source_bytes = 0;    // of one member
  int64_t result_bytes = 0;    // of one member
  int64_t bytes = 0;           // of the larger of the two
  DType dtype = DType::kF32;   // of data steps: movers take bytes as they are
  int64_t align = 1;           // see StaticContext
  int64_t slice_elements = 1;  // see StaticContext
  bool streaming = false;      // non-temporal stores
  bool heavy = false;          // data steps are worth waking workers for
};

struct alignas(kCacheLine) Record {
  // Set by the first member.
  CollectiveId id;
  const Group* group = nullptr;
  Signature signature;
  Shape shape;

  // Written under the shard lock.
  Record* next = nullptr;  // in the bucket or the pool
  int arrived = 0;
  int creator = 0;  // the member whose signature is the record's
  bool stall_reported = false;
  Status status;                // before `failed`
  Atomic<int64_t> complete_ns;  // when the last member arrived; read by members

  // How many members have signalled kArrived + i: a wait for every member looks
  // at one word, and only the last to signal looks for sleepers. Plans with
  // more levels fall back on the members' words.
  static constexpr uint32_t kLevels = kCountedLevels;
  alignas(kCacheLine) Atomic<uint32_t> level[kLevels];

  alignas(kCacheLine) Atomic<uint32_t> failed;
  // Members that must still finish, and sends that have not left.
  alignas(kCacheLine) Atomic<int32_t> remaining;

  int members() const { return group->size(); }
  bool complete() const { return arrived == members(); }
  // A member of this process has arrived, has not finished, and needs one that has
  // not arrived.
  bool Lacks(int member);
  Slot* slots() { return reinterpret_cast<Slot*>(this + 1); }

  // Seen from a member of a failed record: no peer is in a data step, nor will
  // one enter any more. A data step stores in_data_step, then looks at
  // `failed`; a failing record stores `failed`, then looks at in_data_step
  // (SeqCst on both sides, so one sees the other).
  bool Quiet();
};

// A consistent copy of one record, for the monitor and reports.
struct MemberView {
  bool arrived = false;
  bool here = false;        // it has arrived, in this process
  bool ended = false;       // it has finished, before others have come
  bool waited_for = false;  // a callback is registered: the program waits
  uint32_t progress = 0;
  uint64_t preemptions = 0;
  OperationInfo info;
};
struct RecordView {
  CollectiveId id;
  const Group* group = nullptr;
  Signature signature;
  int arrived = 0;
  int creator = 0;
  bool failed = false;
  int64_t bytes = 0;
  int64_t complete_ns = 0;
  std::vector<MemberView> members;
  bool complete() const { return arrived == group->size(); }
  // Whether `member` cannot finish because `peer` has not arrived.
  bool Lacks(int member, int peer) const {
    return members[member].arrived && !members[member].ended && !members[peer].arrived &&
           Needs(signature, group->size(), member, peer, group->placement != nullptr);
  }
};

class RecordTable {
 public:
  // What other processes must know of a record that has failed here.
  struct Failure {
    CollectiveId id;
    const Group* group;
    Status status;
    const std::string* name;  // of the call; nullptr: it has none
    int64_t key;
    uint64_t occurrence, program, launch;
    std::vector<int> absent;
  };
  using OnFail = std::function<void(const Failure&)>;

  // `wake` makes a sleeping task of a failing record ready. `on_fail` hears of
  // failures of groups that reach into other processes, with no lock held.
  RecordTable(BufferPool* buffers, void (*wake)(Operation*), OnFail on_fail)
      : buffers_(buffers), wake_(wake), on_fail_(std::move(on_fail)) {}
  ~RecordTable();

  enum class Arrival : uint8_t { kJoined, kMismatch, kTwice, kFailedBefore };

  // Enters a member's slot into its record, made if need be. The member's
  // progress word is the caller's to signal. kMismatch: it has joined, but its
  // signature is not the record's. kTwice, kFailedBefore: it has not joined;
  // for the latter *status is how the record ended.
  struct Member {
    CollectiveId id;
    const Group* group;
    Signature signature;
    uint16_t member;
    const void* source;
    void* result;
    void* scratch;
    const RaggedSlot* ragged;
  };
  Arrival Join(const Member& member, const Shape& shape, Operation* operation, Status* status);

  // Enters a member of another process, as its first message tells. Its word is
  // the caller's to move. `kept_bytes` > 0: it is going to send part of its source.
  struct RemoteMember {
    CollectiveId id;
    const Group* group;
    Signature signature;
    uint16_t member;
    OperationInfo info;
    int64_t kept_begin, kept_bytes;
  };
  Arrival JoinFromElsewhere(const RemoteMember& member, const Shape& shape);

  // Something of `member`, who is elsewhere, begins to come in. Until EndReceive
  // the record stays and its members' buffers are theirs. nullptr: there is no such
  // record, or it has failed.
  Record* BeginReceive(const CollectiveId& id, const Group* group, uint16_t member);
  // `last`: nothing more comes from that member.
  void EndReceive(Record* record, uint16_t member, bool last);

  // By the last member to finish.
  void Free(Record* record);

  // Fails the record if it still lives, has not failed and, if `arrived` >= 0,
  // has exactly that many members. Wakes its sleeping members.
  // `told`: another process said so, and on_fail is not called.
  bool Fail(const CollectiveId& id, const Group* group, const Status& status, int arrived = -1,
            bool told = false);
  // Another process says that an instance has failed, of which nothing may be known
  // here yet.
  void FailTold(const Failure& failure);

  // Copies of all records for which `wanted` holds, also of failed ones whose
  // members are still ending. `wanted` runs under the record's shard lock.
  std::vector<RecordView> View(const std::function<bool(Record&)>& wanted);

 private:
  static constexpr int kShards = 128;
  static constexpr int kRemembered = 64;  // failed ids per shard
  static constexpr int kSizeClasses = 18;

  struct FailedId {
    CollectiveId id;
    const Group* group = nullptr;
    Status status;
  };
  struct alignas(kCacheLine) Shard {
    SpinLock lock;
    std::vector<Record*> buckets = std::vector<Record*>(16);  // a power of two
    size_t count = 0;
    std::vector<FailedId> failed;  // a ring
    size_t next_failed = 0;
  };
  struct alignas(kCacheLine) FreeList {
    SpinLock lock;
    Record* first = nullptr;
  };

  Shard& ShardOf(const CollectiveId& id) { return shards_[id.hi % kShards]; }
  static Record** Find(Shard* shard, const CollectiveId& id, const Group* group);
  static const FailedId* FindFailed(const Shard& shard, const CollectiveId& id, const Group* group);
  static void Insert(Shard* shard, Record* record);
  static int SizeClass(int members);
  Record* Allocate(const Group* group);
  // The record of a member that arrives; made if need be. nullptr: it has failed
  // before, with *status.
  Record* FindOrMake(Shard* shard, const CollectiveId& id, const Group* group,
                     const Signature& signature, uint16_t member, const Shape& shape,
                     Status* status);
  static void Remember(Shard* shard, const CollectiveId& id, const Group* group,
                       const Status& status);

  BufferPool* const buffers_;
  void (*wake_)(Operation*);
  const OnFail on_fail_;
  Shard shards_[kShards];
  FreeList free_[kSizeClasses];
};

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_RECORD_H_
