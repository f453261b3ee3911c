// SPDX-License-Identifier: Apache-2.0
// The other processes of the job, as the daemons of this one see them: what
// members here send goes out, and what members there send moves their slots in
// the records here. Every process has its own record of an instance.
//
// A message is about one instance (a piece of data, a failure), or tells once
// what later ones refer to by number (groups, pairs, call sites).
#ifndef DFCCL_CORE_DAEMON_CLUSTER_H_
#define DFCCL_CORE_DAEMON_CLUSTER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/daemon/operation.h"
#include "core/daemon/record.h"
#include "core/daemon/spin_lock.h"
#include "core/daemon/stuck.h"
#include "core/protocol/atomics.h"
#include "core/protocol/step.h"
#include "core/transport/transport.h"

namespace dfccl {

class Crew;
class Describer;
class SiteTable;

// A device whose part of a launch has ended with an error: it will not come to
// what its peers in that launch still wait for.
struct Ended {
  int64_t device;
  uint64_t program;
  uint64_t launch;
  Status status;
};

class Cluster final : private Receiver {
 public:
  struct Environment {
    RecordTable* table;
    SiteTable* sites;
    const Describer* describer;
    Crew* crew;
    std::function<Shape(const Signature&, const Group&)> shape_of;
    std::function<void(const Ended&)> ended;  // in another process
    std::function<void()> announced;          // a call, by another process, while StandsIn
  };
  explicit Cluster(Environment environment) : environment_(std::move(environment)) {}
  ~Cluster() override;

  // Once, before anything else.
  Status Join(int process, int processes, int devices_here, const TransportOptions& options);
  Status AddLink(int process, const std::vector<int>& sockets, int memory);
  void SetDown(int process, const Status& status);
  void Close();

  // Moves what can be moved now; true if anything was. Again and again, between the
  // other two, it need not be rung for.
  bool Poll();
  void BeginPolling();
  void EndPolling();

  // A kSend step of a member of this process. Never waits.
  void Send(Operation* operation, const Step& step);
  // Takes back what a member of a failed instance has sent and has not left yet.
  void Cancel(Operation* operation);
  void TellFailed(const RecordTable::Failure& failure);
  void TellEnded(const Ended& ended);

  // Says to others what waits here; an empty list takes it back. While nothing happens
  // here, this is repeated, and what others say is told on to the processes of the
  // devices that are awaited here.
  // `words` is StuckWords() from before the waits were looked up. Returns the calls here
  // that must end: those in a cycle of processes of which this one is the first
  // (core/daemon/stuck.h).
  struct MustEnd {
    std::string why;
    std::vector<CollectiveId> ids;
  };
  MustEnd TellStuck(uint64_t words, uint64_t activity, std::vector<DeviceWait> waits);
  // How often others have said over their own links what waits in them.
  uint64_t StuckWords();
  int process() const { return process_; }
  bool has_others() const { return joined_.LoadAcquire() != nullptr; }
  // Readable when the runtime wants to know how many threads of the user there
  // are; the answer.
  int question() const { return question_; }
  void AnswerThreads(int threads);

  // See core/runtime.h.
  Status SendNote(int process, const std::string& text);
  int notes_ready() const { return notes_ready_; }
  std::vector<Note> TakeNotes();
  void GiveUpBefore(uint32_t era, const Status& status);
  void LeaveOut(int process, const Status& status);
  void StandsIn(bool stands_in) { stands_in_.StoreSeqCst(stands_in ? 1 : 0); }

  // Fails an instance, which a member here has joined, if it still needs something
  // of a process that is gone, or its launch is given up.
  void FailIfGone(const CollectiveId& id, const Group* group, uint64_t launch);

 private:
  // Priorities of messages: what later ones refer to overtakes them all; and what must
  // not come before any earlier one.
  static constexpr int32_t kFirst = INT32_MAX;
  static constexpr int32_t kLast = INT32_MIN;

  struct Piece;
  struct Payload;
  // What is known of one other process.
  struct alignas(kCacheLine) Peer {
    Atomic<uint32_t> met;         // something was sent to it, or came from it
    Record* receiving = nullptr;  // between BeginSlice and EndSlice
    SpinLock lock;                // of:
    std::unordered_set<uint64_t> told;
  };

  void* BeginSlice(int process, const void* header, uint32_t header_bytes, int64_t payload_bytes,
                   int64_t offset, int64_t bytes) override;
  void EndSlice(int process, const void* header, uint32_t header_bytes, int64_t payload_bytes,
                int64_t offset, int64_t bytes, bool last) override;
  void Sent(void* owner) override;
  void BeginPoll() override;
  void EndPoll() override;
  void Down(int process, const Status& status) override;

  static Payload PayloadOf(const Operation& operation, const Step& step);
  void Tell(int process, const std::string& header, int32_t priority = kFirst);
  // What concerns whoever works together with this process: nothing heaps up for
  // those that never connect.
  void TellAllMet(const std::string& header, int32_t priority = kFirst);
  void TellAbout(int process, const Operation& operation);
  void TellGroup(int process, const Group& group);
  bool Arrive(int process, const Piece& piece, const char* name);
  Record* BeginPiece(int process, const Piece& piece, const char* name, int64_t offset);
  char* Destination(const Piece& piece, Record* record, int64_t payload_bytes);
  void HearGroup(const std::string& header);
  void HearPairs(const std::string& header);
  void HearSite(const std::string& header);
  void HearFailure(const std::string& header);
  void HearEnded(const std::string& header);
  void HearNote(Note note);
  void FailIfGivenUp(const CollectiveId& id, const Group* group, uint64_t launch);
  const Group* GroupOf(uint64_t hash);
  void HearStuck(int from, const std::string& header);
  MustEnd MustEndHere(const std::vector<StuckCycle>& cycles) const;
  void Refuse(int process, const char* what);
  // Fails the records that still need something of a process that is gone, of those
  // for which `condition` holds.
  template <typename Condition>
  void FailWhatNeeds(int process, const Status& status, const Condition& condition);

  const Environment environment_;
  int process_ = 0;
  std::unique_ptr<Transport> transport_;
  Atomic<Transport*> joined_;  // transport_, once there is one
  std::vector<std::unique_ptr<Peer>> peers_;

  SpinLock known_lock_;
  std::unordered_map<uint64_t, const Group*> groups_;
  std::unordered_map<uint64_t, const Pairs*> pairs_;
  Atomic<uint32_t> any_down_;
  Atomic<uint32_t> given_up_before_;  // an era
  Status given_up_;                   // guarded by known_lock_
  Atomic<uint32_t> stands_in_;

  int notes_ready_ = -1;  // an eventfd
  SpinLock notes_lock_;
  std::vector<Note> notes_;

  // Who waits in which process, this one too, as last heard.
  SpinLock stuck_lock_;
  std::vector<StuckProcess> stuck_;
  uint64_t stuck_words_ = 0;
  // The counts that were told on last, and the process whose turn it is.
  std::vector<uint64_t> told_on_;
  size_t next_told_on_ = 0;
  int devices_here_ = 0;
  int question_ = -1;        // an eventfd
  Atomic<int32_t> threads_;  // of the user; 0: not known
};

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_CLUSTER_H_
