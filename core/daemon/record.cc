// SPDX-License-Identifier: Apache-2.0
// How records are found, made, failed, looked at and freed.
#include "core/daemon/record.h"

#include <algorithm>
#include <mutex>
#include <new>

#include "core/hash.h"
#include "core/identity.h"

namespace dfccl {

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
  Cached& cached = cache[MixBits(number ^ (key.pairs == nullptr ? 0 : key.pairs->hash)) % 64];
  if (cached.plan == nullptr || !(cached.key == key)) cached = {key, &CachedPlan(key)};
  return {cached.plan, cached.plan->waits_for_one, cached.plan->waits_for_every};
}

bool Record::Lacks(int member) {
  if (slots()[member].operation == nullptr || slots()[member].ended()) return false;
  for (int peer = 0; peer < members(); ++peer) {
    if (slots()[peer].operation == nullptr && Needs(signature, members(), member, peer)) {
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
    for (int i = 0; i < slots; ++i) new (record->slots() + i) Slot;
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

RecordTable::Arrival RecordTable::Join(const Member& member, const Shape& shape,
                                       Operation* operation, Status* status) {
  Shard& shard = ShardOf(member.id);
  std::lock_guard<SpinLock> lock(shard.lock);
  Record* record = *Find(&shard, member.id, member.group);
  if (record == nullptr) {
    if (!shard.failed.empty()) {
      const FailedId* failed = FindFailed(shard, member.id, member.group);
      if (failed != nullptr) {
        *status = failed->status;
        return Arrival::kFailedBefore;
      }
    }
    record = Allocate(member.group);
    record->id = member.id;
    record->signature = member.signature;
    record->creator = member.member;
    record->shape = shape;
    Insert(&shard, record);
  } else if (record->failed.LoadRelaxed() != 0) {
    *status = record->status;
    return Arrival::kFailedBefore;
  }
  Slot& slot = record->slots()[member.member];
  if (slot.operation != nullptr) return Arrival::kTwice;
  slot.source = member.source;
  slot.result = member.result;
  slot.scratch = member.scratch;
  slot.ragged = member.ragged;
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

void RecordTable::Free(Record* record) {
  Shard& shard = ShardOf(record->id);
  const bool failed = record->failed.LoadRelaxed() != 0;
  {
    std::lock_guard<SpinLock> lock(shard.lock);
    *Find(&shard, record->id, record->group) = record->next;
    --shard.count;
    if (failed) {
      if (shard.failed.size() < kRemembered) shard.failed.emplace_back();
      shard.failed[shard.next_failed++ % kRemembered] = {record->id, record->group, record->status};
    }
  }
  for (int i = 0; i < record->members(); ++i) {
    Slot& slot = record->slots()[i];
    slot.operation = nullptr;
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
                       int arrived) {
  Shard& shard = ShardOf(id);
  std::unique_lock<SpinLock> lock(shard.lock);
  Record* record = *Find(&shard, id, group);
  if (record == nullptr || record->failed.LoadRelaxed() != 0) return false;
  if (arrived >= 0 && record->arrived != arrived) return false;
  if (record->remaining.LoadRelaxed() == 0) return false;  // about to be freed
  record->status = status;
  const int32_t absentees = record->members() - record->arrived;
  // All that have arrived may have finished: then there is nobody else to free it.
  const bool last = record->remaining.FetchSubAcqRel(absentees) == absentees;
  // SeqCst: partners are the looks at `failed` after TrySleep's announcement
  // and after in_data_step.
  record->failed.StoreSeqCst(1);
  std::vector<int> absent;
  const OperationInfo* info = nullptr;
  for (int i = 0; i < record->members(); ++i) {
    Slot& slot = record->slots()[i];
    if (slot.operation == nullptr) {
      absent.push_back(i);
      continue;
    }
    info = &slot.info;
    if (slot.sleep.TryWakeAny()) wake_(slot.operation);
  }
  if (!absent.empty() && info != nullptr && info->name != nullptr) {
    GiveUp({*info->name, info->key, group, info->occurrence, info->program, info->launch}, absent);
  }
  lock.unlock();
  if (last) Free(record);
  return true;
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
          if (slot.operation == nullptr) continue;
          MemberView& member = view.members[i];
          member.arrived = true;
          member.ended = slot.ended();
          member.waited_for = slot.operation->state.LoadRelaxed() ==
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
