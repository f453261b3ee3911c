// SPDX-License-Identifier: Apache-2.0
// How records are found, made, failed, looked at and freed.
#include "core/daemon/record.h"

#include <algorithm>
#include <mutex>
#include <new>

#include "core/hash.h"
#include "core/identity.h"

namespace dfccl {
namespace {

void GiveUpFor(const RecordTable::Failure& failure) {
  if (failure.absent.empty() || failure.name == nullptr) return;
  GiveUp({*failure.name, failure.key, failure.group, failure.occurrence, failure.program,
          failure.launch},
         failure.absent);
}

}  // namespace

ChosenPlan ChoosePlan(const PlanKey& key) {
  struct Cached {
    PlanKey key;
    const Plan* plan = nullptr;
  };
  static thread_local Cached cache[64];
  const uint64_t number =
      static_cast<uint64_t>(key.kind) << 48 ^ static_cast<uint64_t>(key.algorithm) << 40 ^
      static_cast<uint64_t>(key.chunks_per_member) << 32 ^ static_cast<uint64_t>(key.root) << 16 ^
      static_cast<uint64_t>(key.members);
  const uint64_t particulars =
      (key.pairs == nullptr ? 0 : key.pairs->hash) + reinterpret_cast<uintptr_t>(key.placement);
  Cached& cached = cache[MixBits(number ^ particulars) % 64];
  if (cached.plan == nullptr || !(cached.key == key)) cached = {key, &CachedPlan(key)};
  return {cached.plan, cached.plan->waits_for_one, cached.plan->waits_for_every};
}

bool Record::Lacks(int member) {
  if (slots()[member].operation == nullptr || slots()[member].ended()) return false;
  for (int peer = 0; peer < members(); ++peer) {
    if (!slots()[peer].arrived &&
        Needs(signature, members(), member, peer, group->placement != nullptr)) {
      return true;
    }
  }
  return false;
}

bool Record::Quiet() {
  for (int i = 0; i < members(); ++i) {
    if (slots()[i].in_data_step.LoadSeqCst() != 0) return false;
  }
  return true;
}

int RecordTable::SizeClass(int members) {
  int size_class = 0;
  while ((1 << size_class) < members) ++size_class;
  return size_class;
}

Record* RecordTable::Allocate(const Group* group) {
  const int size_class = SizeClass(group->size());
  FreeList& list = free_[size_class];
  Record* record;
  {
    std::lock_guard<SpinLock> lock(list.lock);
    record = list.first;
    if (record != nullptr) list.first = record->next;
  }
  if (record == nullptr) {
    const int slots = 1 << size_class;
    void* memory =
        ::operator new(sizeof(Record) + slots * sizeof(Slot), std::align_val_t{alignof(Record)});
    record = new (memory) Record;
    for (int i = 0; i < slots; ++i) (new (record->slots() + i) Slot)->record = record;
  }
  record->group = group;
  record->remaining.StoreRelaxed(group->size());
  return record;
}

RecordTable::~RecordTable() {
  // Live records are those of operations that nobody finished; their memory
  // goes with the table.
  const auto destroy = [](Record* record, int size_class) {
    for (int i = 0; i < (1 << size_class); ++i) record->slots()[i].~Slot();
    record->~Record();
    ::operator delete(record, std::align_val_t{alignof(Record)});
  };
  for (int size_class = 0; size_class < kSizeClasses; ++size_class) {
    for (Record* record = free_[size_class].first; record != nullptr;) {
      Record* next = record->next;
      destroy(record, size_class);
      record = next;
    }
  }
  for (Shard& shard : shards_) {
    for (Record* record : shard.buckets) {
      while (record != nullptr) {
        Record* next = record->next;
        destroy(record, SizeClass(record->members()));
        record = next;
      }
    }
  }
}

// The link that points to the record, or the nullptr at the end of its bucket.
Record** RecordTable::Find(Shard* shard, const CollectiveId& id, const Group* group) {
  Record** link = &shard->buckets[id.lo & (shard->buckets.size() - 1)];
  while (*link != nullptr && ((*link)->id != id || (*link)->group != group)) {
    link = &(*link)->next;
  }
  return link;
}

const RecordTable::FailedId* RecordTable::FindFailed(const Shard& shard, const CollectiveId& id,
                                                     const Group* group) {
  for (const FailedId& failed : shard.failed) {
    if (failed.id == id && failed.group == group) return &failed;
  }
  return nullptr;
}

void RecordTable::Insert(Shard* shard, Record* record) {
  if (++shard->count > shard->buckets.size()) {
    std::vector<Record*> buckets(2 * shard->buckets.size());
    for (Record* old : shard->buckets) {
      while (old != nullptr) {
        Record* next = old->next;
        Record*& bucket = buckets[old->id.lo & (buckets.size() - 1)];
        old->next = bucket;
        bucket = old;
        old = next;
      }
    }
    shard->buckets.swap(buckets);
  }
  Record*& bucket = shard->buckets[record->id.lo & (shard->buckets.size() - 1)];
  record->next = bucket;
  bucket = record;
}

Record* RecordTable::FindOrMake(Shard* shard, const CollectiveId& id, const Group* group,
                                const Signature& signature, uint16_t member, const Shape& shape,
                                Status* status) {
  Record* record = *Find(shard, id, group);
  if (record != nullptr) {
    if (record->failed.LoadRelaxed() == 0) return record;
    *status = record->status;
    return nullptr;
  }
  if (!shard->failed.empty()) {
    const FailedId* failed = FindFailed(*shard, id, group);
    if (failed != nullptr) {
      *status = failed->status;
      return nullptr;
    }
  }
  record = Allocate(group);
  record->id = id;
  record->signature = signature;
  record->creator = member;
  record->shape = shape;
  Insert(shard, record);
  return record;
}

RecordTable::Arrival RecordTable::Join(const Member& member, const Shape& shape,
                                       Operation* operation, Status* status) {
  Shard& shard = ShardOf(member.id);
  std::lock_guard<SpinLock> lock(shard.lock);
  Record* record =
      FindOrMake(&shard, member.id, member.group, member.signature, member.member, shape, status);
  if (record == nullptr) return Arrival::kFailedBefore;
  Slot& slot = record->slots()[member.member];
  if (slot.arrived) return Arrival::kTwice;
  slot.source = member.source;
  slot.result = member.result;
  slot.scratch = member.scratch;
  slot.ragged = member.ragged;
  slot.arrived = true;
  slot.operation = operation;
  slot.generation = operation->generation;
  slot.info = operation->info;
  operation->record = record;
  operation->slot = &slot;
  if (++record->arrived == record->members()) {
    record->complete_ns.StoreRelaxed(operation->info.submit_ns);
  }
  return member.signature == record->signature ? Arrival::kJoined : Arrival::kMismatch;
}

RecordTable::Arrival RecordTable::JoinFromElsewhere(const RemoteMember& member,
                                                    const Shape& shape) {
  Shard& shard = ShardOf(member.id);
  std::lock_guard<SpinLock> lock(shard.lock);
  Status status;
  Record* record =
      FindOrMake(&shard, member.id, member.group, member.signature, member.member, shape, &status);
  if (record == nullptr) return Arrival::kFailedBefore;
  Slot& slot = record->slots()[member.member];
  if (slot.arrived) return Arrival::kTwice;
  slot.arrived = true;
  slot.info = member.info;
  slot.kept_begin = member.kept_begin;
  slot.kept_bytes = member.kept_bytes;
  if (member.kept_bytes > 0) slot.kept = buffers_->Allocate(member.kept_bytes);
  if (member.signature.kind == Kind::kRaggedAllToAll) {
    slot.ragged = static_cast<const RaggedSlot*>(slot.kept);
  }
  // An address that is only used with offsets from kept_begin on.
  slot.source = reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(slot.kept) -
                                              static_cast<uintptr_t>(member.kept_begin));
  if (++record->arrived == record->members()) {
    record->complete_ns.StoreRelaxed(member.info.submit_ns);
  }
  return member.signature == record->signature ? Arrival::kJoined : Arrival::kMismatch;
}

