// SPDX-License-Identifier: Apache-2.0
// Identities: equal on the members of one instance, different for all others.
#include "core/identity.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "core/group.h"
#include "core/hash.h"

namespace dfccl {
namespace {

struct Deleter {
  void operator()(CallSite* site) const { DeleteCallSite(site); }
};
using CallSitePtr = std::unique_ptr<CallSite, Deleter>;

CallSitePtr NewSite(uint64_t program, int32_t site, std::string_view name = "") {
  return CallSitePtr(NewCallSite(program, site, name));
}

using IdSet = std::set<std::pair<uint64_t, uint64_t>>;

bool Insert(IdSet* ids, const CollectiveId& id) { return ids->insert({id.hi, id.lo}).second; }

const Group* Pair() { return InternGroup({0, 1}); }

TEST(GroupTest, EqualListsAreOneGroup) {
  EXPECT_EQ(InternGroup({3, 1, 2}), InternGroup({3, 1, 2}));
  EXPECT_NE(InternGroup({3, 1, 2}), InternGroup({1, 2, 3}));
  EXPECT_NE(InternGroup({3, 1, 2})->hash, InternGroup({1, 2, 3})->hash);
  EXPECT_EQ(InternGroup({3, 1, 2})->IndexOf(2), 2);
  EXPECT_EQ(InternGroup({3, 1, 2})->IndexOf(4), -1);
}

TEST(HashTest, DependsOnEveryBitAndOnTheOrder) {
  const auto hash = [](uint64_t a, uint64_t b) { return Hash128().Add(a).Add(b); };
  IdSet ids;
  const auto add = [&ids](const Hash128& h) { return ids.insert({h.hi, h.lo}).second; };
  EXPECT_TRUE(add(hash(0, 0)));
  for (int bit = 0; bit < 64; ++bit) {
    EXPECT_TRUE(add(hash(uint64_t{1} << bit, 0))) << bit;
    EXPECT_TRUE(add(hash(0, uint64_t{1} << bit))) << bit;
  }
}

TEST(HashTest, FlipsAboutHalfTheBitsOfBothLanes) {
  const Hash128 base = Hash128().Add(uint64_t{123456789});
  for (int bit = 0; bit < 64; ++bit) {
    const Hash128 flipped = Hash128().Add(uint64_t{123456789} ^ (uint64_t{1} << bit));
    for (uint64_t difference : {base.hi ^ flipped.hi, base.lo ^ flipped.lo}) {
      const int ones = __builtin_popcountll(difference);
      EXPECT_GT(ones, 12) << bit;
      EXPECT_LT(ones, 52) << bit;
    }
  }
}

TEST(HashTest, TextsThatShareAPrefixDiffer) {
  IdSet ids;
  for (std::string_view text : {"", "a", "ab", "abcdefgh", "abcdefghi", "abcdefgi"}) {
    const Hash128 h = Hash128().Add(text);
    EXPECT_TRUE(ids.insert({h.hi, h.lo}).second) << text;
  }
}

TEST(HashTest, IsTheSameInEveryProcess) {
  // Identities leave the process, so the function must never change by accident.
  const Hash128 h = Hash128().Add(uint64_t{1}).Add("name");
  EXPECT_EQ(h.hi, 6794654927895922066u);
  EXPECT_EQ(h.lo, 14495793043892694691u);
}

TEST(IdentityTest, DevicesOfOneLaunchAgree) {
  BeginExecutable();
  const CallSitePtr site = NewSite(1, 0);
  IdSet ids;
  for (int64_t run_id = 100; run_id < 200; ++run_id) {
    for (int occurrence = 0; occurrence < 3; ++occurrence) {
      const IdentifiedCall a = site->Next(0, run_id, Pair(), 0);
      const IdentifiedCall b = site->Next(1, run_id, Pair(), 0);
      EXPECT_EQ(a.id, b.id);
      EXPECT_EQ(a.launch, b.launch);
      EXPECT_EQ(a.occurrence, static_cast<uint64_t>(occurrence));
      EXPECT_TRUE(Insert(&ids, a.id));
    }
  }
}

TEST(IdentityTest, OneDeviceMayRunAheadWithinALaunch) {
  BeginExecutable();
  const CallSitePtr site = NewSite(2, 0);
  std::vector<CollectiveId> ahead, behind;
  for (int i = 0; i < 1000; ++i) ahead.push_back(site->Next(0, 7, Pair(), 0).id);
  for (int i = 0; i < 1000; ++i) behind.push_back(site->Next(1, 7, Pair(), 0).id);
  EXPECT_EQ(ahead, behind);
}

TEST(IdentityTest, LaunchesCountByFirstSight) {
  BeginExecutable();
  const CallSitePtr first = NewSite(3, 0), second = NewSite(3, 1);
  // Device 1 meets the launches at the other site first.
  EXPECT_EQ(first->Next(0, 50, Pair(), 0).launch, 0u);
  EXPECT_EQ(second->Next(1, 50, Pair(), 0).launch, 0u);
  EXPECT_EQ(second->Next(1, -9, Pair(), 0).launch, 1u);
  EXPECT_EQ(first->Next(1, 50, Pair(), 0).launch, 0u);
  EXPECT_EQ(first->Next(0, -9, Pair(), 0).launch, 1u);
}

TEST(IdentityTest, SitesClonesProgramsAndGroupsDiffer) {
  IdSet ids;
  for (uint64_t program : {4, 5}) {
    BeginExecutable();
    std::vector<CallSitePtr> sites;
    for (int32_t site : {0, 1, 1, 1}) sites.push_back(NewSite(program, site));
    for (const CallSitePtr& site : sites) {
      EXPECT_TRUE(Insert(&ids, site->Next(0, 1, Pair(), 0).id));
      EXPECT_TRUE(Insert(&ids, site->Next(2, 1, InternGroup({2, 3}), 0).id));
    }
  }
}

TEST(IdentityTest, AnotherProcessGivesTheSameNames) {
  // The other process instantiates the sites in another order; clones of one
  // site keep theirs. Its RunIds and devices differ, too.
  const auto name_calls = [](const std::vector<int32_t>& order, int64_t device, int64_t run_id) {
    BeginExecutable();
    std::vector<CallSitePtr> sites;
    for (int32_t site : order) sites.push_back(NewSite(6, site));
    sites.push_back(NewSite(6, 9, "named"));
    std::vector<std::pair<int32_t, CollectiveId>> calls;  // by site, then clone
    for (int launch = 0; launch < 2; ++launch) {
      for (size_t i = 0; i < sites.size(); ++i) {
        const CollectiveId id = sites[i]->Next(device, run_id + launch, Pair(), 3).id;
        calls.emplace_back(i < order.size() ? order[i] : 9, id);
      }
    }
    std::stable_sort(calls.begin(), calls.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<CollectiveId> ids;
    for (const auto& call : calls) ids.push_back(call.second);
    return ids;
  };
  int channel[2];
  ASSERT_EQ(pipe(channel), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const std::vector<CollectiveId> ids = name_calls({1, 0, 1}, /*device=*/1, /*run_id=*/-70);
    const ssize_t size = static_cast<ssize_t>(ids.size() * sizeof(CollectiveId));
    _exit(write(channel[1], ids.data(), size) == size ? 0 : 1);
  }
  const std::vector<CollectiveId> ids = name_calls({0, 1, 1}, /*device=*/0, /*run_id=*/40);
  std::vector<CollectiveId> theirs(ids.size());
  const ssize_t size = static_cast<ssize_t>(ids.size() * sizeof(CollectiveId));
  ASSERT_EQ(read(channel[0], theirs.data(), size), size);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(ids, theirs);
  IdSet distinct;
  for (const CollectiveId& id : ids) EXPECT_TRUE(Insert(&distinct, id));
}

TEST(IdentityTest, ExecutablesThatRepeatRunIdsAreDifferentLaunches) {
  BeginExecutable();
  const CallSitePtr first = NewSite(14, 0);
  BeginExecutable();
  const CallSitePtr second = NewSite(14, 0);
  for (uint64_t launch = 0; launch < 6; launch += 2) {
    const int64_t run_id = static_cast<int64_t>(launch);
    const IdentifiedCall a = first->Next(0, run_id, Pair(), 0);
    const IdentifiedCall b = second->Next(0, run_id, Pair(), 0);
    EXPECT_EQ(a.launch, launch);
    EXPECT_EQ(b.launch, launch + 1);
    EXPECT_NE(a.id, b.id);
    EXPECT_EQ(b.id, second->Next(1, run_id, Pair(), 0).id);
    EXPECT_EQ(a.id, first->Next(1, run_id, Pair(), 0).id);
  }
}

TEST(IdentityTest, CountsOutliveTheExecutable) {
  BeginExecutable();
  CallSitePtr site = NewSite(7, 0);
  IdSet ids;
  for (int64_t run_id = 0; run_id < 5; ++run_id) {
    EXPECT_TRUE(Insert(&ids, site->Next(0, run_id, Pair(), 0).id));
  }
  site.reset();
  BeginExecutable();
  site = NewSite(7, 0);
  const IdentifiedCall call = site->Next(0, 0, Pair(), 0);  // RunIds start again
  EXPECT_EQ(call.launch, 5u);
  EXPECT_TRUE(Insert(&ids, call.id));
}

TEST(IdentityTest, NamedCallsMatchAcrossProgramsAndSites) {
  BeginExecutable();
  const CallSitePtr here = NewSite(8, 0, "gradient"), there = NewSite(9, 4, "gradient");
  const IdentifiedCall a = here->Next(0, 1, Pair(), 0);
  EXPECT_EQ(a.id, there->Next(1, 99, Pair(), 0).id);
  EXPECT_EQ(a.occurrence, 0u);
  // The device's next use, wherever it is, is the next occurrence.
  const IdentifiedCall b = there->Next(0, 99, Pair(), 0);
  EXPECT_EQ(b.occurrence, 1u);
  EXPECT_NE(a.id, b.id);
  EXPECT_EQ(b.id, here->Next(1, 2, Pair(), 0).id);
}

TEST(IdentityTest, KeysNamesAndGroupsCountSeparately) {
  BeginExecutable();
  const CallSitePtr x = NewSite(10, 0, "x"), y = NewSite(10, 1, "y");
  IdSet ids;
  for (int64_t key : {0, 1, -1}) {
    for (CallSite* site : {x.get(), y.get()}) {
      for (const Group* group : {Pair(), InternGroup({1, 0})}) {
        const IdentifiedCall call = site->Next(0, 1, group, key);
        EXPECT_EQ(call.occurrence, 0u);
        EXPECT_TRUE(Insert(&ids, call.id));
      }
    }
  }
}

TEST(IdentityTest, NamedCountsOutliveTheCallSite) {
  BeginExecutable();
  CallSitePtr site = NewSite(11, 0, "outlives");
  const CollectiveId first = site->Next(0, 1, Pair(), 5).id;
  site.reset();
  site = NewSite(11, 0, "outlives");
  EXPECT_NE(site->Next(0, 1, Pair(), 5).id, first);
  EXPECT_EQ(site->Next(1, 1, Pair(), 5).id, first);
}

TEST(IdentityTest, ClonesAreNumberedOnWhateverThreadInstantiatesThem) {
  // XLA may instantiate on a thread of its own, and on another one the next time.
  BeginExecutable();
  std::vector<CallSitePtr> sites(3);
  for (CallSitePtr& site : sites) std::thread([&] { site = NewSite(12, 0); }).join();
  IdSet ids;
  for (const CallSitePtr& site : sites) {
    EXPECT_TRUE(Insert(&ids, site->Next(0, 1, Pair(), 0).id));
  }
}

TEST(IdentityTest, DevicesOnManyThreadsAgree) {
  constexpr int kDevices = 12, kLaunches = 20, kOccurrences = 50;  // devices share lanes
  BeginExecutable();
  const CallSitePtr unnamed = NewSite(13, 0), named = NewSite(13, 1, "threads");
  std::vector<int64_t> members(kDevices);
  for (int i = 0; i < kDevices; ++i) members[i] = i;
  const Group* group = InternGroup(members);
  std::vector<std::vector<CollectiveId>> seen(kDevices);
  for (int64_t run_id = 0; run_id < kLaunches; ++run_id) {
    std::vector<std::thread> threads;
    for (int device = 0; device < kDevices; ++device) {
      threads.emplace_back([&, device] {
        for (int i = 0; i < kOccurrences; ++i) {
          seen[device].push_back(unnamed->Next(device, run_id, group, 0).id);
          seen[device].push_back(named->Next(device, run_id, group, i % 3).id);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  IdSet ids;
  for (const CollectiveId& id : seen[0]) EXPECT_TRUE(Insert(&ids, id));
  for (const auto& others : seen) EXPECT_EQ(others, seen[0]);
}

TEST(IdentityTest, InANewEraProcessesCountFromTheSameNumber) {
  // In one process the program was launched twice before, in the other never.
  const CallSitePtr site = NewSite(9001, 0), other = NewSite(9002, 0);
  const CallSitePtr named = NewSite(9003, 0, "era"), other_name = NewSite(9003, 0, "other era");
  site->Next(0, 1, Pair(), 0);
  EXPECT_EQ(site->Next(0, 2, Pair(), 0).launch, 1u);
  named->Next(0, 1, Pair(), 0);
  BeginEra(3);
  // The other member of a launch that has begun is still in it.
  EXPECT_EQ(site->Next(1, 2, Pair(), 0).launch, 1u);
  EXPECT_EQ(named->Next(1, 1, Pair(), 0).occurrence, 0u);
  const uint64_t first = uint64_t{3} << 32;
  EXPECT_EQ(site->Next(0, 3, Pair(), 0).launch, first);
  EXPECT_EQ(other->Next(0, 3, Pair(), 0).launch, first);
  EXPECT_EQ(site->Next(0, 4, Pair(), 0).launch, first + 1);
  EXPECT_EQ(named->Next(0, 5, Pair(), 0).occurrence, first);
  EXPECT_EQ(other_name->Next(0, 5, Pair(), 0).occurrence, first);
  EXPECT_EQ(EraOf(first + 1), 3u);
  BeginEra(0);
}

}  // namespace
}  // namespace dfccl
