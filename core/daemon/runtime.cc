// SPDX-License-Identifier: Apache-2.0
// The runtime behind core/runtime.h: owns the daemons, the record table, the
// crew and the monitor, and turns submissions into tasks.
#include "core/runtime.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/daemon/buffer_pool.h"
#include "core/daemon/clock.h"
#include "core/daemon/cluster.h"
#include "core/daemon/crew.h"
#include "core/daemon/daemon.h"
#include "core/daemon/describe.h"
#include "core/daemon/huge_pages.h"
#include "core/daemon/monitor.h"
#include "core/daemon/operation.h"
#include "core/daemon/options.h"
#include "core/daemon/record.h"
#include "core/group.h"
#include "core/hash.h"
#include "core/plans/choice.h"
#include "core/plans/plan.h"
#include "core/reduce/reduce.h"

namespace dfccl {
namespace {

// Bytes read and written by all members from which on waking a worker pays.
constexpr int64_t kHeavyBytes = int64_t{4} << 20;
// Results from this size on are asked for in large pages.
constexpr int64_t kHugePagesBytes = int64_t{4} << 20;
// Bytes of all members from which on moving them takes more than a few us.
constexpr int64_t kNestedBytes = int64_t{32} << 10;
// How long a submitting thread may run daemons.
constexpr int64_t kDriveNs = 200'000;
// and, of a program that has nothing else to do meanwhile, longer by the time that all
// members' data takes one thread.
constexpr int64_t kDriveBytesPerNs = 8;
// How long a submitting thread looks for what other processes send: since something
// came, and in all. Long, since a member that leaves is woken too late for the next call,
// which makes its peers leave. While nothing comes it offers its core to others.
constexpr int64_t kLingerNs = 500'000;
constexpr int64_t kMostLingerNs = 2'000'000;
// Longest time-out, so that deadlines don't overflow.
constexpr int64_t kMostNs = int64_t{1} << 61;
constexpr int64_t kShutdownNs = 1'000'000'000;

int AvailableCores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Empty arrays may have no address, which memcpy must not be given.
void CopyBytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

// Daemons by device; replaced as a whole when one is added.
struct DaemonMap {
  explicit DaemonMap(size_t entries) : slots(entries) {}
  Daemon* Find(int64_t device) const {
    for (size_t i = MixBits(device);; ++i) {
      Daemon* daemon = slots[i & (slots.size() - 1)];
      if (daemon == nullptr || daemon->device() == device) return daemon;
    }
  }
  void Insert(Daemon* daemon) {
    size_t i = MixBits(daemon->device());
    while (slots[i & (slots.size() - 1)] != nullptr) ++i;
    slots[i & (slots.size() - 1)] = daemon;
    daemons.push_back(daemon);
  }
  std::vector<Daemon*> slots;    // a power of two, at most half full
  std::vector<Daemon*> daemons;  // in the order of their creation
};

class RuntimeImpl : public Runtime {
 public:
  RuntimeImpl(const RuntimeOptions& options, const InternalOptions& internal)
      : options_(options),
        internal_(internal),
        table_(
            &buffers_, [](Operation* operation) { operation->daemon->Wake(operation); },
            [this](const RecordTable::Failure& failure) { cluster_.TellFailed(failure); }),
        crew_(
            options.workers > 0 ? options.workers : AvailableCores(),
            [](void* runtime) { static_cast<RuntimeImpl*>(runtime)->monitor_->Attend(); }, this),
        describer_(&sites_,
                   [this](const Signature& signature, const Group& group) {
                     return PlanRulesNow().Choose(signature, group.size(), group.placement);
                   }),
        cluster_({&table_, &sites_, &describer_, &crew_,
                  [this](const Signature& signature, const Group& group) {
                    return ShapeOf(signature, group);
                  },
                  [this](const Ended& ended) { NoteEnded(ended); }, [this] { Announced(); }}) {
    maps_.push_back(std::make_unique<DaemonMap>(16));
    map_.StoreRelease(maps_.back().get());
    SetPlanRules(options_.plan_rules);
    monitor_ = std::make_unique<Monitor>(
        options_, &table_, &crew_, &cluster_, &describer_,
        [](void* runtime) { return static_cast<RuntimeImpl*>(runtime)->Sum(&Daemon::submitted); },
        [](void* runtime) { return static_cast<RuntimeImpl*>(runtime)->Sum(&Daemon::finished); },
        this);
  }

