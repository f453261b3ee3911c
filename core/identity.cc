// SPDX-License-Identifier: Apache-2.0
// Counts launches, clones and occurrences, and hashes them into identities.
//
//  NameState     one per name, kept for ever: occurrences of (key, group) by member.
//  ProgramState  one per program, kept for ever: how often it was launched, and,
//                while it has call sites, which ordinals its last launches got.
//  Site          one per custom call of an executable, dies with it: occurrences
//                in the launches its devices are in. Launch ordinals are never
//                given twice, so a site that is made again may count from zero.
//
// The usual execution takes one uncontended lane lock, a named one also its
// name's. Lock order: Lane, then ProgramState or NameState.
#include "core/identity.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/hash.h"
#include "core/protocol/atomics.h"

namespace dfccl {
namespace {

// Launches of one program that are told apart by RunId. The devices of one
// process are never further apart: XLA runs launches over several local devices
// strictly one after the other.
constexpr size_t kRememberedLaunches = 64;
// Launches that one device can execute one call site in at the same time.
constexpr size_t kActiveLaunches = 2;
constexpr int kLanes = 8;

// First word of every identity, so that the two schemes never meet.
constexpr uint64_t kUnnamed = 1;
constexpr uint64_t kNamed = 2;

// Of the era that is on: shifted, it is the least number of a launch in it.
Atomic<uint32_t> current_era;
uint64_t FirstOf(uint32_t era) { return uint64_t{era} << 32; }

// One launch of one executable. RunId alone would not do: an executable that is
// compiled again repeats the RunIds of the first.
struct Run {
  uint64_t epoch;
  int64_t run_id;
  bool operator==(const Run& other) const { return epoch == other.epoch && run_id == other.run_id; }
};

class ProgramState {
 public:
  void AddSite() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++sites_;
  }
  void RemoveSite() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--sites_ == 0) recent_ = {};
  }
  // Equal for all devices of one launch; a new one at first sight.
  uint64_t LaunchOrdinal(const Run& run) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto entry = recent_.rbegin(); entry != recent_.rend(); ++entry) {
      if (entry->first == run) return entry->second;
    }
    if (recent_.size() == kRememberedLaunches) recent_.erase(recent_.begin());
    // Acquire: partner is the release in BeginEra.
    next_launch_ = std::max(next_launch_, FirstOf(current_era.LoadAcquire()));
    recent_.emplace_back(run, next_launch_);
    return next_launch_++;
  }

 private:
  std::mutex mutex_;
  int64_t sites_ = 0;
  uint64_t next_launch_ = 0;
  std::vector<std::pair<Run, uint64_t>> recent_;  // oldest first
};

class NameState {
 public:
  uint64_t NextOccurrence(int64_t device, const Group* group, int64_t key, uint64_t program,
                          uint64_t launch) {
    const int index = group->IndexOf(device);
    std::lock_guard<std::mutex> lock(mutex_);
    Member& member = MembersOf(key, group)[index];
    if (member.lost && member.lost_program == program && member.lost_launch == launch) {
      return member.lost_occurrence;
    }
    member.next = std::max(member.next, FirstOf(EraOf(launch)));
    return member.next++;
  }
  void GiveUp(const FailedOccurrence& failed, const std::vector<int>& absent_members) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Member>& members = MembersOf(failed.key, failed.group);
    for (int index : absent_members) {
      Member& member = members[index];
      member.next = std::max(member.next, failed.occurrence + 1);
      member.lost = true;
      member.lost_program = failed.program;
      member.lost_launch = failed.launch;
      member.lost_occurrence = failed.occurrence;
    }
  }

 private:
  using Key = std::pair<int64_t, const Group*>;
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return MixBits(static_cast<uint64_t>(key.first) ^ key.second->hash);
    }
  };
  struct Member {
    uint64_t next = 0;
    bool lost = false;  // an occurrence failed without this member, in this launch:
    uint64_t lost_program = 0;
    uint64_t lost_launch = 0;
    uint64_t lost_occurrence = 0;
  };
  std::vector<Member>& MembersOf(int64_t key, const Group* group) {
    std::vector<Member>& members = members_[{key, group}];
    if (members.empty()) members.resize(group->members.size());
    return members;
  }

  std::mutex mutex_;
  std::unordered_map<Key, std::vector<Member>, KeyHash> members_;  // by member index
};

// The executable that is being instantiated: one at a time (BeginExecutable).
struct Epoch {
  uint64_t number = 0;
  std::map<std::pair<uint64_t, int32_t>, uint64_t> next_clone;  // by (program, site)
};

