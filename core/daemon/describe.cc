// SPDX-License-Identifier: Apache-2.0
// The wording of messages and report entries, and the search for cycles.
#include "core/daemon/describe.h"

#include <algorithm>
#include <cstdio>
#include <set>

namespace dfccl {
namespace {

constexpr size_t kMostListed = 16;

std::string List(const std::vector<int64_t>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size() && i < kMostListed; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(values[i]);
  }
  if (values.size() > kMostListed) {
    text += ", ... " + std::to_string(values.size()) + " in all";
  }
  return text + "]";
}

std::string Seconds(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", static_cast<double>(ns) * 1e-9);
  return text;
}

// "all_reduce(sum)", "broadcast"
std::string OperationName(const Signature& signature) {
  const std::string kind = KindName(signature.kind);
  return Folds(signature.kind) ? kind + "(" + ReduceOpName(signature.op) + ")" : kind;
}

// What else the members of an instance must agree on: "root 3", "pairs [(0, 1)]".
std::string Particulars(const Signature& signature) {
  if (HasRoot(signature.kind)) return "root " + std::to_string(signature.root);
  if (signature.pairs == nullptr) return "";
  std::string text = "pairs [";
  for (size_t i = 0; i < signature.pairs->list.size() && i < kMostListed; ++i) {
    const auto& [source, target] = signature.pairs->list[i];
    if (i > 0) text += ", ";
    text += "(" + std::to_string(source) + ", " + std::to_string(target) + ")";
  }
  if (signature.pairs->list.size() > kMostListed) text += ", ...";
  return text + "]";
}

// Those that `member` needs and that have not come.
std::vector<int64_t> Absent(const RecordView& record, int member) {
  std::vector<int64_t> absent;
  for (int i = 0; i < record.group->size(); ++i) {
    if (record.Lacks(member, i)) absent.push_back(record.group->members[i]);
  }
  return absent;
}

// Whom `member` waits for: "devices [2] of process 1 have not come".
std::string Awaited(const RecordView& record, int member) {
  const bool across = record.group->placement != nullptr;
  std::vector<int64_t> devices = Absent(record, member);
  const bool come = across && devices.empty();
  std::set<int> processes;
  for (int i = 0; across && i < record.group->size(); ++i) {
    const MemberView& peer = record.members[i];
    if (come ? peer.here || peer.ended : !record.Lacks(member, i)) continue;
    if (come) devices.push_back(record.group->members[i]);
    processes.insert(record.group->ProcessOf(i));
  }
  if (devices.empty()) return "not all data could be sent";
  std::string text = "devices " + List(devices);
  for (int process : processes) {
    text += (process == *processes.begin() ? " of process " : ", ") + std::to_string(process);
  }
  return text + (come ? " have come, but not all of their data" : " have not come");
}

// The member that has waited longest for one that has not come, or else has come
// first.
int First(const RecordView& record) {
  int first = record.creator;
  bool lacks = !Absent(record, first).empty();
  for (int i = 0; i < record.group->size(); ++i) {
    if (!record.members[i].arrived) continue;
    const bool earlier = record.members[i].info.submit_ns < record.members[first].info.submit_ns;
    const bool waits = !Absent(record, i).empty();
    if (waits == lacks ? earlier : waits) {
      first = i;
      lacks = waits;
    }
  }
  return first;
}

std::string Values(const Signature& signature) {
  return std::to_string(signature.count) + " x " + DTypeName(signature.dtype);
}

double Span(int64_t from_ns, int64_t to_ns) {
  return static_cast<double>(std::max<int64_t>(0, to_ns - from_ns)) * 1e-9;
}

}  // namespace

void SiteTable::Register(uint64_t program, int32_t site, SiteInfo info) {
  std::lock_guard<std::mutex> lock(mutex_);
  sites_[{program, site}] = std::move(info);
}

void SiteTable::RegisterIfUnknown(uint64_t program, int32_t site, SiteInfo info) {
  std::lock_guard<std::mutex> lock(mutex_);
  sites_.emplace(std::make_pair(program, site), std::move(info));
}

void SiteTable::RegisterLoaded(uint64_t program, uint64_t lowered) {
  std::lock_guard<std::mutex> lock(mutex_);
  lowered_[program] = lowered;
}

