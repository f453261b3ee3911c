// SPDX-License-Identifier: Apache-2.0
// How a call gets its CollectiveId: equal on all members of one instance and
// different from every other, within a process and between processes.
//
// An unnamed call is (program, launch, site, clone, occurrence, group):
//  program     hash of the location-free StableHLO, an attribute of the call;
//  launch      n-th launch of that program, counted here by first sight of a
//              RunId (which is exact within a process, but between processes
//              depends on source lines, so it never leaves the process);
//  site        number of the call in the program, an attribute;
//  clone       which copy XLA made of the call (loop unrolling...), numbered in
//              the order of instantiation within one executable;
//  occurrence  n-th execution of that copy by this device in this launch.
// A named call is (name, key, occurrence, group): program-independent.
#ifndef DFCCL_CORE_IDENTITY_H_
#define DFCCL_CORE_IDENTITY_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/collective.h"
#include "core/group.h"

namespace dfccl {

struct IdentifiedCall {
  CollectiveId id;
  uint64_t launch = 0;
  uint64_t occurrence = 0;
};

// One custom call of one executable. Thread-safe.
class CallSite {
 public:
  virtual ~CallSite() = default;
  // The identity of the execution that `device` begins now.
  virtual IdentifiedCall Next(int64_t device, int64_t run_id, const Group* group, int64_t key) = 0;
  // The launch that `run_id` is; begins nothing.
  virtual uint64_t Launch(int64_t run_id) = 0;
};

// Called by the handler's instantiate stage. An empty name: unnamed. `epoch`
// tells executables apart: calls of one executable are instantiated in one
// epoch (BeginExecutable), in a deterministic order, and no two executables at
// the same time. The thread does not matter: XLA may use one of its own.
CallSite* NewCallSite(uint64_t program, int32_t site, std::string_view name);
void DeleteCallSite(CallSite* site);

// A named instance has failed while members had not come. Their next call of
// that name is not this one any more, so it takes the next occurrence, as the
// others' will; only a late call from the launch that failed still gets the
// identity of the failed instance, and so its error. All members of a call run
// the same program, so `program` and `launch` are theirs, too.
struct FailedOccurrence {
  std::string_view name;
  int64_t key;
  const Group* group;
  uint64_t occurrence;
  uint64_t program;
  uint64_t launch;
};
void GiveUp(const FailedOccurrence& failed, const std::vector<int>& absent_members);

// The upper half of a launch's number. All processes of a job that go on together
// begin an era at the same point of their programs, and count launches and
// occurrences anew in it, as they may have counted differently before.
void BeginEra(uint32_t era);
inline uint32_t EraOf(uint64_t launch) { return static_cast<uint32_t>(launch >> 32); }

void BeginExecutable();  // the next executable is about to be compiled or loaded

}  // namespace dfccl

#endif  // DFCCL_CORE_IDENTITY_H_
