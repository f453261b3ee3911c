// SPDX-License-Identifier: Apache-2.0
// The search for circular waits between processes.
#include "core/daemon/stuck.h"

#include <algorithm>
#include <map>

#include "core/hash.h"

namespace dfccl {

bool StuckCycle::Has(int process) const {
  return std::any_of(links.begin(), links.end(),
                     [process](const Link& link) { return link.process->process == process; });
}

int StuckCycle::FirstProcess() const {
  int first = links.front().process->process;
  for (const Link& link : links) first = std::min(first, link.process->process);
  return first;
}

bool StuckCycle::HeardDirectly(int process, uint64_t words) const {
  for (size_t i = 0; i < links.size(); ++i) {
    const StuckProcess& next = *links[(i + 1) % links.size()].process;
    if (links[i].process->process != process || next.process == process) continue;
    if (next.direct_activity != next.activity || next.direct_word > words) return false;
  }
  return true;
}

uint64_t StuckCycle::Hash() const {
  Hash128 hash;
  for (const Link& link : links) {
    hash.Add(static_cast<uint64_t>(link.process->process))
        .Add(link.process->activity)
        .Add(static_cast<uint64_t>(link.wait->device))
        .Add(link.wait->id.hi)
        .Add(link.wait->id.lo);
  }
  return hash.hi | 1;
}

std::vector<StuckCycle> FindStuckCycles(const std::vector<StuckProcess>& processes) {
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
  // Drops who waits only for devices that can still come, or are in a cycle that was
  // found: what is left is in a cycle or waits for one.
  const auto prune = [&] {
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
  };
  std::vector<StuckCycle> cycles;
  for (prune(); !waits.empty(); prune()) {
    // From any device left, the way leads into a cycle.
    std::vector<int64_t> way;
    int64_t device = waits.begin()->first;
    while (std::find(way.begin(), way.end(), device) == way.end()) {
      way.push_back(device);
      device = awaited(waits[device].front());
    }
    way.erase(way.begin(), std::find(way.begin(), way.end(), device));
    std::rotate(way.begin(), std::min_element(way.begin(), way.end()), way.end());
    StuckCycle& cycle = cycles.emplace_back();
    for (const int64_t each : way) cycle.links.push_back(waits[each].front());
    for (const int64_t each : way) waits.erase(each);
  }
  return cycles;
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
