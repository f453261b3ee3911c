// SPDX-License-Identifier: Apache-2.0
// The loop of a daemon, and what the interpreter can do on a CPU.
#include "core/daemon/daemon.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <thread>

#include "core/daemon/clock.h"
#include "core/daemon/cluster.h"
#include "core/daemon/crew.h"
#include "core/daemon/describe.h"

namespace dfccl {
namespace {

constexpr int kPoolChunk = 64;  // operations

}  // namespace

void SignalProgress(Record* record, uint16_t member, uint32_t value) {
  Slot* slots = record->slots();
  const int members = record->members();
  bool woke = false;
  const auto wake = [&](uint16_t awaited) {
    for (int i = 0; i < members; ++i) {
      if (!slots[i].sleep.TryWake(awaited, value)) continue;
      slots[i].operation->daemon->Wake(slots[i].operation);
      woke = true;
    }
  };
  const uint32_t before = slots[member].progress.value();
  slots[member].progress.Signal(value);
  if (record->shape.chosen.waits_for_all) {
    for (uint32_t level = before; level < value && level < Record::kLevels; ++level) {
      // Partner: the looks at the level in Machine::Reached and in TrySleep.
      const uint32_t signalled = record->level[level].FetchAddSeqCst(1) + 1;
      if (signalled == static_cast<uint32_t>(members)) wake(kEveryMember);
    }
  }
  if (record->shape.chosen.waits_for_one) wake(member);
  Operation* operation = slots[member].operation;  // nullptr: it is elsewhere
  if (woke && record->shape.heavy && operation != nullptr) operation->daemon->CallHelp();
}

// What the interpreter can do for one member: the CPU side of its steps.
class Daemon::Machine {
 public:
  Machine(Daemon* daemon, Operation* operation, int64_t deadline_ns)
      : daemon_(*daemon),
        operation_(*operation),
        record_(*operation->record),
        slot_(*operation->slot),
        deadline_ns_(deadline_ns) {}

  // Acquire: partner is the store in RecordTable::Fail, after the status.
  bool Failed() const { return record_.failed.LoadAcquire() != 0; }

  bool Reached(uint16_t member, uint32_t value) const {
    if (member == kOwnSends) return slot_.sent.LoadAcquire() >= value;
    if (member != kEveryMember) return record_.slots()[member].progress.Reached(value);
    const uint32_t level = value - kArrived;
    if (level < Record::kLevels) {
      // Acquire: partners are all members' additions in SignalProgress.
      return record_.level[level].LoadAcquire() == static_cast<uint32_t>(record_.members());
    }
    return Laggard(value) == kEveryMember;
  }

  void Signal(uint32_t value) { SignalProgress(&record_, operation_.member, value); }

  int64_t Count(const Step& step) const {
    if (record_.signature.kind != Kind::kRaggedAllToAll) return record_.signature.count;
    const BufferRef& source = operation_.fixed.list.refs[step.source_begin];
    return slot_.ragged->recv_sizes()[source.member] * record_.signature.count;
  }

  bool Reduce(const Step& step, int64_t begin, int64_t end) {
    if (!BeginDataStep()) return false;
    const BufferRef* refs = operation_.fixed.list.refs;
    std::vector<ReduceSource>& sources = daemon_.sources_;
    std::vector<ReduceDestination>& destinations = daemon_.destinations_;
    sources.clear();
    destinations.clear();
    for (uint32_t i = step.source_begin; i < step.source_end; ++i) {
      sources.push_back({Address(refs[i], begin), refs[i].kind == BufferKind::kScratch});
    }
    bool cached = false;  // a destination was just read, or is read soon
    for (uint32_t i = step.destination_begin; i < step.destination_end; ++i) {
      destinations.push_back({Address(refs[i], begin), refs[i].kind == BufferKind::kScratch});
      const Slot& slot = record_.slots()[refs[i].member];
      cached |= slot.source == slot.result || refs[i].kind == BufferKind::kScratch;
    }
    if (sources.empty()) {
      const int64_t bytes = (end - begin) * DTypeSize(record_.signature.dtype);
      for (const ReduceDestination& to : destinations) std::memset(to.data, 0, bytes);
      EndDataStep();
      return true;
    }
    ReduceArgs args;
    args.op = record_.signature.op;
    args.dtype = record_.shape.dtype;
    args.sources = sources.data();
    args.source_count = static_cast<int>(sources.size());
    args.destinations = destinations.data();
    args.destination_count = static_cast<int>(destinations.size());
    args.count = end - begin;
    args.mean_divisor = step.finalize ? record_.members() : 0;
    args.streaming_stores = record_.shape.streaming && !cached;
    dfccl::Reduce(args);
    if (record_.shape.heavy)
      daemon_.core.StoreRelaxed(static_cast<uint32_t>(std::max(0, sched_getcpu())));
    EndDataStep();
    return true;
  }