  const Group* InternGroup(const std::vector<int64_t>& members) override {
    return dfccl::InternGroup(members);
  }

  Operation* Submit(const Submission& submission) override;
  bool Finished(Operation* operation, Status* status) override;
  bool OnFinish(Operation* operation, Callback function, void* argument, bool blocks) override;
  void Collect(Operation* operation, void* destination) override;
  void Release(Operation* operation) override { operation->daemon->Release(operation); }
  bool Cancel(Operation* operation, const Status& status) override;
  void Abandon(int64_t device, uint64_t program, uint64_t launch, const Status& status) override;
  Status JoinCluster(int process, std::unordered_map<int64_t, int> process_of,
                     std::vector<int> host_of, int64_t peer_timeout_ns) override;
  Status AddLink(int process, const std::vector<int>& sockets, int memory) override {
    return cluster_.AddLink(process, sockets, memory);
  }
  int ThreadsQuestion() override { return cluster_.question(); }
  void AnswerThreads(int threads) override { cluster_.AnswerThreads(threads); }
  void SetDown(int process, const std::string& reason) override {
    cluster_.SetDown(process, Status(StatusCode::kAborted, reason));
  }
  Status SendNote(int process, const std::string& text) override {
    return cluster_.SendNote(process, text);
  }
  int NotesReady() override { return cluster_.notes_ready(); }
  std::vector<Note> TakeNotes() override { return cluster_.TakeNotes(); }
  void GiveUpBefore(uint32_t era, const std::string& reason) override {
    cluster_.GiveUpBefore(era, Status(StatusCode::kAborted, reason));
  }
  void LeaveOut(int process, const std::string& reason) override {
    cluster_.LeaveOut(process, Status(StatusCode::kAborted, reason));
  }
  int StandIn(int64_t timeout_ns) override;
  void RegisterLoaded(uint64_t program, uint64_t lowered) override {
    sites_.RegisterLoaded(program, lowered);
  }
  void RegisterSite(uint64_t program, int32_t site, SiteInfo info) override {
    sites_.Register(program, site, std::move(info));
  }
  SiteInfo FindSite(uint64_t program, int32_t site) const override {
    return sites_.Find(program, site);
  }
  bool SetPlanRules(const std::vector<PlanRule>& rules) override;
  uint64_t PlanRulesHash() const override { return PlanRulesNow().hash(); }
  FlightReport Report() override;

  // False: threads are still in foreign code.
  bool Stop();

 private:
  Daemon* DaemonOf(int64_t device);
  Daemon* AddDaemon(int64_t device);
  void NoteEnded(const Ended& ended);
  void Announced();
  int StandInForAll();
  void FailWhatAwaits(const Ended& ended);
  void FailIfAwaitsEnded(uint64_t program, uint64_t launch);
  uint64_t Sum(uint64_t (Daemon::*count)() const);
  Shape ShapeOf(const Signature& signature, const Group& group) const;
  Shape ShapeOf(const Signature& signature, const Group& group, int64_t source_bytes,
                int64_t result_bytes) const;
  // Acquire: partner is the release in SetPlanRules.
  const PlanRules& PlanRulesNow() const { return *plan_rules_.LoadAcquire(); }
  const RaggedSlot* TakeRagged(const RaggedPart& part, Operation* operation, void* result);
  bool Enter(Operation* operation, const Submission& submission);
  void Linger(Operation* operation, Daemon* daemon);

  const RuntimeOptions options_;
  const InternalOptions internal_;

  Atomic<const PlanRules*> plan_rules_;
  std::mutex plan_rules_mutex_;
  std::deque<PlanRules> all_plan_rules_;  // a report may still read old ones

  BufferPool buffers_;
  SiteTable sites_;
  RecordTable table_;
  Crew crew_;
  const Describer describer_;
  Cluster cluster_;
  Atomic<uint32_t> stopped_;

  Atomic<const DaemonMap*> map_;
  std::mutex daemons_mutex_;
  std::vector<std::unique_ptr<DaemonMap>> maps_;  // old ones may still be read
  std::vector<std::unique_ptr<Daemon>> daemons_;