Record* RecordTable::BeginReceive(const CollectiveId& id, const Group* group, uint16_t member) {
  Shard& shard = ShardOf(id);
  std::lock_guard<SpinLock> lock(shard.lock);
  Record* record = *Find(&shard, id, group);
  if (record == nullptr || record->failed.LoadRelaxed() != 0) return nullptr;
  Slot& slot = record->slots()[member];
  if (!slot.arrived || slot.operation != nullptr || slot.received_all) return nullptr;
  slot.in_data_step.StoreSeqCst(1);
  return record;
}

void RecordTable::EndReceive(Record* record, uint16_t member, bool last) {
  Slot& slot = record->slots()[member];
  bool freed = false;
  {
    std::lock_guard<SpinLock> lock(ShardOf(record->id).lock);
    slot.in_data_step.StoreRelease(0);
    if (last || record->failed.LoadRelaxed() != 0) {
      slot.received_all = true;
      freed = record->remaining.FetchSubAcqRel(1) == 1;
    }
  }
  if (freed) Free(record);
}

void RecordTable::Remember(Shard* shard, const CollectiveId& id, const Group* group,
                           const Status& status) {
  if (shard->failed.size() < kRemembered) shard->failed.emplace_back();
  shard->failed[shard->next_failed++ % kRemembered] = {id, group, status};
}

