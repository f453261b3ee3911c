// SPDX-License-Identifier: Apache-2.0
// Devices of several processes that wait for each other: what each process says of
// its own, and the search for a cycle in all of it.
#ifndef DFCCL_CORE_DAEMON_STUCK_H_
#define DFCCL_CORE_DAEMON_STUCK_H_

#include <cstdint>
#include <string>
#include <vector>

namespace dfccl {

// A device whose program waits in a call for others to come.
struct DeviceWait {
  int64_t device = 0;
  std::vector<int64_t> awaits;  // devices
  std::string call;             // for people
};

// What a process that does nothing says of itself, again and again.
struct StuckProcess {
  int process = 0;
  uint64_t activity = 0;  // changes when anything happens there
  uint64_t count = 0;     // how often it has said so
  // It runs its programs one after the other, so the one that waits must end
  // before another can begin.
  bool serial = false;
  std::vector<DeviceWait> waits;
};

// Waits in a circle, each one's device awaited by the one before; empty: there is none.
struct StuckCycle {
  struct Link {
    const StuckProcess* process;
    const DeviceWait* wait;
  };
  std::vector<Link> links;
};

// Of the processes that are serial. That they said so at different times is the
// caller's to mind.
StuckCycle FindStuckCycle(const std::vector<StuckProcess>& processes);

std::string Describe(const StuckCycle& cycle);

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_STUCK_H_