uint64_t SiteTable::Lowered(uint64_t program) const {
  const auto found = lowered_.find(program);
  return found == lowered_.end() ? program : found->second;
}

SiteInfo SiteTable::Find(uint64_t program, int32_t site) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sites_.find({Lowered(program), site});
  return found == sites_.end() ? SiteInfo() : found->second;
}

SiteTable::Dependence SiteTable::NeedsResultOf(const OperationInfo& wanted, uint64_t program,
                                               int32_t blocked_in) const {
  std::lock_guard<std::mutex> lock(mutex_);
  Dependence dependence = Dependence::kUnknown;
  program = Lowered(program);
  // A named call may stand at several sites (one in each branch), and only one
  // of them can need a result of the site that blocks.
  for (auto entry = sites_.lower_bound({program, INT32_MIN});
       entry != sites_.end() && entry->first.first == program; ++entry) {
    const bool same_site = Lowered(wanted.program) == program && entry->first.second == wanted.site;
    const bool same_name = wanted.name != nullptr && entry->second.name == *wanted.name;
    if (!same_site && !same_name) continue;
    const std::vector<int32_t>& after = entry->second.after;
    if (std::find(after.begin(), after.end(), blocked_in) != after.end()) {
      return Dependence::kData;
    }
    dependence = Dependence::kNone;
  }
  return dependence;
}

std::vector<WaitCycle> FindCycles(const std::vector<RecordView>& records) {
  // One way in which a device waits: its operation in a record that lacks
  // members.
  std::map<int64_t, std::vector<WaitCycle::Link>> waits;
  for (const RecordView& record : records) {
    if (record.complete() || record.failed) continue;
    for (int i = 0; i < record.group->size(); ++i) {
      if (record.members[i].arrived && record.members[i].waited_for) {
        waits[record.group->members[i]].push_back({&record, i});
      }
    }
  }
  // A member that the link's member needs, that has not come to its record, and
  // that waits itself; -1: none.
  const auto awaited = [&](const WaitCycle::Link& link) -> int64_t {
    for (int i = 0; i < link.record->group->size(); ++i) {
      const int64_t device = link.record->group->members[i];
      if (link.record->Lacks(link.member, i) && waits.count(device) != 0) return device;
    }
    return -1;
  };
  // Drop who waits only for devices that can still come: what is left cannot.
  for (bool changed = true; changed;) {
    changed = false;
    for (auto entry = waits.begin(); entry != waits.end();) {
      std::vector<WaitCycle::Link>& links = entry->second;
      links.erase(std::remove_if(links.begin(), links.end(),
                                 [&](const WaitCycle::Link& link) { return awaited(link) < 0; }),
                  links.end());
      if (links.empty()) {
        entry = waits.erase(entry);
        changed = true;
      } else {
        ++entry;
      }
    }
  }
  // From any device left, the way leads into a cycle.
  std::vector<WaitCycle> cycles;
  std::set<int64_t> seen;
  for (const auto& entry : waits) {
    std::vector<int64_t> way;
    int64_t device = entry.first;
    while (seen.insert(device).second) {
      way.push_back(device);
      device = awaited(waits[device].front());
    }
    const auto start = std::find(way.begin(), way.end(), device);
    if (start == way.end()) continue;  // it leads into a cycle found before
    WaitCycle cycle;
    for (auto each = start; each != way.end(); ++each) {
      cycle.chain.push_back(waits[*each].front());
    }
    cycles.push_back(std::move(cycle));
  }
  return cycles;
}

// "all_reduce(sum) 'loss' key 3 at train.py:12 (step) in jit_step"
std::string Describer::Call(const OperationInfo& info, const Signature& signature) const {
  const SiteInfo site = sites_->Find(info.program, info.site);
  std::string text = site.operation.empty() ? OperationName(signature) : site.operation;
  if (info.name != nullptr) text += " '" + *info.name + "'";
  if (info.has_key) text += " key " + std::to_string(info.key);
  if (!site.source.empty()) text += " at " + site.source;
  if (!site.program.empty()) text += " in " + site.program;
  return text;
}

