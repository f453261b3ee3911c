// SPDX-License-Identifier: Apache-2.0
// The host's side of the CUDA daemons of a process: matches members by identity, gives
// their parts to the blocks of their GPUs, and puts into the members' streams what tells
// the daemon that operands are there and what waits for results. It never waits for a
// stream or a GPU. A thread of its own, the keeper, sleeps while nothing is unfinished; else
// it looks every millisecond for what has finished or is late, and launches daemons again
// that have left while there was something to do.
//
// Ranks are devices (Submission::device); several may share a GPU. Groups with members in
// other processes, or on GPUs that do not reach each other's memory, go through the host
// (relay.h) instead of the daemons.
//
// An operation that is kept outlives its launch. Its ticket is in device memory, as XLA may
// copy it and hand it to other programs, and so the host does not know what a wait is for
// when it is put into a stream. The stream tells it: the keeper reads the ticket, and when
// the operation is over has its result copied by a stream that never waits.
#ifndef DFCCL_CUDA_SERVICE_H_
#define DFCCL_CUDA_SERVICE_H_

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/plans/choice.h"
#include "core/plans/plan.h"
#include "core/runtime.h"
#include "core/status.h"
#include "core/trace/flight.h"
#include "cuda/gpu.h"
#include "cuda/layout.h"
#include "cuda/memory.h"
#include "cuda/relay.h"

namespace dfccl {
namespace gpu {

struct ServiceOptions {
  uint32_t blocks = 8;              // of a daemon: the SMs that it may take
  uint32_t tasks_of_a_block = 512;  // unfinished ones; a power of two
  int64_t lane_bytes = 1 << 20;     // of a message for each block that works on it
  int64_t slice_bytes = 1 << 19;    // read and written by a block before it looks up
  // Sources of up to so many bytes in all go with flags in the data; at most kMostPostedBytes,
  // 0: none do. (A guess: the first GPU is to tell.)
  int64_t low_latency_bytes = kMostPostedBytes;
  bool bulk = false;          // large copies by cp.async.bulk, from sm_90 on: no GPU has seen it
  uint32_t quit_polls = 700;  // about a millisecond on a GPU
  size_t memory_bytes = size_t{256} << 20;  // device memory of the daemon: staging, records
  // Host memory of each GPU for what goes through the host; taken if there may be any.
  size_t host_memory_bytes = size_t{256} << 20;
  bool several_processes = false;           // groups may have members in others
  std::unordered_map<int64_t, int> gpu_of;  // the GPU of each device, as far as known
  int64_t timeout_ns = 600'000'000'000;
  int64_t shutdown_ns = 5'000'000'000;  // for what is unfinished at the end, and again for leaving
  uint64_t first_sequence = 0;          // tests start it near 2^63
  std::vector<PlanRule> plan_rules;
  // For messages: what a call site is; may be empty.
  std::function<SiteInfo(uint64_t program, int32_t site)> site_of;
};

struct ServiceCounters {
  uint64_t submitted = 0, completed = 0, failed = 0;
  uint64_t relayed = 0;   // of what was submitted, through the host
  uint64_t posted = 0;    // of the submitted ones, those of low latency
  uint64_t launches = 0;  // of daemons
  uint64_t quits = 0;     // daemons that left while something was unfinished
  uint64_t turns = 0, preemptions = 0, saves = 0, loads = 0, bulk_copies = 0;
};

class Service {
 public:
  // nullptr: *status says why not.
  static std::unique_ptr<Service> Make(std::vector<std::unique_ptr<Gpu>> gpus,
                                       const ServiceOptions& options, Status* status);
  ~Service();  // fails what is unfinished, and waits for the daemons to leave, within a bound
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  Gpu& gpu(int index) { return *gpus_[index]->gpu; }

  // Gives a member's part to the daemon of `gpu`, to begin once `stream` has come here.
  // An error is the call's own, or what an operation of this device ended with since.
  // `ragged`: for kRaggedAllToAll, whose Submission::ragged stays empty. `keep`: the
  // operation is kept, and the stream writes its ticket there; for Await, not for Finish.
  Status Start(int gpu, Stream stream, const Submission& submission, const RaggedArrays* ragged,
               uint64_t* ticket, void* keep = nullptr);

  // Makes `stream` wait for the operation, and then, if the daemon owns its result, copies
  // that to `destination`. Once for each Start, on any stream of the same GPU. An error is
  // the operation's, if it has failed by now; else a later call of the device has it.
  Status Finish(Stream stream, uint64_t ticket, void* destination);

