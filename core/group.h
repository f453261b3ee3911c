// SPDX-License-Identifier: Apache-2.0
// A group: an ordered list of members by global device id. Made locally on
// first use; two groups with equal lists are the same group everywhere.
#ifndef DFCCL_CORE_GROUP_H_
#define DFCCL_CORE_GROUP_H_

#include <cstdint>
#include <vector>

namespace dfccl {

struct Group {
  std::vector<int64_t> members;
  uint64_t hash = 0;  // of the ordered list, equal in every process
  int size() const { return static_cast<int>(members.size()); }
  int IndexOf(int64_t device) const {  // -1: not a member
    for (int i = 0; i < size(); ++i) {
      if (members[i] == device) return i;
    }
    return -1;
  }
};

// The one Group with this member list in this process. Thread-safe; never
// freed, so call sites and records keep plain pointers to it.
const Group* InternGroup(const std::vector<int64_t>& members);

}  // namespace dfccl

#endif  // DFCCL_CORE_GROUP_H_
