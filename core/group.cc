// SPDX-License-Identifier: Apache-2.0
// The table of groups of this process, keyed by the ordered member list.
#include "core/group.h"

#include <map>
#include <memory>
#include <mutex>

#include "core/hash.h"

namespace dfccl {
namespace {

uint64_t HashMembers(const std::vector<int64_t>& members) {
  Hash128 hash;
  hash.Add(members.size());
  for (int64_t member : members) hash.Add(static_cast<uint64_t>(member));
  return hash.hi;
}

struct GroupTable {
  std::mutex mutex;
  std::map<std::vector<int64_t>, std::unique_ptr<Group>> groups;
};

}  // namespace

const Group* InternGroup(const std::vector<int64_t>& members) {
  // Leaked: groups are used by threads that may outlive static destructors.
  static GroupTable& table = *new GroupTable;
  std::lock_guard<std::mutex> lock(table.mutex);
  std::unique_ptr<Group>& group = table.groups[members];
  if (group == nullptr) {
    group = std::make_unique<Group>();
    group->members = members;
    group->hash = HashMembers(members);
  }
  return group.get();
}

}  // namespace dfccl