  struct Wait {
    int64_t device = 0;
    uint64_t program = 0;
    uint64_t launch = 0;
    const void* ticket = nullptr;  // in device memory
    void* destination = nullptr;
    int64_t result_bytes = 0;
  };
  // Makes `stream` wait for an operation that is kept, and for a copy of its result. What is
  // wrong with it, or how it has failed, is an error of a later call of the device.
  Status Await(int gpu, Stream stream, const Wait& wait);

  // Of operations that are kept.
  enum class KeptState { kPending, kOver, kGone };
  KeptState StateOfKept(uint64_t ticket);
  bool DropKept(uint64_t ticket);                          // false: it is gone
  bool CancelKept(uint64_t ticket, const Status& status);  // false: it is gone or over

  // Ends a launch of a program on a GPU that has failed: fails what it has started and
  // not finished, and makes `stream` wait until nobody uses the buffers of that any more
  // (nullptr: the stream is gone). No later call has an error of this launch.
  void Abandon(int gpu, Stream stream, uint64_t program, uint64_t launch, const Status& status);

  // The first error of an operation of the device that no call has returned; then none.
  Status TakeError(int64_t device);

  // Whether nothing is unfinished.
  bool Idle();
  // What is unfinished, but for what the host's runtime reports.
  std::vector<FlightEntry> InFlight();
  ServiceCounters Counters();

 private:
  struct DevicePlan {
    std::vector<StepList> members;
  };
  struct BlockQueues {
    std::unique_ptr<SpscProducer<SubmissionEntry>> submissions;
    std::unique_ptr<SpscConsumer<CompletionEntry>> completions;
    BlockCounters* counters;
    std::vector<uint32_t> free_tasks;
    std::vector<uint32_t> operation_of;  // by task
  };
  using RecordShape = std::array<uint32_t, 3>;  // see Record::Bytes
  struct FreeRecord {
    Record* record;
    uint32_t generation;  // of what was posted last
  };
  // One GPU and its daemon.
  struct Site {
    std::unique_ptr<Gpu> gpu;
    std::unique_ptr<MemoryPool> memory;
    std::unique_ptr<MemoryPool> host_memory;
    DaemonArguments arguments = {};
    std::vector<BlockQueues> blocks;
    std::map<const Plan*, DevicePlan> plans;
    std::map<RecordShape, std::vector<FreeRecord>> records;  // all zero, but for what was posted
    uint64_t launches = 0;
    Status broken;            // why the daemon cannot be launched
    uint64_t unfinished = 0;  // of the daemon
    uint64_t finished = 0;    // ever
    uint64_t relayed = 0;     // operations that hold host memory
    uint32_t ranks = 0;
    std::vector<OperationWords*> free_words;
    // While the daemon has left with something unfinished.
    uint64_t finished_at_launch = 0;
    int64_t parked_since_ns = 0;
    int64_t pause_ns = 0;
  };
  struct Rank {
    int site;
    uint32_t number;  // among those of the site
  };
  // An instance that members have joined and not all have finished.
  struct Instance {
    CollectiveId id;
    const Group* group = nullptr;
    Signature signature;
    Record* record = nullptr;
    RecordShape shape = {};
    uint32_t generation = 0;  // of what is posted; 0: nothing is
    int site = 0;             // whose memory the record is
    uint32_t lanes = 1;
    const Plan* plan = nullptr;
    std::vector<int64_t> operations;  // by member; -1: it has not come
    int joined = 0;
    int finished = 0;
    bool dirty = false;  // the record is not all zero at the end
    bool told = true;    // the daemons have heard of its failure
    Status status;       // why it has failed
  };
  // What a later call of a device is to return.
  struct Error {
    Status status;
    uint64_t program = 0;
    uint64_t launch = 0;
  };
  enum class State : uint8_t { kFree, kRunning, kOver, kReleasing };
  struct HostOperation {
    State state = State::kFree;
    bool taken = false;  // Finish was called
    bool relayed = false;
    bool kept = false;     // for a wait in whatever launch
    bool awaited = false;  // by a wait that has not fetched its result
    bool seen_ready = false;
    int site = 0;
    int64_t device = 0;
    uint32_t generation = 0;
    OperationWords* words = nullptr;
    uint64_t sequence = 0;
    Instance* instance = nullptr;  // not of what is relayed
    uint16_t member = 0;
    uint32_t lanes_left = 0;
    uint64_t program = 0;  // where the call stands
    uint64_t launch = 0;
    int32_t call_site = -1;
    bool reported = false;                             // its launch has failed
    std::vector<std::pair<uint32_t, uint32_t>> tasks;  // block and task of each lane
    Status status;
    void* staged_source = nullptr;
    void* staged_result = nullptr;
    void* scratch = nullptr;
    int64_t source_bytes = 0;
    int64_t result_bytes = 0;
    int64_t timeout_ns = 0;
    int64_t deadline_ns = 0;
    // For reports.
    const Group* group = nullptr;
    Signature signature;
    std::string name;
    int64_t key = 0;
    bool has_key = false;
    int64_t start_ns = 0;
  };
  // A wait in a stream.
  struct Awaiting {
    Wait wait;
    int site = 0;
    OperationWords* words = nullptr;
    uint64_t sequence = 0;
    int64_t operation = -1;  // -1: the stream has not told its ticket
    bool served = false;
    bool reported = false;  // its launch has failed
  };
  using Key = std::pair<CollectiveId, const Group*>;
  struct KeyHash {
    size_t operator()(const Key& key) const { return static_cast<size_t>(key.first.lo); }
  };

