// SPDX-License-Identifier: Apache-2.0
// A group: an ordered list of members by global device id. Made locally on
// first use; two groups with equal lists are the same group everywhere. Where
// there are several processes, a group knows which of them its members are in.
#ifndef DFCCL_CORE_GROUP_H_
#define DFCCL_CORE_GROUP_H_

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace dfccl {

// How the members of a group are spread over processes, and these over hosts; both are
// numbered in the order in which the members meet them.
struct Placement {
  std::vector<uint16_t> process;  // of each member
  std::vector<uint16_t> host;     // of each process; empty: not known
  int processes = 1;
  // Several hosts with equally many members, several each, one host after the other;
  // else 0.
  int even_hosts = 0;
};

// The one Placement with these entries in this process. Thread-safe; never freed.
const Placement* InternPlacement(std::vector<uint16_t> process, std::vector<uint16_t> host = {});

struct Group {
  std::vector<int64_t> members;
  uint64_t hash = 0;  // of the ordered list, equal in every process
  // nullptr: all members are in this process. Else also:
  const Placement* placement = nullptr;
  std::vector<int> processes;  // numbers in the job, by number in the placement
  int here = -1;               // this process, by number in the placement; -1: none of its own
  int size() const { return static_cast<int>(members.size()); }
  int IndexOf(int64_t device) const {  // -1: not a member
    for (int i = 0; i < size(); ++i) {
      if (members[i] == device) return i;
    }
    return -1;
  }
  bool IsHere(int member) const {
    return placement == nullptr || placement->process[member] == here;
  }
  int ProcessOf(int member) const { return processes[placement->process[member]]; }
};

// The one Group with this member list in this process. Thread-safe; never
// freed, so call sites and records keep plain pointers to it.
const Group* InternGroup(const std::vector<int64_t>& members);

// Tells, before groups are made that reach into other processes, which process
// of the job this one is, which each global device id belongs to, and which processes
// share a host (equal numbers; by process; empty: not known). Equal in all processes.
void SetTopology(int process, std::unordered_map<int64_t, int> process_of,
                 std::vector<int> host_of = {});
// Of a global device id; this one, if it was not told.
int ProcessOf(int64_t device);

}  // namespace dfccl

#endif  // DFCCL_CORE_GROUP_H_
