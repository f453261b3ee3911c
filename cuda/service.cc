// SPDX-License-Identifier: Apache-2.0
#include "cuda/service.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <string>
#include <utility>

#include "core/reduce/reduce.h"

namespace dfccl {
namespace gpu {
namespace {

constexpr std::chrono::microseconds kKeeperPause(1000);
constexpr std::chrono::microseconds kLeastWaitPause(20);
// How long after a daemon has left with something unfinished it is launched again although
// nothing is known to have changed; doubled while that is in vain.
constexpr int64_t kLeastPauseNs = 1'000'000;
constexpr int64_t kMostPauseNs = 64'000'000;
constexpr int64_t kLateLookNs = 50'000'000;
constexpr int64_t kRoomNs = 10'000'000'000;
constexpr size_t kRememberedFailures = 256;
// Host memory of the daemons' words: as many operations as blocks have tasks.
constexpr uint32_t kNoTask = ~uint32_t{0};

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

template <typename T>
Status Allocate(Status (Gpu::*allocate)(size_t, void**), Gpu* gpu, size_t count, T** memory) {
  void* bytes;
  Status status = (gpu->*allocate)(count * sizeof(T), &bytes);
  if (status.ok()) *memory = static_cast<T*>(bytes);
  return status;
}

std::string DevicesText(const Group& group) {
  std::string text = "[";
  for (int i = 0; i < group.size(); ++i) {
    if (i == 8) return text + ", ... " + std::to_string(group.size()) + " devices]";
    text += (i > 0 ? ", " : "") + std::to_string(group.members[i]);
  }
  return text + "]";
}

std::string Text(const Signature& signature) {
  std::string text = KindName(signature.kind);
  if (Folds(signature.kind)) text += std::string("(") + ReduceOpName(signature.op) + ")";
  text += " of " + std::to_string(signature.count) + " " + DTypeName(signature.dtype);
  if (HasRoot(signature.kind)) text += " with root " + std::to_string(signature.root);
  return text;
}

std::string Text(const Submission& submission) {
  std::string text = Text(submission.signature);
  if (!submission.name.empty()) text += " '" + std::string(submission.name) + "'";
  return text + " on device " + std::to_string(submission.device) + " of " +
         DevicesText(*submission.group);
}

// Those of the options, then what holds for GPUs: members' blocks work at the same time, so
// every member does its share, where it has one. (Never measured.)
std::vector<PlanRule> RulesOf(const ServiceOptions& options) {
  std::vector<PlanRule> rules = options.plan_rules;
  for (int k = 0; k < kKindCount; ++k) {
    const auto kind = static_cast<Kind>(k);
    const Algorithm shares =
        kind == Kind::kAllReduce ? Algorithm::kDirectTwoShot : Algorithm::kDirect;
    if (HasPlans(kind, shares)) rules.push_back({kind, 0, PlanRule::kAnyBytes, {shares}});
  }
  return rules;
}

// Of a block of a source that is posted.
uint32_t PostedWords(const Signature& signature) {
  const int64_t bytes = signature.count * DTypeSize(signature.dtype);
  return static_cast<uint32_t>((bytes + FlaggedWord::kBytes - 1) / FlaggedWord::kBytes);
}

// A ticket is the place of an operation, from 1, and its generation above that.
uint64_t TicketOf(uint32_t index, uint32_t generation) {
  return uint64_t{generation} << 32 | (index + 1);
}
uint32_t IndexOf(uint64_t ticket) { return static_cast<uint32_t>(ticket) - 1; }

Status Refused(const Submission& submission, const std::string& why) {
  return Status(StatusCode::kInvalidArgument, Text(submission) + ": " + why);
}

}  // namespace

Service::Service(const ServiceOptions& options) : options_(options), rules_(RulesOf(options)) {}

std::unique_ptr<Service> Service::Make(std::vector<std::unique_ptr<Gpu>> gpus,
                                       const ServiceOptions& options, Status* status) {
  std::unique_ptr<Service> service(new Service(options));
  service->sequence_ = options.first_sequence;
  for (std::unique_ptr<Gpu>& gpu : gpus) {
    auto site = std::make_unique<Site>();
    site->gpu = std::move(gpu);
    *status = service->SetUp(site.get());
    if (!status->ok()) return nullptr;
    service->gpus_.push_back(std::move(site));
  }
  *status = service->SetUpRelay();
  if (!status->ok()) return nullptr;
  service->keeper_ = std::thread([raw = service.get()] { raw->Keep(); });
  return service;
}

Status Service::SetUp(Site* site) {
  Gpu* gpu = site->gpu.get();
  const uint32_t blocks = options_.blocks, tasks = options_.tasks_of_a_block;
  const uint64_t entries = 2 * uint64_t{tasks};  // joins, and as many failures
  std::vector<BlockWiring> wiring(blocks);
  OperationWords* words = nullptr;
  Door* door = nullptr;
  BlockCounters* counters = nullptr;
  BlockWiring* device_wiring = nullptr;
  DaemonArguments& arguments = site->arguments;
  Status status;
  const auto device = [&](size_t count, auto** memory) {
    if (status.ok()) status = Allocate(&Gpu::Allocate, gpu, count, memory);
  };
  const auto mapped = [&](size_t count, auto** memory) {
    if (status.ok()) status = Allocate(&Gpu::AllocateMapped, gpu, count, memory);
  };
  mapped(1, &door);
  mapped(blocks, &counters);
  mapped(size_t{blocks} * tasks, &words);
  device(blocks, &device_wiring);
  device(blocks, &arguments.states);
  device(1, &arguments.grid);
  for (uint32_t i = 0; i < blocks; ++i) {
    BlockWiring& block = wiring[i];
    mapped(1, &block.submission_ends);
    mapped(entries, &block.submissions);
    mapped(1, &block.completion_ends);
    mapped(tasks, &block.completions);
    device(tasks, &block.tasks);
    device(tasks, &block.blocked);
    block.submission_capacity = entries;
    block.completion_capacity = tasks;
    block.counters = counters + i;
  }
  void* memory = nullptr;
  if (status.ok()) status = gpu->Allocate(options_.memory_bytes, &memory);
  if (status.ok()) status = gpu->Upload(device_wiring, wiring.data(), blocks * sizeof(BlockWiring));
  if (!status.ok()) return status;

  site->memory = std::make_unique<MemoryPool>(memory, options_.memory_bytes);
  for (size_t i = size_t{blocks} * tasks; i-- > 0;) {
    for (Atomic<uint64_t>* word : {&words[i].ready, &words[i].done, &words[i].released}) {
      word->StoreRelaxed(options_.first_sequence);
    }
    site->free_words.push_back(words + i);
  }
  for (uint32_t i = 0; i < blocks; ++i) {
    BlockQueues queues;
    for (SpscEnds* ends : {wiring[i].submission_ends, wiring[i].completion_ends}) {
      ends->pushed.StoreRelaxed(options_.first_sequence);
      ends->popped.StoreRelaxed(options_.first_sequence);
    }
    queues.submissions = std::make_unique<SpscProducer<SubmissionEntry>>(
        wiring[i].submission_ends, wiring[i].submissions, entries);
    queues.completions = std::make_unique<SpscConsumer<CompletionEntry>>(
        wiring[i].completion_ends, wiring[i].completions, tasks);
    queues.counters = wiring[i].counters;
    for (uint32_t task = tasks; task-- > 0;) queues.free_tasks.push_back(task);
    queues.operation_of.resize(tasks);
    site->blocks.push_back(std::move(queues));
  }
  arguments.wiring = device_wiring;
  arguments.door = door;
  arguments.blocks = blocks;
  arguments.quit_polls = options_.quit_polls;
  arguments.bulk = options_.bulk ? 1 : 0;
  return Status();
}

// Now, as page-locking memory may wait for streams, and these for what comes later.
Status Service::SetUpRelay() {
  const size_t count = gpus_.size();
  bool all_reach = true;
  std::vector<std::vector<bool>> reaches(count, std::vector<bool>(count, true));
  for (size_t i = 0; i < count; ++i) {
    for (size_t j = 0; j < count; ++j) {
      if (i != j) reaches[i][j] = gpus_[i]->gpu->Reach(gpus_[j]->gpu.get()).ok();
      all_reach = all_reach && reaches[i][j];
    }
  }
  if (!all_reach) reaches_ = std::move(reaches);
  if (all_reach && !options_.several_processes) return Status();
  for (auto& site : gpus_) {
    void* memory;
    const Status status = site->gpu->AllocateMapped(options_.host_memory_bytes, &memory);
    if (!status.ok()) return status;
    site->host_memory = std::make_unique<MemoryPool>(memory, options_.host_memory_bytes);
  }
  relay_ = std::make_unique<Relay>();
  return Status();
}

Service::~Service() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  if (keeper_.joinable()) keeper_.join();
  const Status why(StatusCode::kAborted, "the runtime has been shut down");
  if (relay_ != nullptr && !relay_->Stop(why, options_.shutdown_ns)) {
    // The host's runtime still uses them.
    static_cast<void>(relay_.release());
    for (auto& site : gpus_) static_cast<void>(site->gpu.release());
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  for (auto& [key, instance] : instances_) {
    if (instance->status.ok()) Fail(instance.get(), why);
  }
  const auto pause = [&] {
    lock.unlock();
    std::this_thread::sleep_for(kKeeperPause);
    lock.lock();
  };
  // What is not ready never will be.
  const int64_t end_ns = NowNs() + options_.shutdown_ns;
  const auto is_ready = [](const HostOperation& operation) {
    return operation.state == State::kRunning && !operation.relayed &&
           Reached(operation.words->ready, operation.sequence);
  };
  while (NowNs() < end_ns && std::any_of(operations_.begin(), operations_.end(), is_ready)) {
    Drain();
    for (auto& site : gpus_) LaunchIfParked(site.get());
    pause();
  }
  for (auto& site : gpus_) site->arguments.door->stop.StoreRelaxed(1);
  std::vector<const Site*> staying;
  const auto stays = [&](int site) {
    return std::find(staying.begin(), staying.end(), gpus_[site].get()) != staying.end();
  };
  for (auto& site : gpus_) {
    if (!site->broken.ok()) continue;
    const auto parked = [&] {
      return site->arguments.door->parked.LoadAcquire() == site->launches;
    };
    while (!parked() && NowNs() < end_ns + options_.shutdown_ns) pause();
    if (!parked()) staying.push_back(site.get());
  }
  // Streams that come there later go on, too.
  for (HostOperation& operation : operations_) {
    if (operation.state != State::kRunning || stays(operation.site)) continue;
    operation.words->done.StoreRelease(operation.sequence);
  }
  for (const Awaiting& awaiting : awaiting_) {
    if (awaiting.served || stays(awaiting.site)) continue;
    awaiting.words->done.StoreRelease(awaiting.sequence);
  }
  if (staying.empty()) return;
  // A daemon may touch its own memory, and that of all whom it can reach.
  for (auto& site : gpus_) static_cast<void>(site->gpu.release());
}

Status Service::Start(int gpu, Stream stream, const Submission& submission,
                      const RaggedArrays* ragged, uint64_t* ticket, void* keep) {
  std::unique_lock<std::mutex> lock(mutex_);
  return Enter(gpu, stream, submission, ragged, ticket, keep, lock);
}

Status Service::Enter(int gpu, Stream stream, const Submission& submission,
                      const RaggedArrays* ragged, uint64_t* ticket, void* keep,
                      std::unique_lock<std::mutex>& lock) {
  Drain();
  if (Status status = PopError(submission.device); !status.ok()) return status;
  Rank rank;
  if (Status status = FindRank(submission.device, gpu, &rank); !status.ok()) return status;
  Site* site = gpus_[gpu].get();
  const Signature& signature = submission.signature;
  const Group& group = *submission.group;
  if ((signature.kind == Kind::kRaggedAllToAll) != (ragged != nullptr)) {
    return Refused(submission, "index arrays are for ragged exchanges, and for these only");
  }
  if (GoesThroughHost(group)) {
    return EnterRelay(gpu, stream, submission, ragged, ticket, keep, lock);
  }
  if (!site->broken.ok()) return site->broken;
  const Plan* plan;
  const DevicePlan* device_plan;
  if (Status status = FindPlan(submission, site, &plan, &device_plan); !status.ok()) return status;

  HostOperation operation = MakeOperation(gpu, submission, ragged);
  const int64_t size = DTypeSize(signature.dtype);
  const int64_t bytes = std::max(operation.source_bytes, operation.result_bytes);
  const bool posted = plan->key.algorithm == Algorithm::kLowLatency;
  const auto lanes = static_cast<uint32_t>(
      ragged != nullptr || posted
          ? 1
          : std::clamp<int64_t>(bytes / options_.lane_bytes, 1, options_.blocks));
  if (Status status = WaitForRoom(site, rank, lanes, lock); !status.ok()) return status;
  Instance* instance;
  if (Status status = Find(submission, &instance); !status.ok()) return status;
  if (Status status = Stage(submission, *plan, site, &operation); !status.ok()) return status;
  if (instance == nullptr) {
    if (Status status = Join(submission, gpu, *plan, lanes, &instance); !status.ok()) {
      GiveBack(&operation);
      return status;
    }
  }

  operation.words = site->free_words.back();
  site->free_words.pop_back();
  operation.instance = instance;
  operation.lanes_left = instance->lanes;

  SubmissionEntry entry = {};
  entry.sequence = operation.sequence;
  entry.kind = EntryKind::kJoin;
  entry.words = operation.words;
  entry.record = instance->record;
  entry.list = device_plan->members[submission.member];
  entry.source = operation.staged_source != nullptr ? operation.staged_source : submission.source;
  entry.result = operation.staged_result != nullptr ? operation.staged_result : submission.result;
  entry.scratch = operation.scratch;
  if (ragged != nullptr) entry.ragged = *ragged;
  entry.count = signature.count;
  entry.align = std::max<int64_t>(1, static_cast<int64_t>(kCacheLine) / size);
  entry.slice_elements =
      std::max<int64_t>(options_.slice_bytes / (plan->most_refs * size) / entry.align, 64) *
      entry.align;
  if (posted) {
    entry.slice_elements = std::max<int64_t>(signature.count, 1);
    entry.generation = instance->generation;
    entry.block_words = PostedWords(signature);
    entry.source_words =
        entry.block_words * static_cast<uint32_t>(SourceBlocks(signature.kind, group.size()));
  }
  entry.priority = submission.priority;
  entry.members = static_cast<uint32_t>(group.size());
  entry.lanes = instance->lanes;
  entry.member = operation.member;
  entry.is_ragged = ragged != nullptr ? 1 : 0;
  entry.element_size = static_cast<uint8_t>(size);
  entry.accumulated_size = static_cast<uint8_t>(DTypeSize(AccumulationType(signature.dtype)));
  entry.op = signature.op;
  entry.dtype = Folds(signature.kind) ? signature.dtype : PlainType(size);

  const uint32_t index = NewOperation();
  for (uint32_t lane = 0; lane < instance->lanes; ++lane) {
    const uint32_t number = (rank.number + lane) % options_.blocks;
    BlockQueues& block = site->blocks[number];
    entry.lane = static_cast<uint16_t>(lane);
    entry.lane_begin = ChunkStart(signature.count, lane, instance->lanes, entry.align);
    entry.lane_end = ChunkStart(signature.count, lane + 1, instance->lanes, entry.align);
    entry.task = block.free_tasks.back();
    block.free_tasks.pop_back();
    block.operation_of[entry.task] = index;
    operation.tasks.emplace_back(number, entry.task);
    block.submissions->TryPush(entry);  // WaitForRoom has looked
  }
  operation.generation = operations_[index].generation;
  instance->operations[operation.member] = index;
  ++instance->joined;
  *ticket = TicketOf(index, operation.generation);

  Status status = GiveTicket(stream, *ticket, keep, &operation);
  if (status.ok() && operation.staged_source != nullptr && operation.source_bytes > 0) {
    status = site->gpu->Copy(stream, operation.staged_source, submission.source,
                             static_cast<size_t>(operation.source_bytes));
  }
  if (status.ok()) {
    status = site->gpu->Write(stream, &operation.words->ready, operation.sequence);
  }
  operations_[index] = std::move(operation);
  ++site->unfinished;
  ++counters_.submitted;
  if (posted) ++counters_.posted;
  if (unfinished_++ == 0) changed_.notify_all();
  LaunchIfParked(site);
  return status;
}

Service::HostOperation Service::MakeOperation(int gpu, const Submission& submission,
                                              const RaggedArrays* ragged) {
  const Signature& signature = submission.signature;
  const int members = submission.group->size();
  const int64_t block_bytes = signature.count * DTypeSize(signature.dtype);
  HostOperation operation;
  operation.state = State::kRunning;
  operation.site = gpu;
  operation.device = submission.device;
  operation.sequence = ++sequence_;
  operation.member = static_cast<uint16_t>(submission.member);
  operation.program = submission.program;
  operation.launch = submission.launch;
  operation.call_site = submission.site;
  operation.source_bytes =
      block_bytes *
      (ragged != nullptr ? ragged->source_rows : SourceBlocks(signature.kind, members));
  operation.result_bytes =
      block_bytes *
      (ragged != nullptr ? ragged->result_rows : ResultBlocks(signature.kind, members));
  operation.timeout_ns = submission.timeout_ns > 0 ? submission.timeout_ns : options_.timeout_ns;
  operation.start_ns = NowNs();
  operation.deadline_ns = operation.start_ns + operation.timeout_ns;
  operation.group = submission.group;
  operation.signature = signature;
  operation.name = submission.name;
  operation.key = submission.key;
  operation.has_key = submission.has_key;
  return operation;
}

Status Service::GiveTicket(Stream stream, uint64_t ticket, void* there, HostOperation* operation) {
  if (there == nullptr) return Status();
  operation->kept = true;
  operation->words->ticket = ticket;
  return gpus_[operation->site]->gpu->Copy(stream, there, &operation->words->ticket,
                                           sizeof(ticket));
}

// All its members decide alike.
bool Service::GoesThroughHost(const Group& group) const {
  if (group.placement != nullptr) return true;
  if (reaches_.empty()) return false;
  std::vector<int> gpus;
  for (int64_t member : group.members) {
    const auto known = options_.gpu_of.find(member);
    if (known == options_.gpu_of.end()) return true;
    gpus.push_back(known->second);
  }
  for (int from : gpus) {
    for (int to : gpus) {
      if (!reaches_[from][to]) return true;
    }
  }
  return false;
}

Status Service::EnterRelay(int gpu, Stream stream, const Submission& submission,
                           const RaggedArrays* ragged, uint64_t* ticket, void* keep,
                           std::unique_lock<std::mutex>& lock) {
  if (relay_ == nullptr) return Refused(submission, "nobody said that there are other processes");
  Site* site = gpus_[gpu].get();
  HostOperation operation = MakeOperation(gpu, submission, ragged);
  operation.relayed = true;
  const auto array_bytes = static_cast<int64_t>(
      ragged == nullptr ? 0 : submission.group->size() * (ragged->wide != 0 ? 8 : 4));
  Status status = TakeHostMemory(submission, 4 * array_bytes, site, &operation, lock);
  if (!status.ok()) return status;
  operation.words = site->free_words.back();
  site->free_words.pop_back();
  const uint32_t index = NewOperation();
  operation.generation = operations_[index].generation;
  *ticket = TicketOf(index, operation.generation);
  status = GiveTicket(stream, *ticket, keep, &operation);

  Submission staged = submission;
  staged.source = operation.staged_source;
  staged.result = operation.staged_result;
  staged.stage_source = false;
  const auto copy = [&](void* to, const void* from, int64_t bytes) {
    if (!status.ok() || bytes == 0) return;
    status = site->gpu->Copy(stream, to, from, static_cast<size_t>(bytes));
  };
  copy(operation.staged_source, submission.source, operation.source_bytes);
  RaggedArrays arrays;
  if (ragged != nullptr) {
    arrays = *ragged;
    auto* next = static_cast<char*>(operation.scratch);
    for (const void** array :
         {&arrays.input_offsets, &arrays.send_sizes, &arrays.output_offsets, &arrays.recv_sizes}) {
      copy(next, *array, array_bytes);
      *array = next;
      next += array_bytes;
    }
    copy(operation.staged_result, ragged->initial, operation.result_bytes);
    arrays.initial = operation.staged_result;
  }
  if (status.ok()) {
    status = site->gpu->Write(stream, &operation.words->ready, operation.sequence);
  }

  relay_->Add(index, operation.words, operation.sequence, staged,
              ragged != nullptr ? &arrays : nullptr);
  operations_[index] = std::move(operation);
  ++site->relayed;
  ++counters_.submitted;
  ++counters_.relayed;
  if (unfinished_++ == 0) changed_.notify_all();
  return status;
}

// Words and host memory for source, result and index arrays. Waits for others to give
// theirs back.
Status Service::TakeHostMemory(const Submission& submission, int64_t index_bytes, Site* site,
                               HostOperation* operation, std::unique_lock<std::mutex>& lock) {
  MemoryPool* memory = site->host_memory.get();
  const auto size = [](int64_t bytes) { return static_cast<size_t>(std::max<int64_t>(1, bytes)); };
  const int64_t end_ns = NowNs() + kRoomNs;
  for (;;) {
    operation->staged_source = memory->Take(size(operation->source_bytes));
    operation->staged_result = memory->Take(size(operation->result_bytes));
    operation->scratch = memory->Take(size(index_bytes));
    if (!site->free_words.empty() && operation->staged_source != nullptr &&
        operation->staged_result != nullptr && operation->scratch != nullptr) {
      return Status();
    }
    GiveBack(operation);
    if (site->relayed == 0 || NowNs() > end_ns) {
      return Refused(
          submission,
          "it goes through the host, and its " + std::to_string(operation->source_bytes) +
              " bytes and " + std::to_string(operation->result_bytes) +
              " of its result do not fit into the " + std::to_string(options_.host_memory_bytes) +
              " bytes of host memory" + (site->relayed == 0 ? "" : " beside what is unfinished"));
    }
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    lock.lock();
    Drain();
  }
}

Status Service::FindRank(int64_t device, int gpu, Rank* rank) {
  if (gpu < 0 || gpu >= static_cast<int>(gpus_.size())) {
    return Status(StatusCode::kInternal, "there is no GPU " + std::to_string(gpu));
  }
  const auto [entry, is_new] = ranks_.try_emplace(device, Rank{gpu, gpus_[gpu]->ranks});
  if (is_new) ++gpus_[gpu]->ranks;
  *rank = entry->second;
  if (rank->site == gpu) return Status();
  return Status(StatusCode::kInvalidArgument,
                "device " + std::to_string(device) + " is on GPU " + std::to_string(rank->site) +
                    " and cannot submit to GPU " + std::to_string(gpu));
}

// By a rule if there is one for the kind, else by its size: small messages are posted.
PlanChoice Service::ChoosePlan(const Signature& signature, int members) const {
  const std::vector<PlanRule>& rules = options_.plan_rules;
  const bool is_ruled = std::any_of(rules.begin(), rules.end(), [&](const PlanRule& rule) {
    return rule.kind == signature.kind;
  });
  const PlanChoice low_latency{Algorithm::kLowLatency};
  if (!is_ruled && HasPlans(signature.kind, low_latency.algorithm) &&
      members <= MostMembers(signature.kind, low_latency.algorithm)) {
    // A member has room for what it needs, of which every block is aligned.
    const int64_t block_bytes = signature.count * DTypeSize(signature.dtype);
    const int64_t limit = std::min<int64_t>(options_.low_latency_bytes, kMostPostedBytes);
    const int64_t blocks = members * SourceBlocks(signature.kind, members);
    const int64_t most = (limit / blocks) & ~int64_t{kPostedAlign - 1};
    if (limit > 0 && block_bytes <= most) return low_latency;
  }
  return rules_.Choose(signature, members);
}

Status Service::FindPlan(const Submission& submission, Site* site, const Plan** plan,
                         const DevicePlan** device_plan) {
  const Signature& signature = submission.signature;
  const int members = submission.group->size();
  const PlanChoice choice = ChoosePlan(signature, members);
  if (!HasPlans(signature.kind, choice.algorithm) ||
      members > MostMembers(signature.kind, choice.algorithm)) {
    return Refused(submission, "the group is larger than it can serve");
  }
  *plan = &CachedPlan({signature.kind, choice.algorithm, members, signature.root, signature.pairs,
                       choice.chunks_per_member, nullptr});
  if ((*plan)->most_refs > kMostBuffers) {
    return Refused(submission, "a step of its plan " + PlanName(choice) + " touches " +
                                   std::to_string((*plan)->most_refs) + " buffers, more than the " +
                                   std::to_string(kMostBuffers) + " that a GPU's daemon can");
  }
  const auto [entry, is_new] = site->plans.try_emplace(*plan);
  DevicePlan& there = entry->second;
  *device_plan = &there;
  if (!is_new) return Status();

  std::vector<Step> steps;
  for (const MemberPlan& member : (*plan)->member) {
    steps.insert(steps.end(), member.steps.begin(), member.steps.end());
  }
  const size_t step_bytes = (steps.size() * sizeof(Step) + 15) / 16 * 16;
  const size_t ref_bytes = (*plan)->refs.size() * sizeof(BufferRef);
  auto* memory = static_cast<char*>(site->memory->Take(step_bytes + ref_bytes));
  Status status =
      memory == nullptr ? Refused(submission, "no device memory is left for its plan") : Status();
  if (status.ok()) status = site->gpu->Upload(memory, steps.data(), steps.size() * sizeof(Step));
  if (status.ok()) {
    status = site->gpu->Upload(memory + step_bytes, (*plan)->refs.data(), ref_bytes);
  }
  if (!status.ok()) {
    site->memory->Give(memory);
    site->plans.erase(entry);
    return status;
  }
  const auto* next = reinterpret_cast<const Step*>(memory);
  for (int member = 0; member < members; ++member) {
    StepList list = (*plan)->List(member);
    list.steps = next;
    list.refs = reinterpret_cast<const BufferRef*>(memory + step_bytes);
    next += list.step_count;
    there.members.push_back(list);
  }
  return Status();
}

Status Service::WaitForRoom(Site* site, const Rank& rank, uint32_t lanes,
                            std::unique_lock<std::mutex>& lock) {
  const int64_t end_ns = NowNs() + kRoomNs;
  for (;;) {
    bool room = !site->free_words.empty();
    for (uint32_t lane = 0; lane < lanes && room; ++lane) {
      room = !site->blocks[(rank.number + lane) % options_.blocks].free_tasks.empty();
    }
    if (room) return Status();
    if (NowNs() > end_ns) {
      return Status(StatusCode::kInternal,
                    "no room for more than " + std::to_string(options_.tasks_of_a_block) +
                        " unfinished collectives of a block of the daemon; none has finished "
                        "for " +
                        std::to_string(kRoomNs / 1'000'000'000) + " s");
    }
    LaunchIfParked(site);
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    lock.lock();
    Drain();
  }
}

// Memory that the operation holds beside the caller's.
Status Service::Stage(const Submission& submission, const Plan& plan, Site* site,
                      HostOperation* operation) {
  const Signature& signature = submission.signature;
  const bool overwritten =
      submission.source == submission.result && operation->source_bytes > 0 && !plan.in_place;
  const int64_t scratch_bytes =
      int64_t{plan.scratch_slots} * signature.count * DTypeSize(AccumulationType(signature.dtype));
  int64_t wanted = 0;
  const auto take = [&](bool needed, int64_t bytes, void** memory) {
    if (!needed || wanted < 0) return;
    *memory = site->memory->Take(static_cast<size_t>(bytes));
    if (*memory == nullptr) wanted = -std::max<int64_t>(1, bytes);
  };
  take(submission.stage_source, operation->source_bytes, &operation->staged_source);
  take(operation->result_bytes > 0 && (submission.result == nullptr || overwritten),
       operation->result_bytes, &operation->staged_result);
  take(scratch_bytes > 0, scratch_bytes, &operation->scratch);
  if (wanted == 0) return Status();
  for (void* memory : {operation->staged_source, operation->staged_result, operation->scratch}) {
    site->memory->Give(memory);
  }
  return Refused(submission, "the daemon has no " + std::to_string(-wanted) + " bytes of its " +
                                 std::to_string(options_.memory_bytes) +
                                 " bytes of device memory left");
}

void Service::GiveBack(HostOperation* operation) {
  Site* site = gpus_[operation->site].get();
  MemoryPool* memory = operation->relayed ? site->host_memory.get() : site->memory.get();
  for (void** held : {&operation->staged_source, &operation->staged_result, &operation->scratch}) {
    memory->Give(*held);
    *held = nullptr;
  }
}

// The instance that the submission belongs to, if others have joined it.
Status Service::Find(const Submission& submission, Instance** instance) {
  const Key key = {submission.id, submission.group};
  for (const auto& [ended, status] : ended_badly_) {
    if (ended == key) return status;
  }
  const auto entry = instances_.find(key);
  *instance = entry != instances_.end() ? entry->second.get() : nullptr;
  if (*instance == nullptr) return Status();
  Instance& found = **instance;
  if (!found.status.ok()) return found.status;
  if (found.operations[submission.member] >= 0) {
    return Status(StatusCode::kInternal, Text(submission) + " has been submitted twice");
  }
  if (found.signature != submission.signature) {
    std::string others;
    for (int64_t index : found.operations) {
      if (index < 0) continue;
      const HostOperation& other = operations_[index];
      others =
          " on device " + std::to_string(other.device) + SourceText(other.program, other.call_site);
      break;
    }
    const Status status(StatusCode::kMismatch, "members disagree: " + Text(submission) +
                                                   SourceText(submission.program, submission.site) +
                                                   " meets " + Text(found.signature) +
                                                   (others.empty() ? " elsewhere" : others));
    Fail(&found, status);
    return status;
  }
  return Status();
}

std::string Service::SourceText(uint64_t program, int32_t site) const {
  if (options_.site_of == nullptr) return "";
  const std::string source = options_.site_of(program, site).source;
  return source.empty() ? "" : " at " + source;
}

Status Service::TakeRecord(Site* site, Instance* instance) {
  const auto [members, lanes, posted_words] = instance->shape;
  std::vector<FreeRecord>& free = site->records[instance->shape];
  const size_t bytes = Record::Bytes(members, lanes, posted_words);
  bool clear = free.empty();
  FreeRecord taken = {nullptr, static_cast<uint32_t>(options_.first_sequence)};
  if (!free.empty()) {
    taken = free.back();
    free.pop_back();
  } else {
    taken.record = static_cast<Record*>(site->memory->Take(bytes));
  }
  if (taken.record == nullptr) {
    return Status(StatusCode::kInternal, "the daemon has no device memory left for its records");
  }
  if (posted_words > 0) {
    clear |= FlaggedWord::NextGeneration(&taken.generation);
    instance->generation = taken.generation;
  }
  instance->record = taken.record;
  return clear ? site->gpu->Clear(taken.record, bytes) : Status();
}

Status Service::Join(const Submission& submission, int site, const Plan& plan, uint32_t lanes,
                     Instance** instance) {
  auto made = std::make_unique<Instance>();
  const int members = submission.group->size();
  made->shape = {static_cast<uint32_t>(members), lanes, 0};
  if (plan.key.algorithm == Algorithm::kLowLatency) {
    const auto words =
        PostedWords(submission.signature) *
        static_cast<uint32_t>(members * SourceBlocks(submission.signature.kind, members));
    made->shape[2] = 1;
    while (made->shape[2] < words) made->shape[2] *= 2;
  }
  Status status = TakeRecord(gpus_[site].get(), made.get());
  if (!status.ok()) return status;
  made->id = submission.id;
  made->group = submission.group;
  made->signature = submission.signature;
  made->site = site;
  made->lanes = lanes;
  made->plan = &plan;
  made->operations.assign(members, -1);
  *instance = made.get();
  instances_[{submission.id, submission.group}] = std::move(made);
  return Status();
}

uint32_t Service::NewOperation() {
  if (free_operations_.empty()) {
    operations_.emplace_back();
    return static_cast<uint32_t>(operations_.size() - 1);
  }
  const uint32_t index = free_operations_.back();
  free_operations_.pop_back();
  return index;
}

// Tells every task of the instance that has not finished: one that still is there takes
// the others along.
void Service::Fail(Instance* instance, const Status& status) {
  instance->status = status;
  instance->told = true;
  for (int64_t index : instance->operations) {
    if (index < 0) continue;
    HostOperation& operation = operations_[index];
    if (operation.instance != instance || operation.state != State::kRunning) continue;
    SubmissionEntry entry = {};
    entry.kind = EntryKind::kFail;
    entry.sequence = operation.sequence;
    Site* site = gpus_[operation.site].get();
    for (const auto& [block, task] : operation.tasks) {
      if (task == kNoTask) continue;
      entry.task = task;
      // If there is no room the next look for late operations tries again.
      instance->told &= site->blocks[block].submissions->TryPush(entry);
    }
    LaunchIfParked(site);
  }
}

void Service::Drain() {
  for (auto& site : gpus_) Drain(site.get());
  if (relay_ != nullptr) {
    for (Relay::End& end : relay_->TakeEnds()) {
      operations_[end.operation].status = std::move(end.status);
      EndOperation(end.operation);
    }
  }
  ServeWaits();
  size_t kept = 0;
  for (uint32_t index : releasing_) {
    if (IsHeld(operations_[index])) {
      releasing_[kept++] = index;
    } else {
      Retire(index);
    }
  }
  releasing_.resize(kept);
}

void Service::Drain(Site* site) {
  if (!site->broken.ok()) return EndBroken(site);
  CompletionEntry entry;
  for (uint32_t number = 0; number < site->blocks.size(); ++number) {
    BlockQueues& block = site->blocks[number];
    while (block.completions->TryPop(&entry)) {
      const uint32_t index = block.operation_of[entry.task];
      HostOperation& operation = operations_[index];
      Instance& instance = *operation.instance;
      block.free_tasks.push_back(entry.task);
      for (auto& task : operation.tasks) {
        if (task == std::pair(number, entry.task)) task.second = kNoTask;
      }
      if (entry.record_failed != 0) instance.dirty = true;
      if (entry.failed != 0) {
        if (instance.status.ok()) {
          const Cause cause = Cause::Of(entry.cause);
          const std::vector<int64_t>& members = instance.group->members;
          const std::string what = Text(instance.signature) + " of " + DevicesText(*instance.group);
          const std::string device = std::to_string(members[cause.member]);
          instance.status =
              cause.reason == Reason::kRagged
                  ? Status(StatusCode::kInvalidArgument,
                           what + ": the rows that device " + std::to_string(members[cause.peer]) +
                               " sends to device " + device +
                               " do not fit: its send_sizes must equal recv_sizes there, and "
                               "offsets must lie inside operand and output")
                  : Status(StatusCode::kInternal, what + ": device " + device + " failed");
        }
        operation.status = instance.status;
      }
      if (--operation.lanes_left == 0) EndOperation(index);
    }
  }
}

void Service::EndOperation(uint32_t index) {
  HostOperation& operation = operations_[index];
  Site* site = gpus_[operation.site].get();
  Instance* instance = operation.instance;
  operation.state = State::kOver;
  operation.instance = nullptr;
  operation.tasks.clear();
  if (instance != nullptr) {
    --site->unfinished;
    ++site->finished;
  }
  --unfinished_;
  if (operation.status.ok()) {
    ++counters_.completed;
  } else {
    // Why the instance failed may have become known after a lane of it had ended.
    if (instance != nullptr) operation.status = instance->status;
    ++counters_.failed;
    if (!operation.reported && !operation.kept) {
      errors_.try_emplace(operation.device,
                          Error{operation.status, operation.program, operation.launch});
    }
  }
  if (instance != nullptr && (++instance->finished == instance->group->size() ||
                              (!instance->status.ok() && instance->finished == instance->joined))) {
    EndInstance(instance);
  }
  if (operation.taken) Retire(index);
}

void Service::EndInstance(Instance* instance) {
  Site* site = gpus_[instance->site].get();
  bool clean = true;
  if (instance->dirty || instance->finished < instance->group->size()) {
    const auto [members, lanes, posted_words] = instance->shape;
    clean = site->gpu->Clear(instance->record, Record::Bytes(members, lanes, posted_words)).ok();
  }
  if (clean) {
    site->records[instance->shape].push_back({instance->record, instance->generation});
  }
  const Key key = {instance->id, instance->group};
  if (!instance->status.ok()) {
    ended_badly_.emplace_back(key, instance->status);
    if (ended_badly_.size() > kRememberedFailures) ended_badly_.pop_front();
  }
  instances_.erase(key);
}

// Whether a stream, or a wait, has yet to copy to or from memory that the operation holds.
bool Service::IsHeld(const HostOperation& operation) {
  const OperationWords& words = *operation.words;
  return operation.awaited ||
         (operation.staged_result != nullptr && !Reached(words.released, operation.sequence)) ||
         (operation.relayed && !Reached(words.ready, operation.sequence));
}

// The operation is over, and its ticket used.
void Service::Retire(uint32_t index) {
  HostOperation& operation = operations_[index];
  if (IsHeld(operation)) {
    if (operation.state != State::kReleasing) releasing_.push_back(index);
    operation.state = State::kReleasing;
    return;
  }
  GiveBack(&operation);
  Site* site = gpus_[operation.site].get();
  site->free_words.push_back(operation.words);
  if (operation.relayed) --site->relayed;
  const uint32_t generation = operation.generation + 1;
  operation = HostOperation();
  operation.generation = generation;
  free_operations_.push_back(index);
}

Service::HostOperation* Service::OperationOf(uint64_t ticket) {
  const uint32_t index = IndexOf(ticket);
  if (index >= operations_.size()) return nullptr;
  HostOperation& operation = operations_[index];
  const bool good =
      operation.generation == ticket >> 32 && operation.state != State::kFree && !operation.taken;
  return good ? &operation : nullptr;
}

Service::HostOperation* Service::KeptOf(uint64_t ticket) {
  HostOperation* operation = OperationOf(ticket);
  return operation != nullptr && operation->kept ? operation : nullptr;
}

Status Service::Await(int gpu, Stream stream, const Wait& wait) {
  std::unique_lock<std::mutex> lock(mutex_);
  Drain();
  if (Status status = PopError(wait.device); !status.ok()) return status;
  Rank rank;
  if (Status status = FindRank(wait.device, gpu, &rank); !status.ok()) return status;
  Site* site = gpus_[gpu].get();
  if (Status status = WaitForRoom(site, rank, /*lanes=*/0, lock); !status.ok()) return status;
  Awaiting awaiting;
  awaiting.wait = wait;
  awaiting.site = gpu;
  awaiting.words = site->free_words.back();
  site->free_words.pop_back();
  awaiting.sequence = ++sequence_;
  OperationWords* words = awaiting.words;
  const uint64_t sequence = awaiting.sequence;
  Status status = site->gpu->Copy(stream, &words->ticket, wait.ticket, sizeof(words->ticket));
  if (status.ok()) status = site->gpu->Write(stream, &words->ready, sequence);
  if (status.ok()) status = site->gpu->Wait(stream, &words->done, sequence);
  if (status.ok()) status = site->gpu->Write(stream, &words->released, sequence);
  if (!status.ok()) return status;  // the stream is broken, and the words are lost with it
  awaiting_.push_back(awaiting);
  wait_pause_ = kLeastWaitPause;
  changed_.notify_all();
  return status;
}

void Service::ServeWaits() {
  size_t kept = 0;
  for (size_t i = 0; i < awaiting_.size(); ++i) {
    if (!awaiting_[i].served) Serve(&awaiting_[i]);
    const Awaiting& awaiting = awaiting_[i];
    if (awaiting.served && Reached(awaiting.words->released, awaiting.sequence)) {
      gpus_[awaiting.site]->free_words.push_back(awaiting.words);
    } else {
      awaiting_[kept++] = awaiting;
    }
  }
  awaiting_.resize(kept);
}

void Service::Serve(Awaiting* awaiting) {
  OperationWords* words = awaiting->words;
  const Wait& wait = awaiting->wait;
  Status status;
  if (awaiting->operation < 0) {
    if (!Reached(words->ready, awaiting->sequence)) return;
    wait_pause_ = kLeastWaitPause;
    HostOperation* operation = KeptOf(words->ticket);
    status = CheckWait(operation, wait);
    if (status.ok()) {
      operation->taken = operation->awaited = true;
      awaiting->operation = IndexOf(words->ticket);
    }
  }
  bool copied = false;
  if (status.ok()) {
    const auto index = static_cast<uint32_t>(awaiting->operation);
    HostOperation& operation = operations_[index];
    if (operation.state == State::kRunning) return;
    status = operation.status;
    if (status.ok() && operation.result_bytes > 0) {
      Gpu& gpu = *gpus_[awaiting->site]->gpu;
      const Stream stream = gpu.CopyStream();
      status = gpu.Copy(stream, wait.destination, operation.staged_result,
                        static_cast<size_t>(operation.result_bytes));
      if (status.ok()) status = gpu.Write(stream, &words->done, awaiting->sequence);
      copied = status.ok();
      if (copied) status = gpu.Write(stream, &operation.words->released, operation.sequence);
    }
    if (!copied) operation.words->released.StoreRelease(operation.sequence);
    operation.awaited = false;
    if (operation.state == State::kOver) Retire(index);
  }
  if (!status.ok() && !awaiting->reported) {
    errors_.try_emplace(wait.device, Error{status, wait.program, wait.launch});
  }
  if (!copied) words->done.StoreRelease(awaiting->sequence);
  awaiting->served = true;
  wait_pause_ = kLeastWaitPause;
}

// Whether the device may wait for it.
Status Service::CheckWait(const HostOperation* operation, const Wait& wait) const {
  if (operation == nullptr) {
    return Status(StatusCode::kInvalidArgument,
                  "a handle is waited for that has been waited for, dropped or cancelled before");
  }
  if (operation->device != wait.device) {
    return Status(StatusCode::kInvalidArgument,
                  "a handle of device " + std::to_string(operation->device) +
                      " is waited for on device " + std::to_string(wait.device) +
                      "; a handle goes from program to program as it is, on the same devices");
  }
  if (operation->result_bytes != wait.result_bytes) {
    return Status(StatusCode::kInvalidArgument, "start and wait differ in size");
  }
  return Status();
}

Service::KeptState Service::StateOfKept(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  Drain();
  const HostOperation* operation = KeptOf(ticket);
  if (operation == nullptr) return KeptState::kGone;
  return operation->state == State::kRunning ? KeptState::kPending : KeptState::kOver;
}

bool Service::DropKept(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  Drain();
  HostOperation* operation = KeptOf(ticket);
  if (operation == nullptr) return false;
  operation->taken = true;
  operation->words->released.StoreRelease(operation->sequence);  // no stream will
  if (operation->state == State::kOver) Retire(IndexOf(ticket));
  return true;
}

bool Service::CancelKept(uint64_t ticket, const Status& status) {
  uint64_t sequence;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Drain();
    HostOperation* operation = KeptOf(ticket);
    if (operation == nullptr || operation->state != State::kRunning) return false;
    if (!operation->relayed) {
      if (!operation->instance->status.ok()) return false;
      Fail(operation->instance, status);
      return true;
    }
    sequence = operation->sequence;
  }
  return relay_->Cancel(sequence, status);
}

void Service::Abandon(int gpu, Stream stream, uint64_t program, uint64_t launch,
                      const Status& status) {
  std::vector<uint64_t> relayed;
  std::unique_lock<std::mutex> lock(mutex_);
  Drain();
  for (uint32_t index = 0; index < operations_.size(); ++index) {
    HostOperation& operation = operations_[index];
    if (operation.site != gpu || operation.program != program || operation.launch != launch ||
        operation.state == State::kFree) {
      continue;
    }
    operation.reported = true;
    if (operation.taken) continue;
    if (operation.state == State::kRunning && operation.relayed) {
      relayed.push_back(operation.sequence);
    } else if (operation.state == State::kRunning && operation.instance->status.ok()) {
      Fail(operation.instance, status);
    }
    if (stream != nullptr && !operation.relayed) {  // else it uses none of the program's
      // If that fails, the stream is broken.
      static_cast<void>(gpus_[gpu]->gpu->Wait(stream, &operation.words->done, operation.sequence));
    }
    operation.words->released.StoreRelease(operation.sequence);  // no stream will
    operation.taken = true;
    if (operation.state == State::kOver) Retire(index);
  }
  for (Awaiting& awaiting : awaiting_) {
    awaiting.reported |=
        awaiting.site == gpu && awaiting.wait.program == program && awaiting.wait.launch == launch;
  }
  for (auto error = errors_.begin(); error != errors_.end();) {
    const auto rank = ranks_.find(error->first);
    const bool is_of_launch = rank->second.site == gpu && error->second.program == program &&
                              error->second.launch == launch;
    error = is_of_launch ? errors_.erase(error) : std::next(error);
  }
  lock.unlock();
  for (uint64_t sequence : relayed) relay_->Cancel(sequence, status);
}

Status Service::PopError(int64_t device) {
  const auto error = errors_.find(device);
  if (error == errors_.end()) return Status();
  const Status status = std::move(error->second.status);
  errors_.erase(error);
  return status;
}

Status Service::Finish(Stream stream, uint64_t ticket, void* destination) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (OperationOf(ticket) == nullptr) {
    return Status(StatusCode::kInternal, "the ticket of a collective is not, or no longer, valid");
  }
  const uint32_t index = IndexOf(ticket);
  HostOperation& operation = operations_[index];
  const int64_t device = operation.device;
  Gpu& gpu = *gpus_[operation.site]->gpu;
  Status status = gpu.Wait(stream, &operation.words->done, operation.sequence);
  if (status.ok() && operation.staged_result != nullptr) {
    if (operation.result_bytes > 0) {
      status = gpu.Copy(stream, destination, operation.staged_result,
                        static_cast<size_t>(operation.result_bytes));
    }
    if (status.ok()) status = gpu.Write(stream, &operation.words->released, operation.sequence);
  }
  operation.taken = true;
  Drain();
  // It may have been over before, or be so since Drain, which then has retired it.
  if (operation.generation == ticket >> 32 && operation.state == State::kOver) {
    Retire(index);
  }
  return status.ok() ? PopError(device) : status;
}

Status Service::TakeError(int64_t device) {
  std::lock_guard<std::mutex> lock(mutex_);
  Drain();
  return PopError(device);
}

bool Service::Idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  Drain();
  return unfinished_ == 0 && awaiting_.empty();
}

std::vector<FlightEntry> Service::InFlight() {
  std::lock_guard<std::mutex> lock(mutex_);
  Drain();
  const int64_t now_ns = NowNs();
  std::vector<FlightEntry> entries;
  for (const HostOperation& operation : operations_) {
    if (operation.state != State::kRunning) continue;
    if (operation.relayed && relay_->IsSubmitted(operation.sequence)) continue;
    const Signature& signature = operation.signature;
    const Instance* instance = operation.instance;
    const SiteInfo site = options_.site_of == nullptr
                              ? SiteInfo()
                              : options_.site_of(operation.program, operation.call_site);
    FlightEntry entry;
    entry.device = operation.device;
    entry.sequence = operation.sequence;
    entry.operation = site.operation.empty() ? KindName(signature.kind) : site.operation;
    entry.name = operation.name;
    if (operation.has_key) entry.key = std::to_string(operation.key);
    entry.program = site.program;
    entry.launch = operation.launch;
    entry.source = site.source;
    entry.dtype = DTypeName(signature.dtype);
    entry.count = signature.count;
    entry.bytes = std::max(operation.source_bytes, operation.result_bytes);
    if (instance != nullptr) {
      const PlanKey& key = instance->plan->key;
      entry.plan = PlanName({key.algorithm, key.chunks_per_member});
    } else {  // as the host's runtime will
      entry.plan =
          PlanName(PlanRules(options_.plan_rules)
                       .Choose(signature, operation.group->size(), operation.group->placement));
    }
    entry.group = operation.group->members;
    if (instance != nullptr) {
      for (size_t i = 0; i < instance->operations.size(); ++i) {
        if (instance->operations[i] < 0) entry.absent.push_back(entry.group[i]);
      }
    }
    entry.state = !Reached(operation.words->ready, operation.sequence) ? "waiting for its operand"
                  : !entry.absent.empty()                              ? "waiting for members"
                                                                       : "moving";
    entry.age_s = static_cast<double>(now_ns - operation.start_ns) * 1e-9;
    entry.wait_s = entry.age_s;
    entries.push_back(std::move(entry));
  }
  return entries;
}

ServiceCounters Service::Counters() {
  std::lock_guard<std::mutex> lock(mutex_);
  ServiceCounters counters = counters_;
  for (const auto& site : gpus_) {
    for (const BlockQueues& block : site->blocks) {
      counters.turns += block.counters->turns.LoadRelaxed();
      counters.preemptions += block.counters->preemptions.LoadRelaxed();
      counters.saves += block.counters->saves.LoadRelaxed();
      counters.loads += block.counters->loads.LoadRelaxed();
      counters.bulk_copies += block.counters->bulk_copies.LoadRelaxed();
    }
  }
  return counters;
}

void Service::LaunchIfParked(Site* site) {
  // Acquire: partner is the store in Daemon::End. A daemon that leaves just now is seen
  // by the keeper.
  if (site->arguments.door->parked.LoadAcquire() != site->launches) return;
  site->arguments.launch = ++site->launches;
  ++counters_.launches;
  site->finished_at_launch = site->finished;
  site->parked_since_ns = 0;
  // If it fails it will never park, so nothing is launched any more.
  site->broken = site->gpu->Launch(site->arguments);
}

// What a daemon that cannot be launched will never do: its streams go on, with errors.
void Service::EndBroken(Site* site) {
  for (uint32_t index = 0; index < operations_.size(); ++index) {
    HostOperation& operation = operations_[index];
    if (operation.instance == nullptr || gpus_[operation.site].get() != site) continue;
    if (operation.instance->status.ok()) operation.instance->status = site->broken;
    operation.instance->dirty = true;
    operation.status = site->broken;
    operation.words->done.StoreRelease(operation.sequence);
    EndOperation(index);
  }
}

void Service::Keep() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    const auto is_idle = [this] {
      return unfinished_ == 0 && releasing_.empty() && awaiting_.empty();
    };
    if (is_idle()) {
      changed_.wait(lock, [&] { return stop_ || !is_idle(); });
    } else if (awaiting_.empty()) {
      changed_.wait_for(lock, kKeeperPause);
    } else {
      changed_.wait_for(lock, wait_pause_);
      wait_pause_ = std::min(2 * wait_pause_, kKeeperPause);
    }
    if (stop_) return;
    Drain();
    const int64_t now_ns = NowNs();
    for (auto& site : gpus_) KeepAlive(site.get(), now_ns);
    if (now_ns >= next_late_look_ns_) {
      next_late_look_ns_ = now_ns + kLateLookNs;
      FailLate(now_ns);
    }
  }
}

