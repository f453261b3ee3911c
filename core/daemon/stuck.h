// SPDX-License-Identifier: Apache-2.0
// Devices of several processes that wait for each other: what each process says of
// its own, the search for cycles in all of it, and how those in a cycle agree about it.
//
// A process that does nothing says again and again what waits in it, and which cycle
// it sees itself in. Words go to those that it has groups in common with, and on from
// process to process in the direction of the waits, so around every cycle. Once all
// in a cycle say that they see it, all of it was so at one time (each had heard what
// all others wait for before it said so, and waited for the same all the while), and
// the first process ends the calls in which its devices wait there.
//
// What is passed on can overtake an arrival that is still on its way from the one it is
// about. So a process says that it sees a cycle only once those that its own devices
// wait for there have said the same over their links to it, behind all they had sent.
#ifndef DFCCL_CORE_DAEMON_STUCK_H_
#define DFCCL_CORE_DAEMON_STUCK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/collective.h"

namespace dfccl {

// A device whose program waits in a call for others to come.
struct DeviceWait {
  int64_t device = 0;
  std::vector<int64_t> awaits;  // devices
  std::string call;             // for people
  CollectiveId id;
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
  uint64_t sees = 0;  // the hash of the cycle that it is in, as far as it knows; 0: none
  // Known to this process alone: the activity in the last word that came from that one
  // itself, and the number of that word among all such words.
  uint64_t direct_activity = 0;
  uint64_t direct_word = 0;
};

// Waits in a circle, each one's device awaited by the one before; the first is that of
// the device with the smallest number.
struct StuckCycle {
  struct Link {
    const StuckProcess* process;
    const DeviceWait* wait;
  };
  std::vector<Link> links;

  bool Has(int process) const;
  int FirstProcess() const;
  // Whether those that the devices of `process` wait for in it have said themselves what
  // they wait for now, in the first `words` words.
  bool HeardDirectly(int process, uint64_t words) const;
  uint64_t Hash() const;  // not 0
};

// Among the processes that are serial. No device is in two of them, and they are the
// same for everyone who knows the same.
std::vector<StuckCycle> FindStuckCycles(const std::vector<StuckProcess>& processes);

std::string Describe(const StuckCycle& cycle);

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_STUCK_H_
