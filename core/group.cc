// SPDX-License-Identifier: Apache-2.0
// The table of groups of this process, keyed by the ordered member list.
#include "core/group.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "core/hash.h"

namespace dfccl {
namespace {

uint64_t HashMembers(const std::vector<int64_t>& members) {
  Hash128 hash;
  hash.Add(members.size());
  for (int64_t member : members) hash.Add(static_cast<uint64_t>(member));
  return hash.hi;
}

// See Placement::even_hosts.
int EvenHosts(const std::vector<uint16_t>& process, const std::vector<uint16_t>& host) {
  if (host.empty()) return 0;
  const int hosts = 1 + *std::max_element(host.begin(), host.end());
  const size_t each = process.size() / static_cast<size_t>(hosts);
  if (hosts == 1 || each < 2 || each * static_cast<size_t>(hosts) != process.size()) return 0;
  for (size_t r = 0; r < process.size(); ++r) {
    if (host[process[r]] != r / each) return 0;
  }
  return hosts;
}

// Leaked, as groups are used by threads that may outlive static destructors.
struct GroupTable {
  std::mutex mutex;
  std::map<std::vector<int64_t>, std::unique_ptr<Group>> groups;
  std::map<std::pair<std::vector<uint16_t>, std::vector<uint16_t>>, std::unique_ptr<Placement>>
      placements;
  int process = 0;
  std::unordered_map<int64_t, int> process_of;
  std::vector<int> host_of;

  static GroupTable& Get() {
    static GroupTable& table = *new GroupTable;
    return table;
  }

  int ProcessOf(int64_t device) const {
    const auto known = process_of.find(device);
    return known == process_of.end() ? process : known->second;
  }

  const Placement* Intern(const std::vector<uint16_t>& process, const std::vector<uint16_t>& host) {
    std::unique_ptr<Placement>& placement = placements[{process, host}];
    if (placement == nullptr) {
      const int processes = 1 + *std::max_element(process.begin(), process.end());
      placement = std::make_unique<Placement>(
          Placement{process, host, processes, EvenHosts(process, host)});
    }
    return placement.get();
  }

  // Of processes of the job; empty: not known.
  std::vector<uint16_t> HostsOf(const std::vector<int>& processes) const {
    std::vector<int> met;
    std::vector<uint16_t> numbers;
    for (int process : processes) {
      if (static_cast<size_t>(process) >= host_of.size()) return {};
      const auto found = std::find(met.begin(), met.end(), host_of[process]);
      numbers.push_back(static_cast<uint16_t>(found - met.begin()));
      if (found == met.end()) met.push_back(host_of[process]);
    }
    return numbers;
  }

  void Place(Group* group) {
    std::vector<uint16_t> numbers;
    for (int64_t member : group->members) {
      const int owner = ProcessOf(member);
      auto found = std::find(group->processes.begin(), group->processes.end(), owner);
      if (found == group->processes.end()) {
        found = group->processes.insert(found, owner);
      }
      numbers.push_back(static_cast<uint16_t>(found - group->processes.begin()));
    }
    const auto own = std::find(group->processes.begin(), group->processes.end(), process);
    if (group->processes.size() == 1 && own != group->processes.end()) return;
    if (own != group->processes.end()) {
      group->here = static_cast<int>(own - group->processes.begin());
    }
    group->placement = Intern(numbers, HostsOf(group->processes));
  }
};

}  // namespace

const Placement* InternPlacement(std::vector<uint16_t> process, std::vector<uint16_t> host) {
  GroupTable& table = GroupTable::Get();
  std::lock_guard<std::mutex> lock(table.mutex);
  return table.Intern(process, host);
}

const Group* InternGroup(const std::vector<int64_t>& members) {
  GroupTable& table = GroupTable::Get();
  std::lock_guard<std::mutex> lock(table.mutex);
  std::unique_ptr<Group>& group = table.groups[members];
  if (group == nullptr) {
    group = std::make_unique<Group>();
    group->members = members;
    group->hash = HashMembers(members);
    if (!members.empty()) table.Place(group.get());
  }
  return group.get();
}

void SetTopology(int process, std::unordered_map<int64_t, int> process_of,
                 std::vector<int> host_of) {
  GroupTable& table = GroupTable::Get();
  std::lock_guard<std::mutex> lock(table.mutex);
  table.process = process;
  table.process_of = std::move(process_of);
  table.host_of = std::move(host_of);
}

int ProcessOf(int64_t device) {
  GroupTable& table = GroupTable::Get();
  std::lock_guard<std::mutex> lock(table.mutex);
  return table.ProcessOf(device);
}

}  // namespace dfccl
