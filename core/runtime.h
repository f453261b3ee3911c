// SPDX-License-Identifier: Apache-2.0
// The process-wide runtime: what the XLA handlers and the bindings call.
// Everything else in core/ is behind this header.
#ifndef DFCCL_CORE_RUNTIME_H_
#define DFCCL_CORE_RUNTIME_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/collective.h"
#include "core/group.h"
#include "core/plans/choice.h"
#include "core/status.h"
#include "core/trace/flight.h"

namespace dfccl {

struct Operation;  // one member's part of one collective instance

// A member's part of a kRaggedAllToAll. The arrays have an entry for each member, in
// rows of `count` elements; they are copied at submission.
struct RaggedPart {
  std::vector<int64_t> input_offsets;   // [p]: of what p gets, in the source
  std::vector<int64_t> send_sizes;      // [p]: of what p gets
  std::vector<int64_t> output_offsets;  // [p]: of what p gets, in the result of p
  std::vector<int64_t> recv_sizes;      // [p]: of what p sends
  int64_t source_rows = 0;
  int64_t result_rows = 0;
  const void* initial = nullptr;  // what the result holds before; may be the result
};

struct Submission {
  int64_t device = 0;  // global device id of this member
  const Group* group = nullptr;
  int member = 0;  // index in group
  CollectiveId id;
  Signature signature;
  const void* source = nullptr;
  void* result = nullptr;              // may be `source`; nullptr: the runtime's until Collect
  bool stage_source = false;           // copy the source at submission; else read in place
  bool zeros = false;                  // instead of a source
  const RaggedPart* ragged = nullptr;  // for kRaggedAllToAll; read during Submit
  // The callback waits for nobody: it may be called on any thread that submits,
  // with that submission unfinished below it.
  bool closed = false;
  bool linger = true;      // Submit may look for what other processes send, for a while
  int priority = 0;        // larger first
  int64_t timeout_ns = 0;  // 0: the process default
  // For people: where the call is and what it is called. Not part of matching.
  uint64_t program = 0;
  uint64_t launch = 0;
  uint64_t occurrence = 0;
  int32_t site = -1;
  std::string_view name;  // empty: unnamed
  int64_t key = 0;
  bool has_key = false;

  int64_t source_bytes() const {
    return BlockBytes() *
           (ragged != nullptr ? ragged->source_rows : SourceBlocks(signature.kind, group->size()));
  }
  int64_t result_bytes() const {
    return BlockBytes() *
           (ragged != nullptr ? ragged->result_rows : ResultBlocks(signature.kind, group->size()));
  }

 private:
  int64_t BlockBytes() const { return signature.count * DTypeSize(signature.dtype); }
};

struct RuntimeOptions {
  int workers = 0;  // 0: the cores this process may use
  int64_t timeout_ns = 600'000'000'000;
  int64_t stall_warning_ns = 10'000'000'000;
  int64_t cycle_grace_ns = 2'000'000'000;  // 0: never report cycles as errors
  bool preemption = true;                  // false only in tests that show why it is there
  uint64_t first_sequence = 0;             // tests start counters near 2^31, 2^32, 2^63
  std::vector<PlanRule> plan_rules;        // see core/plans/choice.h
};

// What another process's owner says by SendNote, or the end of that process.
struct Note {
  int process = 0;
  bool ended = false;
  bool in_order = false;  // it has said goodbye
  std::string text;       // of an end: how it was noticed
};

// What a call site is, for messages; registered when a program is lowered.
struct SiteInfo {
  std::string operation;  // "all_reduce(sum)"
  std::string name;
  std::string source;          // "train.py:12 (step)"
  std::string program;         // "jit_step"
  std::vector<int32_t> after;  // sites whose results this one's operand needs
};

class Runtime {
 public:
  // Created at first use with the options last given to Configure.
  static Runtime& Get();
  static void Configure(const RuntimeOptions& options);

  virtual ~Runtime() = default;

  virtual const Group* InternGroup(const std::vector<int64_t>& members) = 0;