  // Whether the index arrays fit each other and the buffers, where rows come to this
  // member and, as other processes take what is sent to them, where it sends some.
  bool Check() {
    if (!BeginDataStep()) return false;
    const int self = operation_.member;
    std::string fault;
    for (int peer = 0; peer < record_.members() && fault.empty(); ++peer) {
      fault = Fault(peer, self);
      if (fault.empty() && !record_.group->IsHere(peer)) fault = Fault(self, peer);
    }
    EndDataStep();
    if (fault.empty()) return true;
    daemon_.environment_.table->Fail(
        record_.id, record_.group,
        Status(StatusCode::kInvalidArgument,
               daemon_.environment_.describer->Wrong(slot_.info, record_.signature, fault)));
    return false;
  }

  void Send(const Step& step) { daemon_.environment_.cluster->Send(&operation_, step); }

  bool ShouldYield() {
    if (NowNs() >= deadline_ns_) return true;
    if (!daemon_.environment_.preemption) return false;
    daemon_.TakeIn();
    return daemon_.order_.HasAbove(operation_.priority);
  }

  void Polled(uint32_t polls) { daemon_.stickiness_.Succeeded(polls); }

  // Blocked at this wait: true if the task is asleep now.
  bool TrySleep(const Step& wait) {
    uint16_t awaited = wait.member;
    const uint32_t level = wait.value - kArrived;
    if (awaited == kEveryMember && level >= Record::kLevels) {
      awaited = Laggard(wait.value);
      if (awaited == kEveryMember) return false;
    }
    return slot_.sleep.TrySleep(awaited, wait.value, [&] {
      if (record_.failed.LoadSeqCst() != 0) return true;
      if (awaited == kOwnSends) return slot_.sent.LoadSeqCst() >= wait.value;
      if (awaited != kEveryMember) {
        return record_.slots()[awaited].progress.ReachedSeqCst(wait.value);
      }
      return record_.level[level].LoadSeqCst() == static_cast<uint32_t>(record_.members());
    });
  }

 private:
  // See Record::Quiet. False: the collective has failed.
  bool BeginDataStep() {
    slot_.in_data_step.StoreSeqCst(1);
    if (record_.failed.LoadSeqCst() == 0) return true;
    EndDataStep();
    return false;
  }
  // Release: partner is the look in Record::Quiet.
  void EndDataStep() { slot_.in_data_step.StoreRelease(0); }

  // What is wrong with the rows that one member sends to another; "": nothing.
  std::string Fault(int sender, int receiver) const {
    const RaggedSlot& to = *record_.slots()[receiver].ragged;
    const RaggedSlot& from = *record_.slots()[sender].ragged;
    const int64_t rows = from.send_sizes()[receiver];
    const auto device = [this](int member) {
      return "device " + std::to_string(record_.group->members[member]);
    };
    const std::string sends =
        device(sender) + " sends " + std::to_string(rows) + " rows to " + device(receiver);
    if (rows < 0) return sends;
    const int64_t expected = to.recv_sizes()[sender];
    if (rows != expected) {
      return sends + ", whose recv_sizes has " + std::to_string(expected) + " for them";
    }
    const auto fits = [rows](int64_t offset, int64_t all) {
      return rows == 0 || (offset >= 0 && offset <= all - rows);
    };
    const int64_t input = from.input_offsets()[receiver];
    const int64_t output = from.output_offsets()[receiver];
    if (!fits(input, from.source_rows)) {
      return sends + " from row " + std::to_string(input) + " of its operand, which has " +
             std::to_string(from.source_rows) + " rows";
    }
    if (!fits(output, to.result_rows)) {
      return sends + ", to row " + std::to_string(output) + " of its output, which has " +
             std::to_string(to.result_rows) + " rows";
    }
    return "";
  }

  // The first member whose word is below `value`; kEveryMember: none.
  uint16_t Laggard(uint32_t value) const {
    for (int i = 0; i < record_.members(); ++i) {
      if (!record_.slots()[i].progress.Reached(value)) return static_cast<uint16_t>(i);
    }
    return kEveryMember;
  }

