// SPDX-License-Identifier: Apache-2.0
// The search for circular waits between processes.
#include "core/daemon/stuck.h"

#include <algorithm>
#include <map>
#include <set>

namespace dfccl {

StuckCycle FindStuckCycle(const std::vector<StuckProcess>& processes) {
  std::map<int64_t, std::vector<StuckCycle::Link>> waits;  // by device
  for (const StuckProcess& process : processes) {
    if (!process.serial) continue;
    for (const DeviceWait& wait : process.waits) waits[wait.device].push_back({&process, &wait});
  }
  // A device that the link's one needs and that waits itself; -1: none.
  const auto awaited = [&](const StuckCycle::Link& link) -> int64_t {
    for (const int64_t device : link.wait->awaits) {
      if (waits.count(device) != 0) return device;
    }
    return -1;
  };
  // Drop who waits only for devices that can still come: what is left cannot.
  for (bool changed = true; changed;) {
    changed = false;
    for (auto entry = waits.begin(); entry != waits.end();) {
      std::vector<StuckCycle::Link>& links = entry->second;
      links.erase(std::remove_if(links.begin(), links.end(),
                                 [&](const StuckCycle::Link& link) { return awaited(link) < 0; }),
                  links.end());
      changed = changed || links.empty();
      entry = links.empty() ? waits.erase(entry) : std::next(entry);
    }
  }
  StuckCycle cycle;
  if (waits.empty()) return cycle;
  // From any device left, the way leads into a cycle.
  std::vector<int64_t> way;
  int64_t device = waits.begin()->first;
  while (std::find(way.begin(), way.end(), device) == way.end()) {
    way.push_back(device);
    device = awaited(waits[device].front());
  }
  for (auto each = std::find(way.begin(), way.end(), device); each != way.end(); ++each) {
    cycle.links.push_back(waits[*each].front());
  }
  return cycle;
}

std::string Describe(const StuckCycle& cycle) {
  std::string text = "processes wait for each other: device ";
  for (size_t i = 0; i < cycle.links.size(); ++i) {
    const StuckCycle::Link& link = cycle.links[i];
    const StuckCycle::Link& next = cycle.links[(i + 1) % cycle.links.size()];
    const auto name = [](const StuckCycle::Link& each) {
      return std::to_string(each.wait->device) + " of process " +
             std::to_string(each.process->process);
    };
    if (i == 0) text += name(link);
    text += " waits in " + link.wait->call + " for device " + name(next);
    if (i + 1 < cycle.links.size()) text += ", which";
  }
  return text +
         ". These processes run their programs one after the other (they have one thread, or "
         "several devices), so none can come to what the others wait for. Launch the programs in "
         "the same order in all processes; or give each process one device and launch them from "
         "a thread each; or put the collectives into one program.";
}

}  // namespace dfccl