struct Registry {
  std::mutex mutex;
  std::unordered_map<uint64_t, std::unique_ptr<ProgramState>> programs;
  std::map<std::string, std::unique_ptr<NameState>, std::less<>> names;
  Epoch epoch;

  static Registry& Get() {
    // Leaked: executables may die after static destructors have run.
    static Registry& registry = *new Registry;
    return registry;
  }
};

class Site final : public CallSite {
 public:
  Site(uint64_t number, ProgramState* program, NameState* name, uint64_t epoch,
       const Hash128& prefix)
      : number_(number), program_(program), name_(name), epoch_(epoch), prefix_(prefix) {
    program_->AddSite();
  }
  ~Site() override { program_->RemoveSite(); }

  uint64_t Launch(int64_t run_id) override { return program_->LaunchOrdinal({epoch_, run_id}); }

  IdentifiedCall Next(int64_t device, int64_t run_id, const Group* group, int64_t key) override {
    IdentifiedCall call;
    Lane& lane = lanes_[static_cast<uint64_t>(device) % kLanes];
    {
      std::lock_guard<std::mutex> lock(lane.mutex);
      Execution& execution = lane.Find(device, {epoch_, run_id}, program_);
      call.launch = execution.launch;
      call.occurrence = execution.next_occurrence++;
    }
    Hash128 hash = prefix_;
    if (name_ != nullptr) {
      call.occurrence = name_->NextOccurrence(device, group, key, number_, call.launch);
      hash.Add(static_cast<uint64_t>(key));
    } else {
      hash.Add(call.launch);
    }
    hash.Add(call.occurrence).Add(group->hash);
    call.id = {hash.hi, hash.lo};
    return call;
  }

 private:
  struct Execution {
    int64_t device;
    Run run;
    uint64_t launch;
    uint64_t next_occurrence;
  };
  struct Lane {
    std::mutex mutex;
    std::vector<Execution> executions;  // at most kActiveLaunches for each device

    Execution& Find(int64_t device, const Run& run, ProgramState* program) {
      size_t active = 0;
      Execution* oldest = nullptr;
      for (Execution& execution : executions) {
        if (execution.device != device) continue;
        if (execution.run == run) return execution;
        ++active;
        if (oldest == nullptr || execution.launch < oldest->launch) oldest = &execution;
      }
      const Execution fresh{device, run, program->LaunchOrdinal(run), 0};
      if (active < kActiveLaunches) return executions.emplace_back(fresh);
      return *oldest = fresh;
    }
  };

  const uint64_t number_;  // of the program
  ProgramState* const program_;
  NameState* const name_;  // nullptr: unnamed
  const uint64_t epoch_;
  const Hash128 prefix_;
  std::array<Lane, kLanes> lanes_;  // by device
};

}  // namespace

CallSite* NewCallSite(uint64_t program, int32_t site, std::string_view name) {
  Registry& registry = Registry::Get();
  Hash128 prefix;
  NameState* name_state = nullptr;
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::unique_ptr<ProgramState>& program_state = registry.programs[program];
  if (program_state == nullptr) program_state = std::make_unique<ProgramState>();
  if (name.empty()) {
    const uint64_t clone = registry.epoch.next_clone[{program, site}]++;
    prefix.Add(kUnnamed).Add(program).Add(static_cast<uint64_t>(site)).Add(clone);
  } else {
    auto entry = registry.names.find(name);
    if (entry == registry.names.end()) {
      entry = registry.names.emplace(name, std::make_unique<NameState>()).first;
    }
    name_state = entry->second.get();
    prefix.Add(kNamed).Add(name);
  }
  return new Site(program, program_state.get(), name_state, registry.epoch.number, prefix);
}

void DeleteCallSite(CallSite* site) { delete site; }

void GiveUp(const FailedOccurrence& failed, const std::vector<int>& absent_members) {
  Registry& registry = Registry::Get();
  NameState* name = nullptr;
  {
    std::lock_guard<std::mutex> lock(registry.mutex);
    auto entry = registry.names.find(failed.name);
    if (entry == registry.names.end()) return;  // identified by other means
    name = entry->second.get();
  }
  name->GiveUp(failed, absent_members);
}

void BeginEra(uint32_t era) { current_era.StoreRelease(era); }

void BeginExecutable() {
  Registry& registry = Registry::Get();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.epoch = {registry.epoch.number + 1, {}};
}

}  // namespace dfccl