  // Hands one member's part to its device's daemon and drives it for a bounded
  // time on the calling thread. Never waits for a peer; waits only for room in
  // a full submission queue, by driving the daemon. Thread-safe.
  virtual Operation* Submit(const Submission& submission) = 0;

  // True once the operation has finished; then *status is its outcome and the
  // caller must call Collect or Release exactly once.
  virtual bool Finished(Operation* operation, Status* status) = 0;

  // Calls function(argument) once when the operation finishes, on a thread
  // where foreign code may run for long. Returns false, without calling, if it
  // has finished already. `blocks`: until then the device's program stands still, which
  // for devices that wait for each other in a circle is an error.
  using Callback = void (*)(void* argument);
  virtual bool OnFinish(Operation* operation, Callback function, void* argument, bool blocks) = 0;

  // Copies a runtime-owned result to `destination` and releases the operation.
  virtual void Collect(Operation* operation, void* destination) = 0;
  virtual void Release(Operation* operation) = 0;

  // Ends an unfinished operation, for all its members. False: it has finished.
  virtual bool Cancel(Operation* operation, const Status& status) = 0;

  // Ends every unfinished operation that `device` started in (program, launch)
  // with `status`, and returns when no peer touches their buffers any more.
  virtual void Abandon(int64_t device, uint64_t program, uint64_t launch, const Status& status) = 0;

  // Where there are several processes: which one this is, and where all devices
  // and processes are (see SetTopology). Once, before groups are made that reach into
  // others. A process behind a network that is silent for `peer_timeout_ns` is lost;
  // 0: never.
  virtual Status JoinCluster(int process, std::unordered_map<int64_t, int> process_of,
                             std::vector<int> host_of, int64_t peer_timeout_ns) = 0;
  // Connected, authenticated sockets to another process, and memory that both share,
  // or -1 (core/transport/transport.h). All are the runtime's from here on.
  virtual Status AddLink(int process, const std::vector<int>& sockets, int memory) = 0;
  // A descriptor that becomes readable when the runtime, stuck, wants to know how
  // many threads of the user there are, and the answer to that.
  virtual int ThreadsQuestion() = 0;
  virtual void AnswerThreads(int threads) = 0;
  // That process will never come.
  virtual void SetDown(int process, const std::string& reason) = 0;

  // Words for the owner of another process, in order; at most kMostNoteBytes.
  static constexpr size_t kMostNoteBytes = 4000;
  virtual Status SendNote(int process, const std::string& text) = 0;
  // A descriptor that is readable when there are notes, and those there are.
  virtual int NotesReady() = 0;
  virtual std::vector<Note> TakeNotes() = 0;

  // Ends, here and for their peers, all calls between processes that were or will be
  // launched in an era before this one (core/identity.h).
  virtual void GiveUpBefore(uint32_t era, const std::string& reason) = 0;
  // Breaks with a process, which hears why if it can still hear.
  virtual void LeaveOut(int process, const std::string& reason) = 0;
  // For `timeout_ns`, takes part with zeros in the all_reduces (sums, means, bitwise
  // or) that other processes announce, in the place of all devices here; their
  // other calls end with an error. Returns for how many calls.
  virtual int StandIn(int64_t timeout_ns) = 0;

  virtual void RegisterSite(uint64_t program, int32_t site, SiteInfo info) = 0;
  // `program` is `lowered` on some devices: its sites are the same.
  virtual void RegisterLoaded(uint64_t program, uint64_t lowered) = 0;
  virtual SiteInfo FindSite(uint64_t program, int32_t site) const = 0;  // empty if unknown

  // Other rules from now on, for measurements. The members of an instance must all
  // choose by the same ones: false, and nothing is changed, while any is in flight.
  virtual bool SetPlanRules(const std::vector<PlanRule>& rules) = 0;
  // Processes of one job must have the same.
  virtual uint64_t PlanRulesHash() const = 0;

  // Any thread, any time, also while the job is stuck.
  virtual FlightReport Report() = 0;

  // Ends everything pending with an error, stops and joins the threads, within
  // a bound. Called at exit; the next Get starts afresh.
  static void Shutdown();
};

}  // namespace dfccl

#endif  // DFCCL_CORE_RUNTIME_H_