  char* Address(const BufferRef& ref, int64_t element) const {
    const Slot& slot = record_.slots()[ref.member];
    const Signature& signature = record_.signature;
    const bool ragged = signature.kind == Kind::kRaggedAllToAll;
    int64_t row = ref.block;  // of `count` elements
    switch (ref.kind) {
      case BufferKind::kSource:
        if (ragged) row = slot.ragged->input_offsets()[ref.block];
        return static_cast<char*>(const_cast<void*>(slot.source)) +
               (row * signature.count + element) * DTypeSize(signature.dtype);
      case BufferKind::kResult:
        if (ragged) row = record_.slots()[ref.block].ragged->output_offsets()[ref.member];
        return static_cast<char*>(slot.result) +
               (row * signature.count + element) * DTypeSize(signature.dtype);
      case BufferKind::kScratch:
        break;
    }
    return static_cast<char*>(slot.scratch) +
           (row * signature.count + element) * DTypeSize(AccumulationType(signature.dtype));
  }

  Daemon& daemon_;
  Operation& operation_;
  Record& record_;
  Slot& slot_;
  const int64_t deadline_ns_;
};

Daemon::Daemon(int64_t device, const DaemonEnvironment& environment)
    : device_(device),
      environment_(environment),
      first_sequence_(environment.first_sequence),
      submissions_(environment.queue_capacity, environment.first_sequence),
      next_sequence_(environment.first_sequence) {}

Daemon::~Daemon() = default;

Operation* Daemon::Allocate(uint64_t* sequence) {
  // SeqCst: partner is the monitor's look before it sleeps (Monitor::Notice).
  *sequence = next_sequence_.FetchAddSeqCst(1);
  std::lock_guard<SpinLock> lock(pool_lock_);
  if (free_ == nullptr) {
    chunks_.emplace_back(new Operation[kPoolChunk]);
    for (int i = 0; i < kPoolChunk; ++i) {
      Operation* operation = &chunks_.back()[i];
      operation->daemon = this;
      operation->next = free_;
      free_ = operation;
    }
  }
  Operation* operation = free_;
  free_ = operation->next;
  operation->next = nullptr;
  return operation;
}

void Daemon::Release(Operation* operation) {
  if (operation->owned_result != nullptr) {
    environment_.buffers->Free(operation->owned_result);
    operation->owned_result = nullptr;
  }
  if (!operation->status.ok()) operation->status = Status();
  operation->record = nullptr;
  operation->slot = nullptr;
  operation->started = false;
  operation->saved = {};
  ++operation->generation;
  operation->state.StoreRelaxed(StateWord(operation->generation, OperationState::kPending));
  std::lock_guard<SpinLock> lock(pool_lock_);
  operation->next = free_;
  free_ = operation;
}

void Daemon::Wake(Operation* operation) {
  woken_.Push(operation);
  if (lifecycle_.Schedule()) environment_.crew->Enqueue(this);
}

void Daemon::CallHelp() { environment_.crew->CallWorkers(); }

bool Daemon::Run(int64_t deadline_ns) {
  if (quit_) {
    quit_ = false;
    counters_.restarts.Add(1);
  }
  const uint64_t share = share_.LoadRelaxed();
  if (share != applied_share_) {
    applied_share_ = share;
    stickiness_.Resize(static_cast<uint32_t>(share >> 32), static_cast<uint32_t>(share));
  }
  bool leave = false;
  for (uint32_t turn = 1; !leave; ++turn) {
    TakeIn();
    Operation* operation = NextTask();
    if (operation != nullptr) {
      leave = RunTask(operation, deadline_ns) || (turn % 16 == 0 && NowNs() >= deadline_ns);
    } else if (unposted_ != nullptr && !PostLeftovers()) {
      std::this_thread::yield();  // to whoever empties the completion queue
      leave = true;
    } else {
      // Before the daemon may be another thread's.
      quit_ = unfinished_ > 0;
      if (quit_) counters_.quits.Add(1);
      if (lifecycle_.TryPark()) return true;
      if (quit_) counters_.quits.Add(-1);
      quit_ = false;
    }
  }
  if (lifecycle_.Reschedule()) environment_.crew->Enqueue(this);
  return false;
}

void Daemon::TakeIn() {
  Operation* operation;
  while (submissions_.TryPop(&operation)) {
    ++unfinished_;
    order_.Push(operation);
  }
  for (WakeNode* node = woken_.TakeAll(); node != nullptr;) {
    WakeNode* next = node->next.Load();
    --asleep_;
    MakeReady(static_cast<Operation*>(node), /*front=*/false);
    node = next;
  }
}

void Daemon::MakeReady(Operation* operation, bool front) {
  if (!environment_.preemption && operation == running_.resident()) {
    held_ = operation;
  } else if (front) {
    order_.PushFront(operation);
  } else {
    order_.Push(operation);
  }
}

Operation* Daemon::NextTask() {
  if (!environment_.preemption && running_.resident() != nullptr) {
    Operation* held = held_;
    held_ = nullptr;
    return held;
  }
  return static_cast<Operation*>(order_.Pop());
}

// True: leave the daemon to others for now.
bool Daemon::RunTask(Operation* operation, int64_t deadline_ns) {
  if (operation->record == nullptr) {
    Finish(operation, operation->status);
    return false;
  }
  running_.Load(operation);
  DynamicContext& context = running_.context();
  Machine machine(this, operation, deadline_ns);
  for (;;) {
    context.budget = stickiness_.Budget(static_cast<uint32_t>(std::min<uint64_t>(asleep_, 32)));
    switch (Interpret(operation->fixed, &context, running_.changed(), machine)) {
      case Outcome::kDone:
        Finish(operation, Status());
        return false;

      case Outcome::kFailed:
        if (operation->group->placement != nullptr) environment_.cluster->Cancel(operation);
        if (!operation->record->Quiet()) {
          // A peer is in a data step with our buffers: at most one slice long.
          MakeReady(operation, /*front=*/false);
          std::this_thread::yield();
          return true;
        }
        Finish(operation, operation->record->status);
        return false;

      case Outcome::kYielded:
        MakeReady(operation, /*front=*/true);
        return NowNs() >= deadline_ns;

      case Outcome::kBlocked:
        stickiness_.Failed();
        ++asleep_;
        if (machine.TrySleep(operation->fixed.list.steps[context.step])) return false;
        --asleep_;
        break;
    }
  }
}

void Daemon::Finish(Operation* operation, const Status& status) {
  Flight flight;
  flight.finish_ns = NowNs();
  flight.code = status.code();
  if (!status.ok()) flight.error = status.message();
  flight.bytes = operation->bytes;
  flight.info = operation->info;
  flight.group = operation->group;
  flight.signature = operation->signature;
  Record* record = operation->record;
  if (record != nullptr) {
    flight.complete_ns = record->complete_ns.LoadRelaxed();
    flight.preemptions = operation->slot->preemptions.Load();
  }
  flights_.Add(flight);
  if (status.ok()) {
    counters_.completed.Add(1);
    counters_.bytes.Add(operation->bytes);
    counters_.largest_wait_ns.Max(
        static_cast<uint64_t>(std::max<int64_t>(0, flight.complete_ns - flight.info.submit_ns)));
  } else {
    operation->status = status;
    counters_.failed.Add(1);
  }
  if (running_.resident() == operation) running_.Clear();
  --unfinished_;

  environment_.buffers->Free(operation->scratch);
  operation->scratch = nullptr;
  environment_.buffers->Free(operation->staged_source);
  operation->staged_source = nullptr;
  environment_.buffers->Free(operation->ragged);
  operation->ragged = nullptr;
  // Acquire and release: the last member frees what all have used.
  if (record != nullptr && record->remaining.FetchSubAcqRel(1) == 1) {
    environment_.table->Free(record);
  }
  // Release: partner is the acquire in Runtime::Finished. Without a registered
  // callback the operation is its owner's from here on.
  const uint64_t before =
      operation->state.ExchangeAcqRel(StateWord(operation->generation, OperationState::kFinished));
  if (StateOf(before) != OperationState::kPending) Post(operation);
}

void Daemon::Post(Operation* operation) {
  if (environment_.crew->TryPost(operation)) return;
  operation->next = unposted_;
  unposted_ = operation;
}

bool Daemon::PostLeftovers() {
  while (unposted_ != nullptr) {
    Operation* operation = unposted_;
    Operation* next = operation->next;  // it may be gone once it is posted
    if (!environment_.crew->TryPost(operation)) return false;
    unposted_ = next;
  }
  return true;
}

}  // namespace dfccl