void RecordTable::Free(Record* record) {
  Shard& shard = ShardOf(record->id);
  const bool failed = record->failed.LoadRelaxed() != 0;
  {
    std::lock_guard<SpinLock> lock(shard.lock);
    *Find(&shard, record->id, record->group) = record->next;
    --shard.count;
    if (failed) Remember(&shard, record->id, record->group, record->status);
  }
  for (int i = 0; i < record->members(); ++i) {
    Slot& slot = record->slots()[i];
    slot.arrived = false;
    slot.operation = nullptr;
    buffers_->Free(slot.kept);
    slot.kept = nullptr;
    slot.received_all = false;
    slot.sent.StoreRelaxed(0);
    slot.in_data_step.StoreRelaxed(0);
    slot.preemptions.Reset();
    new (&slot.progress) ProgressWord;
  }
  record->arrived = 0;
  record->stall_reported = false;
  if (failed) record->status = Status();
  record->failed.StoreRelaxed(0);
  record->complete_ns.StoreRelaxed(0);
  for (Atomic<uint32_t>& level : record->level) level.StoreRelaxed(0);
  FreeList& list = free_[SizeClass(record->members())];
  std::lock_guard<SpinLock> lock(list.lock);
  record->next = list.first;
  list.first = record;
}

bool RecordTable::Fail(const CollectiveId& id, const Group* group, const Status& status,
                       int arrived, bool told) {
  Shard& shard = ShardOf(id);
  std::unique_lock<SpinLock> lock(shard.lock);
  Record* record = *Find(&shard, id, group);
  if (record == nullptr || record->failed.LoadRelaxed() != 0) return false;
  if (arrived >= 0 && record->arrived != arrived) return false;
  if (record->remaining.LoadRelaxed() == 0) return false;  // about to be freed
  record->status = status;
  // SeqCst: partners are the looks at `failed` after TrySleep's announcement
  // and after in_data_step.
  record->failed.StoreSeqCst(1);
  Failure failure{id, group, status, nullptr, 0, 0, 0, 0, {}};
  int32_t leaving = 0;  // who will not finish by themselves
  for (int i = 0; i < record->members(); ++i) {
    Slot& slot = record->slots()[i];
    if (!slot.arrived) {
      failure.absent.push_back(i);
      ++leaving;
      continue;
    }
    failure.name = slot.info.name;
    failure.key = slot.info.key;
    failure.occurrence = slot.info.occurrence;
    failure.program = slot.info.program;
    failure.launch = slot.info.launch;
    if (slot.operation == nullptr) {
      if (slot.received_all || slot.in_data_step.LoadRelaxed() != 0) continue;
      slot.received_all = true;
      ++leaving;
    } else if (slot.sleep.TryWakeAny()) {
      wake_(slot.operation);
    }
  }
  // All that have arrived may have finished: then there is nobody else to free it.
  const bool last = leaving > 0 && record->remaining.FetchSubAcqRel(leaving) == leaving;
  GiveUpFor(failure);
  lock.unlock();
  if (last) Free(record);
  if (!told && group->placement != nullptr) on_fail_(failure);
  return true;
}

void RecordTable::FailTold(const Failure& failure) {
  if (Fail(failure.id, failure.group, failure.status, /*arrived=*/-1, /*told=*/true)) return;
  Shard& shard = ShardOf(failure.id);
  std::lock_guard<SpinLock> lock(shard.lock);
  if (*Find(&shard, failure.id, failure.group) != nullptr) return;
  if (FindFailed(shard, failure.id, failure.group) != nullptr) return;
  Remember(&shard, failure.id, failure.group, failure.status);
  GiveUpFor(failure);
}

std::vector<RecordView> RecordTable::View(const std::function<bool(Record&)>& wanted) {
  std::vector<RecordView> views;
  for (Shard& shard : shards_) {
    std::lock_guard<SpinLock> lock(shard.lock);
    for (Record* record : shard.buckets) {
      for (; record != nullptr; record = record->next) {
        if (!wanted(*record)) continue;
        RecordView view;
        view.id = record->id;
        view.group = record->group;
        view.signature = record->signature;
        view.arrived = record->arrived;
        view.creator = record->creator;
        view.failed = record->failed.LoadRelaxed() != 0;
        view.bytes = record->shape.bytes;
        view.complete_ns = record->complete_ns.LoadRelaxed();
        view.members.resize(record->members());
        for (int i = 0; i < record->members(); ++i) {
          Slot& slot = record->slots()[i];
          if (!slot.arrived) continue;
          MemberView& member = view.members[i];
          member.arrived = true;
          member.here = slot.operation != nullptr;
          member.ended = slot.ended();
          member.waited_for =
              member.here && slot.operation->state.LoadRelaxed() ==
                                 StateWord(slot.generation, OperationState::kRegistered);
          member.progress = slot.progress.value();
          member.preemptions = slot.preemptions.Load();
          member.info = slot.info;
        }
        views.push_back(std::move(view));
      }
    }
  }
  return views;
}

}  // namespace dfccl