  static constexpr size_t kRememberedEnds = 256;
  Atomic<uint32_t> any_ended_;  // so that the usual submission takes no lock
  std::mutex ended_mutex_;
  std::deque<Ended> ended_;  // the newest last

  std::mutex announced_mutex_;
  std::condition_variable announced_condition_;
  bool announced_ = false;

  std::unique_ptr<Monitor> monitor_;
};

Daemon* RuntimeImpl::DaemonOf(int64_t device) {
  // Acquire: partner is the release in AddDaemon.
  Daemon* daemon = map_.LoadAcquire()->Find(device);
  return daemon != nullptr ? daemon : AddDaemon(device);
}

Daemon* RuntimeImpl::AddDaemon(int64_t device) {
  std::lock_guard<std::mutex> lock(daemons_mutex_);
  const DaemonMap& old = *maps_.back();
  if (Daemon* daemon = old.Find(device)) return daemon;
  const DaemonEnvironment environment = {&table_,
                                         &buffers_,
                                         &crew_,
                                         &cluster_,
                                         &describer_,
                                         options_.preemption,
                                         internal_.queue_capacity,
                                         options_.first_sequence};
  daemons_.push_back(std::make_unique<Daemon>(device, environment));
  const size_t count = daemons_.size();
  auto map = std::make_unique<DaemonMap>(2 * count > old.slots.size() ? 2 * old.slots.size()
                                                                      : old.slots.size());
  for (const std::unique_ptr<Daemon>& daemon : daemons_) {
    map->Insert(daemon.get());
    daemon->SetShare(crew_.workers(), static_cast<uint32_t>(count));
  }
  maps_.push_back(std::move(map));
  map_.StoreRelease(maps_.back().get());
  return daemons_.back().get();
}

uint64_t RuntimeImpl::Sum(uint64_t (Daemon::*count)() const) {
  uint64_t sum = 0;
  for (const Daemon* daemon : map_.LoadAcquire()->daemons) sum += (daemon->*count)();
  return sum;
}

Shape RuntimeImpl::ShapeOf(const Signature& signature, const Group& group) const {
  const int64_t block_bytes = signature.count * DTypeSize(signature.dtype);
  return ShapeOf(signature, group, block_bytes * SourceBlocks(signature.kind, group.size()),
                 block_bytes * ResultBlocks(signature.kind, group.size()));
}

Shape RuntimeImpl::ShapeOf(const Signature& signature, const Group& group, int64_t source_bytes,
                           int64_t result_bytes) const {
  const int members = group.size();
  Shape shape;
  const int64_t size = DTypeSize(signature.dtype);
  shape.source_bytes = source_bytes;
  shape.result_bytes = result_bytes;
  shape.bytes = std::max(shape.source_bytes, shape.result_bytes);
  shape.dtype = Folds(signature.kind) ? signature.dtype : PlainType(size);
  shape.align = std::max<int64_t>(1, static_cast<int64_t>(kCacheLine) / size);
  const PlanChoice choice = PlanRulesNow().Choose(signature, group.size(), group.placement);
  if (!HasPlans(signature.kind, choice.algorithm, group.placement)) return shape;
  if (members > MostMembers(signature.kind, choice.algorithm)) return shape;
  shape.chosen = ChoosePlan({signature.kind, choice.algorithm, members, signature.root,
                             signature.pairs, choice.chunks_per_member, group.placement});
  const int64_t slice = Daemon::kSliceBytes / (shape.chosen.plan->most_refs * size);
  shape.slice_elements = std::max(slice / shape.align, int64_t{64}) * shape.align;
  // What comes from elsewhere or goes there is read again soon.
  if (group.placement != nullptr) return shape;
  const int64_t moved = (shape.source_bytes + shape.result_bytes) * members;
  shape.streaming = moved >= internal_.streaming_bytes;
  shape.heavy = moved >= kHeavyBytes;
  return shape;
}

Operation* RuntimeImpl::Submit(const Submission& submission) {
  Daemon* daemon = DaemonOf(submission.device);
  uint64_t sequence;
  Operation* operation = daemon->Allocate(&sequence);
  OperationInfo& info = operation->info;
  info.device = submission.device;
  info.sequence = sequence;
  info.program = submission.program;
  info.launch = submission.launch;
  info.occurrence = submission.occurrence;
  info.key = submission.key;
  info.name = InternName(submission.name);
  info.submit_ns = NowNs();
  info.timeout_ns =
      std::min(submission.timeout_ns > 0 ? submission.timeout_ns : options_.timeout_ns, kMostNs);
  info.site = submission.site;
  info.has_key = submission.has_key;
  const int64_t submit_ns = info.submit_ns;
  monitor_->Submitted(submit_ns, info.timeout_ns);

  crew_.BeginDrive();
  const bool lingers = Enter(operation, submission);
  // The operation may be finished and gone once it is submitted.
  const int64_t all_bytes = operation->bytes * submission.group->size();
  const int64_t longer_ns = submission.closed ? all_bytes / kDriveBytesPerNs : 0;
  const int64_t deadline_ns = submit_ns + kDriveNs + longer_ns;
  const bool moves_much = all_bytes >= kNestedBytes;
  while (!daemon->TrySubmit(operation)) {
    // Full: make room ourselves, or let the thread that drives do so.
    crew_.Drive(daemon, NowNs() + kDriveNs);
    std::this_thread::yield();
  }
  crew_.Drive(daemon, deadline_ns);
  if (lingers && submission.linger) Linger(operation, daemon);
  // The time to move little data is not worth a look at the clock.
  if (moves_much && crew_.InCallback()) crew_.NestedTime(NowNs() - submit_ns);
  crew_.EndDrive();
  return operation;
}

// Copies what a ragged exchange needs beside its source, and fills its result.
const RaggedSlot* RuntimeImpl::TakeRagged(const RaggedPart& part, Operation* operation,
                                          void* result) {
  const int members = operation->group->size();
  operation->ragged = buffers_.Allocate(RaggedSlot::Bytes(members));
  auto* slot = new (operation->ragged) RaggedSlot{part.source_rows, part.result_rows, members};
  auto* index = reinterpret_cast<int64_t*>(slot + 1);
  for (const auto* values :
       {&part.input_offsets, &part.send_sizes, &part.output_offsets, &part.recv_sizes}) {
    index = std::copy_n(values->begin(), members, index);
  }
  if (part.initial != result && operation->result_bytes > 0) {
    CopyBytes(result, part.initial, operation->result_bytes);
  }
  return slot;
}

// What members of other processes send comes in while this thread looks for it; to
// wake another one would take longer than most of them need.
void RuntimeImpl::Linger(Operation* operation, Daemon* daemon) {
  // Acquire: partner is the exchange in Daemon::Finish.
  const auto finished = [operation] {
    return StateOf(operation->state.LoadAcquire()) == OperationState::kFinished;
  };
  if (finished()) return;
  const int64_t begin_ns = NowNs();
  int64_t moved_ns = begin_ns;
  cluster_.BeginPolling();
  while (!finished()) {
    crew_.BeginDrive();
    const bool moved = cluster_.Poll();
    const int64_t now_ns = NowNs();
    crew_.Drive(daemon, now_ns + kDriveNs);
    if (moved) moved_ns = now_ns;
    if (now_ns - moved_ns >= kLingerNs || now_ns - begin_ns >= kMostLingerNs) break;
    if (!moved) std::this_thread::yield();
  }
  cluster_.EndPolling();
}

// Prepares the operation and lets it join its record. True: it waits for members
// of other processes only.
bool RuntimeImpl::Enter(Operation* operation, const Submission& submission) {
  const Group* group = submission.group;
  const Signature& signature = submission.signature;
  const Shape shape =
      ShapeOf(signature, *group, submission.source_bytes(), submission.result_bytes());
  operation->member = static_cast<uint16_t>(submission.member);
  operation->priority = submission.priority;
  operation->closed = submission.closed;
  operation->group = group;
  operation->signature = signature;
  operation->bytes = shape.bytes;
  operation->result_bytes = shape.result_bytes;
  operation->site_hash =
      static_cast<uint32_t>(MixBits(submission.program + static_cast<uint32_t>(submission.site)));
  if (stopped_.LoadAcquire() != 0) {
    operation->status = Status(StatusCode::kAborted, "the runtime has been shut down");
    return false;
  }
  if (shape.chosen.plan == nullptr) {
    operation->status =
        Status(StatusCode::kInvalidArgument,
               describer_.Wrong(operation->info, signature,
                                "groups of " + std::to_string(group->size()) + " members" +
                                    (group->placement != nullptr ? " in several processes" : "") +
                                    " are more than it can serve"));
    return false;
  }
  const void* source = submission.source;
  if (submission.zeros) {
    source = operation->staged_source = buffers_.Allocate(std::max<size_t>(1, shape.source_bytes));
    std::memset(operation->staged_source, 0, static_cast<size_t>(shape.source_bytes));
  }
  const bool overwritten = source == submission.result && shape.bytes > 0;
  if (submission.stage_source || (overwritten && !shape.chosen.plan->in_place)) {
    operation->staged_source = buffers_.Allocate(std::max<size_t>(1, shape.source_bytes));
    CopyBytes(operation->staged_source, source, shape.source_bytes);
    source = operation->staged_source;
  }
  void* result = submission.result;
  if (result == nullptr) {
    result = operation->owned_result = buffers_.Allocate(std::max<size_t>(1, shape.result_bytes));
  }
  if (shape.result_bytes >= kHugePagesBytes && result != source) {
    AdviseHugePages(result, shape.result_bytes);
  }
  const RaggedSlot* ragged = nullptr;
  if (submission.ragged != nullptr) ragged = TakeRagged(*submission.ragged, operation, result);
  const uint32_t scratch_slots = shape.chosen.plan->scratch_slots;
  if (scratch_slots > 0 && signature.count > 0) {
    operation->scratch = buffers_.Allocate(scratch_slots * signature.count *
                                           DTypeSize(AccumulationType(signature.dtype)));
  }
  operation->fixed = {shape.chosen.plan->List(submission.member), shape.align,
                      shape.slice_elements};

  Status status;
  const RecordTable::Member member = {submission.id, group,  signature,          operation->member,
                                      source,        result, operation->scratch, ragged};
  switch (table_.Join(member, shape, operation, &status)) {
    case RecordTable::Arrival::kJoined:
      SignalProgress(operation->record, operation->member, kArrived);
      if (any_ended_.LoadSeqCst() != 0) FailIfAwaitsEnded(submission.program, submission.launch);
      if (group->placement == nullptr) break;
      cluster_.FailIfGone(submission.id, group, submission.launch);
      for (int i = 0; i < group->size(); ++i) {
        if (group->IsHere(i) && !operation->record->slots()[i].progress.Reached(kArrived)) {
          return false;
        }
      }
      return true;

    case RecordTable::Arrival::kMismatch:
      FailMismatch(&table_, describer_, submission.id, group, operation->info, signature);
      break;

    case RecordTable::Arrival::kTwice:
      operation->status =
          Status(StatusCode::kInternal, describer_.Twice(operation->info, signature));
      break;

    case RecordTable::Arrival::kFailedBefore:
      operation->status = status;
      break;
  }
  return false;
}

bool RuntimeImpl::Finished(Operation* operation, Status* status) {
  // Acquire: partner is the exchange in Daemon::Finish.
  if (StateOf(operation->state.LoadAcquire()) != OperationState::kFinished) return false;
  // An error's text is copied, success costs nothing.
  *status = operation->status.ok() ? Status() : operation->status;
  return true;
}

bool RuntimeImpl::OnFinish(Operation* operation, Callback function, void* argument, bool blocks) {
  operation->callback = function;
  operation->argument = argument;
  uint64_t pending = StateWord(operation->generation, OperationState::kPending);
  const OperationState registered =
      blocks ? OperationState::kRegistered : OperationState::kRegisteredUnawaited;
  // Release: partner is the exchange in Daemon::Finish.
  return operation->state.CompareExchangeAcqRel(pending,
                                                StateWord(operation->generation, registered));
}

void RuntimeImpl::Collect(Operation* operation, void* destination) {
  CopyBytes(destination, operation->owned_result, operation->result_bytes);
  Release(operation);
}

Status RuntimeImpl::JoinCluster(int process, std::unordered_map<int64_t, int> process_of,
                                std::vector<int> host_of, int64_t peer_timeout_ns) {
  int processes = process + 1;
  int devices_here = 0;
  for (const auto& [device, owner] : process_of) {
    processes = std::max(processes, owner + 1);
    if (owner == process) ++devices_here;
  }
  if (process < 0 || processes > Transport::kMostProcesses) {
    return Status(StatusCode::kInvalidArgument, std::to_string(processes) +
                                                    " processes are more than " +
                                                    std::to_string(Transport::kMostProcesses));
  }
  SetTopology(process, std::move(process_of), std::move(host_of));
  TransportOptions options;
  options.silence_ns = peer_timeout_ns;
  return cluster_.Join(process, processes, devices_here, options);
}

void RuntimeImpl::NoteEnded(const Ended& ended) {
  {
    std::lock_guard<std::mutex> lock(ended_mutex_);
    ended_.push_back(ended);
    if (ended_.size() > kRememberedEnds) ended_.pop_front();
    // SeqCst: a member that joins a record after this sees it (Enter); one that
    // joined before is found below.
    any_ended_.StoreSeqCst(1);
  }
  FailWhatAwaits(ended);
}

void RuntimeImpl::Announced() {
  std::lock_guard<std::mutex> lock(announced_mutex_);
  announced_ = true;
  announced_condition_.notify_all();
}

int RuntimeImpl::StandIn(int64_t timeout_ns) {
  const int64_t deadline_ns = NowNs() + timeout_ns;
  int calls = 0;
  cluster_.StandsIn(true);
  for (;;) {
    // What was announced before is found, what comes later wakes.
    calls += StandInForAll();
    std::unique_lock<std::mutex> lock(announced_mutex_);
    const int64_t rest_ns = deadline_ns - NowNs();
    if (rest_ns <= 0) break;
    announced_condition_.wait_for(lock, std::chrono::nanoseconds(rest_ns),
                                  [this] { return announced_; });
    announced_ = false;
  }
  cluster_.StandsIn(false);
  return calls;
}

int RuntimeImpl::StandInForAll() {
  const auto lacks_members_here = [](Record& record) {
    if (record.group->placement == nullptr || record.failed.LoadRelaxed() != 0) return false;
    for (int i = 0; i < record.members(); ++i) {
      if (record.group->IsHere(i) && !record.slots()[i].arrived) return true;
    }
    return false;
  };
  const auto is_neutral = [](const Signature& signature) {
    if (signature.kind != Kind::kAllReduce || signature.dtype == DType::kF8E8M0FNU) return false;
    return signature.op == ReduceOp::kSum || signature.op == ReduceOp::kMean ||
           signature.op == ReduceOp::kOr || signature.op == ReduceOp::kXor;
  };
  const auto release = [](void* operation) {
    Runtime::Get().Release(static_cast<Operation*>(operation));
  };
  const std::vector<RecordView> views = table_.View(lacks_members_here);
  for (const RecordView& view : views) {
    const OperationInfo& info = view.members[view.creator].info;
    if (!is_neutral(view.signature)) {
      table_.Fail(
          view.id, view.group,
          Status(StatusCode::kInvalidArgument,
                 describer_.Wrong(info, view.signature,
                                  "process " + std::to_string(cluster_.process()) +
                                      " has no more data (jax_dfccl.join()) and can go on only "
                                      "with all_reduces with sum, mean, or and xor")));
      continue;
    }
    for (int i = 0; i < view.group->size(); ++i) {
      if (!view.group->IsHere(i) || view.members[i].arrived) continue;
      Submission submission;
      submission.device = view.group->members[i];
      submission.group = view.group;
      submission.member = i;
      submission.id = view.id;
      submission.signature = view.signature;
      submission.zeros = true;
      submission.closed = true;
      submission.timeout_ns = kMostNs;  // those who called see to that
      submission.program = info.program;
      submission.launch = info.launch;
      submission.occurrence = info.occurrence;
      submission.site = info.site;
      if (info.name != nullptr) submission.name = *info.name;
      submission.key = info.key;
      submission.has_key = info.has_key;
      Operation* operation = Submit(submission);
      if (!OnFinish(operation, release, operation, /*blocks=*/false)) Release(operation);
    }
  }
  return static_cast<int>(views.size());
}

void RuntimeImpl::FailWhatAwaits(const Ended& ended) {
  const auto awaits = [&](Record& record) {
    const int index = record.group->IndexOf(ended.device);
    if (index < 0 || record.slots()[index].arrived) return false;
    for (int i = 0; i < record.members(); ++i) {
      const Slot& slot = record.slots()[i];
      if (slot.arrived && slot.info.program == ended.program && slot.info.launch == ended.launch) {
        return true;
      }
    }
    return false;
  };
  const Status status(StatusCode::kAborted, "device " + std::to_string(ended.device) +
                                                " has left this launch of the program with an "
                                                "error and cannot come: " +
                                                ended.status.message());
  for (const RecordView& view : table_.View(awaits)) {
    table_.Fail(view.id, view.group, status, view.arrived);
  }
}

void RuntimeImpl::FailIfAwaitsEnded(uint64_t program, uint64_t launch) {
  std::vector<Ended> found;
  {
    std::lock_guard<std::mutex> lock(ended_mutex_);
    for (const Ended& ended : ended_) {
      if (ended.program == program && ended.launch == launch) found.push_back(ended);
    }
  }
  for (const Ended& ended : found) FailWhatAwaits(ended);
}

bool RuntimeImpl::Cancel(Operation* operation, const Status& status) {
  const std::vector<RecordView> views = table_.View([operation](Record& record) {
    for (int i = 0; i < record.members(); ++i) {
      const Slot& slot = record.slots()[i];
      if (slot.operation == operation && !slot.ended()) return true;
    }
    return false;
  });
  bool cancelled = false;
  for (const RecordView& view : views) {
    cancelled |= table_.Fail(view.id, view.group, status);
  }
  return cancelled;
}

void RuntimeImpl::Abandon(int64_t device, uint64_t program, uint64_t launch, const Status& status) {
  struct Pending {
    Operation* operation;
    uint64_t generation;
  };
  std::vector<Pending> pending;
  const std::vector<RecordView> views = table_.View([&](Record& record) {
    bool found = false;
    for (int i = 0; i < record.members(); ++i) {
      const Slot& slot = record.slots()[i];
      if (slot.operation == nullptr || slot.ended() || slot.info.device != device ||
          slot.info.program != program || slot.info.launch != launch) {
        continue;
      }
      pending.push_back({slot.operation, slot.generation});
      found = true;
    }
    return found;
  });
  for (const RecordView& view : views) table_.Fail(view.id, view.group, status);
  const Ended ended = {device, program, launch, status};
  NoteEnded(ended);
  cluster_.TellEnded(ended);
  // An operation ends only when no peer is in a data step, so at its end its
  // buffers are its owner's again.
  Daemon* daemon = DaemonOf(device);
  for (const Pending& each : pending) {
    for (;;) {
      const uint64_t word = each.operation->state.LoadAcquire();
      if (word == StateWord(each.generation, OperationState::kFinished) ||
          word >> 2 != each.generation) {
        break;
      }
      crew_.Drive(daemon, NowNs() + kDriveNs);
      std::this_thread::yield();
    }
  }
}

bool RuntimeImpl::SetPlanRules(const std::vector<PlanRule>& rules) {
  std::lock_guard<std::mutex> lock(plan_rules_mutex_);
  if (Sum(&Daemon::submitted) != Sum(&Daemon::finished)) return false;
  all_plan_rules_.emplace_back(rules);
  plan_rules_.StoreRelease(&all_plan_rules_.back());
  return true;
}

FlightReport RuntimeImpl::Report() {
  FlightReport report;
  const std::vector<RecordView> records = table_.View([](Record&) { return true; });
  const int64_t now_ns = NowNs();
  for (const RecordView& record : records) {
    for (int i = 0; i < record.group->size(); ++i) {
      if (record.members[i].here && !record.members[i].ended) {
        report.in_flight.push_back(describer_.Entry(record, i, now_ns));
      }
    }
  }
  std::sort(report.in_flight.begin(), report.in_flight.end(),
            [](const FlightEntry& a, const FlightEntry& b) {
              return std::make_pair(a.device, a.sequence) < std::make_pair(b.device, b.sequence);
            });
  std::vector<Flight> flights;
  for (Daemon* daemon : map_.LoadAcquire()->daemons) {
    for (Flight& flight : daemon->flights().Newest()) flights.push_back(std::move(flight));
    const Daemon::Counters& counters = daemon->counters();
    DeviceCounters device;
    device.device = daemon->device();
    device.submitted = daemon->submitted();
    device.completed = counters.completed.Load();
    device.failed = counters.failed.Load();
    device.preemptions = daemon->context_slot().preemptions();
    device.context_saves = daemon->context_slot().saves();
    device.context_loads = daemon->context_slot().loads();
    device.quits = counters.quits.Load();
    device.restarts = counters.restarts.Load();
    device.bytes = counters.bytes.Load();
    device.largest_wait_s = static_cast<double>(counters.largest_wait_ns.Load()) * 1e-9;
    report.devices.push_back(device);
  }
  std::sort(report.devices.begin(), report.devices.end(),
            [](const DeviceCounters& a, const DeviceCounters& b) { return a.device < b.device; });
  std::stable_sort(flights.begin(), flights.end(),
                   [](const Flight& a, const Flight& b) { return a.finish_ns > b.finish_ns; });
  for (const Flight& flight : flights) report.recent.push_back(describer_.Entry(flight, now_ns));
  for (const WaitCycle& cycle : FindCycles(records)) {
    report.cycles.push_back(describer_.Cycle(cycle));
  }
  return report;
}

bool RuntimeImpl::Stop() {
  const int64_t deadline_ns = NowNs() + kShutdownNs;
  stopped_.StoreRelease(1);
  monitor_->Stop();  // from here on, this thread does its work
  cluster_.Close();
  crew_.TakeOverCallbacks();
  const Status status(StatusCode::kAborted, "the runtime was shut down before this call finished");
  while (Sum(&Daemon::submitted) != Sum(&Daemon::finished) && NowNs() < deadline_ns) {
    for (const RecordView& view : table_.View([](Record&) { return true; })) {
      table_.Fail(view.id, view.group, status);
    }
    crew_.Relieve();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  while (crew_.Relieve() && NowNs() < deadline_ns) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return crew_.Stop(deadline_ns);
}

struct Global {
  std::mutex mutex;
  Atomic<RuntimeImpl*> current;
  RuntimeOptions options;
  InternalOptions internal;
  // Never freed: foreign threads may still hold their operations.
  std::vector<RuntimeImpl*> retired;
};

Global& TheGlobal() {
  static Global& global = *new Global;  // outlives static destructors
  return global;
}

}  // namespace

const std::string* InternName(std::string_view name) {
  if (name.empty()) return nullptr;
  struct Cached {
    const std::string* name = nullptr;
  };
  static thread_local Cached cache[64];
  Cached& cached = cache[std::hash<std::string_view>()(name) % 64];
  if (cached.name != nullptr && *cached.name == name) return cached.name;
  static std::mutex mutex;
  static std::unordered_set<std::string>& names = *new std::unordered_set<std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  cached.name = &*names.emplace(name).first;
  return cached.name;
}

void SetInternalOptions(const InternalOptions& options) {
  Global& global = TheGlobal();
  std::lock_guard<std::mutex> lock(global.mutex);
  global.internal = options;
}

Runtime& Runtime::Get() {
  Global& global = TheGlobal();
  // Acquire: partner is the release below.
  if (RuntimeImpl* runtime = global.current.LoadAcquire()) return *runtime;
  std::lock_guard<std::mutex> lock(global.mutex);
  RuntimeImpl* runtime = global.current.LoadRelaxed();
  if (runtime == nullptr) {
    runtime = new RuntimeImpl(global.options, global.internal);
    global.current.StoreRelease(runtime);
  }
  return *runtime;
}

void Runtime::Configure(const RuntimeOptions& options) {
  Global& global = TheGlobal();
  std::lock_guard<std::mutex> lock(global.mutex);
  global.options = options;
}

void Runtime::Shutdown() {
  Global& global = TheGlobal();
  std::lock_guard<std::mutex> lock(global.mutex);
  RuntimeImpl* runtime = global.current.LoadRelaxed();
  if (runtime == nullptr) return;
  global.current.StoreRelease(nullptr);
  runtime->Stop();
  global.retired.push_back(runtime);
}

}  // namespace dfccl