std::string Describer::Missing(const RecordView& record, int64_t now_ns) const {
  const int first_member = First(record);
  const OperationInfo& first = record.members[first_member].info;
  std::string text = Call(first, record.signature) + ", " + Values(record.signature) + ", group " +
                     List(record.group->members) + ": after " + Seconds(now_ns - first.submit_ns) +
                     " " + Awaited(record, first_member) + ". Arrived:";
  size_t listed = 0;
  for (int i = 0; i < record.group->size(); ++i) {
    const MemberView& member = record.members[i];
    if (!member.arrived) continue;
    if (listed++ == kMostListed) {
      text += " ...";
      break;
    }
    const SiteInfo site = sites_->Find(member.info.program, member.info.site);
    text += (listed > 1 ? ", device " : " device ") + std::to_string(record.group->members[i]);
    if (!site.source.empty()) text += " (" + site.source + " in " + site.program + ")";
  }
  text += ".";
  if (first.name == nullptr) {
    text +=
        " Calls in different branches are different calls: if two are to meet, give both one "
        "name=.";
  } else {
    text += " A named call whose value the program does not use is removed from it.";
  }
  return text;
}

std::string Describer::Timeout(const RecordView& record, int64_t now_ns) const {
  return Missing(record, now_ns) +
         " If they are only late, allow more time (timeout= of the call or JAX_DFCCL_TIMEOUT, in "
         "seconds). If they never make this call, see jax_dfccl.report() for what they do instead; "
         "one that raised or left its program early cannot come.";
}

std::string Describer::Stall(const RecordView& record, int64_t now_ns) const {
  return Missing(record, now_ns) +
         " Still waiting; jax_dfccl.report() shows what every device does.";
}

std::string Describer::Mismatch(const RecordView& record, const OperationInfo& other,
                                const Signature& other_signature) const {
  const OperationInfo& first = record.members[record.creator].info;
  const auto side = [this](const OperationInfo& info, const Signature& signature) {
    const std::string particulars = Particulars(signature);
    return "device " + std::to_string(info.device) + " calls " + Call(info, signature) + " with " +
           OperationName(signature) + " of " + Values(signature) +
           (particulars.empty() ? "" : ", " + particulars);
  };
  return "members disagree about a collective of group " + List(record.group->members) + ": " +
         side(first, record.signature) + ", but " + side(other, other_signature) +
         ". All members must use the same operation, operator, dtype, shape, root and pairs; "
         "different collectives need "
         "different names.";
}

std::string Describer::Twice(const OperationInfo& info, const Signature& signature) const {
  return Call(info, signature) + ": device " + std::to_string(info.device) +
         " has started this instance before. Collectives that may run at the same time in "
         "different programs need different names or keys.";
}

std::string Describer::Wrong(const OperationInfo& info, const Signature& signature,
                             const std::string& fault) const {
  return Call(info, signature) + ": " + fault;
}

std::string Describer::Cycle(const WaitCycle& cycle) const {
  std::string text = "devices wait for each other: device ";
  bool all_data = true;
  bool all_known = true;
  std::string groups;  // where one name is called with two groups
  for (size_t i = 0; i < cycle.chain.size(); ++i) {
    const WaitCycle::Link& link = cycle.chain[i];
    const WaitCycle::Link& next = cycle.chain[(i + 1) % cycle.chain.size()];
    const OperationInfo& info = link.record->members[link.member].info;
    const OperationInfo& blocked = next.record->members[next.member].info;
    if (i == 0) text += std::to_string(info.device);
    text += " waits in " + Call(info, link.record->signature) + " for device " +
            std::to_string(blocked.device);
    if (i + 1 < cycle.chain.size()) text += ", which";
    if (info.name != nullptr && info.name == blocked.name && info.key == blocked.key &&
        link.record->group != next.record->group && link.record->signature.shape == 0) {
      groups = " The calls named '" + *info.name +
               "' disagree about the group: " + List(link.record->group->members) + " on device " +
               std::to_string(info.device) + ", " + List(next.record->group->members) +
               " on device " + std::to_string(blocked.device) + ".";
    }
    switch (sites_->NeedsResultOf(info, blocked.program, blocked.site)) {
      case SiteTable::Dependence::kUnknown:
        all_known = false;
        all_data = false;
        break;
      case SiteTable::Dependence::kNone:
        all_data = false;
        break;
      case SiteTable::Dependence::kData:
        break;
    }
  }
  text += ".";
  if (!groups.empty()) {
    text += groups;
  } else if (all_data) {
    text +=
        " This is a cycle of data dependences: each missing call needs the result of the call "
        "its device is blocked in, so no order of execution can serve it.";
  } else if (all_known) {
    text +=
        " The data has no such cycle: it comes from the order in which the program was "
        "scheduled. Give calls that stand in different branches names and don't nest their "
        "dependences in crossing ways, or put them into separate programs.";
  }
  return text;
}