  explicit Service(const ServiceOptions& options);
  Status SetUp(Site* site);
  Status SetUpRelay();
  Status Enter(int gpu, Stream stream, const Submission& submission, const RaggedArrays* ragged,
               uint64_t* ticket, void* keep, std::unique_lock<std::mutex>& lock);
  Status EnterRelay(int gpu, Stream stream, const Submission& submission,
                    const RaggedArrays* ragged, uint64_t* ticket, void* keep,
                    std::unique_lock<std::mutex>& lock);
  Status GiveTicket(Stream stream, uint64_t ticket, void* there, HostOperation* operation);
  bool GoesThroughHost(const Group& group) const;
  HostOperation MakeOperation(int gpu, const Submission& submission, const RaggedArrays* ragged);
  Status PopError(int64_t device);
  Status FindRank(int64_t device, int gpu, Rank* rank);
  PlanChoice ChoosePlan(const Signature& signature, int members) const;
  Status FindPlan(const Submission& submission, Site* site, const Plan** plan,
                  const DevicePlan** device_plan);
  Status Find(const Submission& submission, Instance** instance);
  std::string SourceText(uint64_t program, int32_t site) const;
  Status Join(const Submission& submission, int site, const Plan& plan, uint32_t lanes,
              Instance** instance);
  Status TakeRecord(Site* site, Instance* instance);
  Status WaitForRoom(Site* site, const Rank& rank, uint32_t lanes,
                     std::unique_lock<std::mutex>& lock);
  Status Stage(const Submission& submission, const Plan& plan, Site* site,
               HostOperation* operation);
  Status TakeHostMemory(const Submission& submission, int64_t index_bytes, Site* site,
                        HostOperation* operation, std::unique_lock<std::mutex>& lock);
  static bool IsHeld(const HostOperation& operation);
  void GiveBack(HostOperation* operation);
  uint32_t NewOperation();
  void Fail(Instance* instance, const Status& status);
  void Drain();
  void Drain(Site* site);
  void EndOperation(uint32_t index);
  void EndInstance(Instance* instance);
  void Retire(uint32_t index);
  // nullptr: the ticket is not good.
  HostOperation* OperationOf(uint64_t ticket);
  HostOperation* KeptOf(uint64_t ticket);
  Status CheckWait(const HostOperation* operation, const Wait& wait) const;
  void ServeWaits();
  void Serve(Awaiting* awaiting);
  void LaunchIfParked(Site* site);
  void EndBroken(Site* site);
  void Keep();
  void KeepAlive(Site* site, int64_t now_ns);
  void FailLate(int64_t now_ns);

  const ServiceOptions options_;
  const PlanRules rules_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::vector<std::unique_ptr<Site>> gpus_;
  std::unique_ptr<Relay> relay_;            // nullptr: nothing can go through the host
  std::vector<std::vector<bool>> reaches_;  // by GPU; empty: all reach each other
  std::unordered_map<int64_t, Rank> ranks_;
  std::unordered_map<Key, std::unique_ptr<Instance>, KeyHash> instances_;
  std::deque<std::pair<Key, Status>> ended_badly_;  // the newest last
  std::deque<HostOperation> operations_;
  std::vector<uint32_t> free_operations_;
  std::vector<uint32_t> releasing_;  // over, but their memory is still used
  std::vector<Awaiting> awaiting_;
  std::chrono::microseconds wait_pause_{0};  // of the keeper, while there are some
  std::map<int64_t, Error> errors_;          // by device
  uint64_t sequence_ = 0;
  uint64_t unfinished_ = 0;
  ServiceCounters counters_;
  int64_t next_late_look_ns_ = 0;
  std::thread keeper_;
};

}  // namespace gpu
}  // namespace dfccl

#endif  // DFCCL_CUDA_SERVICE_H_