// Launches a daemon again that has left with something unfinished: at once if operands
// have become ready since, else after a pause.
void Service::KeepAlive(Site* site, int64_t now_ns) {
  if (site->unfinished == 0 || site->arguments.door->parked.LoadAcquire() != site->launches) {
    site->parked_since_ns = 0;
    return;
  }
  if (site->parked_since_ns == 0) {
    site->parked_since_ns = now_ns;
    ++counters_.quits;
    const bool in_vain = site->finished == site->finished_at_launch;
    site->pause_ns = in_vain ? std::min(std::max(2 * site->pause_ns, kLeastPauseNs), kMostPauseNs)
                             : kLeastPauseNs;
  }
  bool ready = false;
  for (HostOperation& operation : operations_) {
    if (operation.instance == nullptr || operation.seen_ready ||
        gpus_[operation.site].get() != site) {
      continue;
    }
    operation.seen_ready = Reached(operation.words->ready, operation.sequence);
    ready |= operation.seen_ready;
  }
  if (ready || now_ns - site->parked_since_ns >= site->pause_ns) LaunchIfParked(site);
}

void Service::FailLate(int64_t now_ns) {
  for (auto& [key, instance] : instances_) {
    if (!instance->status.ok()) {
      if (!instance->told) Fail(instance.get(), Status(instance->status));
      continue;
    }
    for (int64_t index : instance->operations) {
      if (index < 0) continue;
      const HostOperation& operation = operations_[index];
      if (operation.instance != instance.get() || operation.deadline_ns > now_ns) continue;
      std::string absent;
      for (size_t i = 0; i < instance->operations.size(); ++i) {
        if (instance->operations[i] >= 0) continue;
        absent += (absent.empty() ? "" : ", ") + std::to_string(instance->group->members[i]);
      }
      const Status status(
          StatusCode::kDeadlineExceeded,
          Text(instance->signature) + " of " + DevicesText(*instance->group) + ": device " +
              std::to_string(operation.device) +
              SourceText(operation.program, operation.call_site) + " has waited for " +
              std::to_string(operation.timeout_ns / 1'000'000) + " ms" +
              (absent.empty() ? "; all members have called it, but not all have come to it"
                              : "; device " + absent + " has not called it"));
      Fail(instance.get(), status);
      break;
    }
  }
}

}  // namespace gpu
}  // namespace dfccl