DeviceWait Describer::Wait(const RecordView& record, int member) const {
  return {
      record.group->members[member], Absent(record, member),
      Call(record.members[member].info, record.signature) + ", " + Values(record.signature) + ",",
      record.id};
}

std::string Describer::Gone(const RecordView& record, int process, const Status& how) const {
  std::vector<int64_t> lost;
  const OperationInfo* info = nullptr;
  for (int i = 0; i < record.group->size(); ++i) {
    if (record.group->ProcessOf(i) == process) lost.push_back(record.group->members[i]);
    if (record.members[i].here && info == nullptr) info = &record.members[i].info;
  }
  if (info == nullptr) info = &record.members[record.creator].info;
  return Call(*info, record.signature) + ", " + Values(record.signature) + ", group " +
         List(record.group->members) + ": process " + std::to_string(process) + " with devices " +
         List(lost) + " is gone (" + how.message() + ").";
}

void FailMismatch(RecordTable* table, const Describer& describer, const CollectiveId& id,
                  const Group* group, const OperationInfo& info, const Signature& signature) {
  const std::vector<RecordView> views =
      table->View([&](Record& record) { return record.id == id && record.group == group; });
  for (const RecordView& view : views) {
    table->Fail(view.id, view.group,
                Status(StatusCode::kMismatch, describer.Mismatch(view, info, signature)));
  }
}

FlightEntry Describer::Common(const OperationInfo& info, const Signature& signature, int64_t bytes,
                              const Group& group) const {
  const SiteInfo site = sites_->Find(info.program, info.site);
  FlightEntry entry;
  entry.device = info.device;
  entry.sequence = info.sequence;
  entry.operation = site.operation.empty() ? OperationName(signature) : site.operation;
  if (info.name != nullptr) entry.name = *info.name;
  if (info.has_key) entry.key = std::to_string(info.key);
  entry.program = site.program;
  entry.launch = static_cast<uint32_t>(info.launch);  // in its era
  entry.source = site.source;
  entry.dtype = DTypeName(signature.dtype);
  entry.count = signature.count;
  entry.bytes = bytes;
  entry.plan = PlanName(choose_(signature, group));
  entry.group = group.members;
  return entry;
}

FlightEntry Describer::Entry(const RecordView& record, int member, int64_t now_ns) const {
  const MemberView& view = record.members[member];
  FlightEntry entry = Common(view.info, record.signature, record.bytes, *record.group);
  entry.absent = Absent(record, member);
  entry.state = record.failed ? "failed" : entry.absent.empty() ? "moving" : "waiting for members";
  entry.blocks_device = view.waited_for;
  entry.age_s = Span(view.info.submit_ns, now_ns);
  entry.wait_s = Span(view.info.submit_ns, record.complete() ? record.complete_ns : now_ns);
  entry.preemptions = static_cast<int64_t>(view.preemptions);
  return entry;
}

FlightEntry Describer::Entry(const Flight& flight, int64_t now_ns) const {
  FlightEntry entry = Common(flight.info, flight.signature, flight.bytes, *flight.group);
  entry.state = flight.code == StatusCode::kOk ? "done" : "failed";
  if (flight.code != StatusCode::kOk) {
    entry.error = std::string(StatusCodeName(flight.code)) + ": " + flight.error;
  }
  entry.age_s = Span(flight.info.submit_ns, now_ns);
  entry.wait_s =
      Span(flight.info.submit_ns, flight.complete_ns != 0 ? flight.complete_ns : flight.finish_ns);
  entry.total_s = Span(flight.info.submit_ns, flight.finish_ns);
  entry.preemptions = static_cast<int64_t>(flight.preemptions);
  return entry;
}

}  // namespace dfccl
