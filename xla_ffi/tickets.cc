// SPDX-License-Identifier: Apache-2.0
#include "xla_ffi/tickets.h"

#include <algorithm>
#include <string>

namespace dfccl {

// Layout of a ticket: generation (32 bits), slot (28), lane (4). Generations of
// live slots are odd, so no ticket is 0.

template <typename Predicate>
std::vector<StartedOperation> TicketTable::Remove(Lane& lane, Predicate matches) {
  std::vector<StartedOperation> removed;
  for (uint32_t i = 0; i < lane.slots.size(); ++i) {
    Slot& slot = lane.slots[i];
    if (slot.generation % 2 == 0 || !matches(slot.started)) continue;
    removed.push_back(slot.started);
    slot.dropped = slot.generation++;
    lane.free.push_back(i);
  }
  return removed;
}

uint64_t TicketTable::Put(const StartedOperation& started) {
  const uint64_t lane_index = static_cast<uint64_t>(started.device) % lanes_.size();
  Lane& lane = lanes_[lane_index];
  std::vector<StartedOperation> lost;
  uint64_t ticket;
  {
    std::lock_guard<std::mutex> lock(lane.mutex);
    if (lane.free.empty() && lane.slots.size() >= lane.sweep_at) {
      lane.last_drop = Status(StatusCode::kAborted, "its launch has ended long ago");
      lost = Remove(lane, [&](const StartedOperation& other) {
        return !other.kept && other.device == started.device && other.program == started.program &&
               other.launch + kLostAfterLaunches < started.launch;
      });
      lane.sweep_at = std::max(lane.sweep_at, 2 * (lane.slots.size() - lost.size()));
    }
    if (lane.free.empty()) {
      lane.free.push_back(static_cast<uint32_t>(lane.slots.size()));
      lane.slots.emplace_back();
    }
    const uint32_t index = lane.free.back();
    lane.free.pop_back();
    Slot& slot = lane.slots[index];
    slot.started = started;
    ++slot.generation;
    ticket = uint64_t{slot.generation} << 32 | uint64_t{index} << kLaneBits | lane_index;
  }
  for (const StartedOperation& operation : lost) reaper_(operation);
  return ticket;
}

TicketTable::Slot* TicketTable::SlotOf(Lane& lane, uint64_t ticket) {
  const uint32_t index = static_cast<uint32_t>(ticket) >> kLaneBits;
  const uint32_t generation = static_cast<uint32_t>(ticket >> 32);
  if (index >= lane.slots.size()) return nullptr;
  Slot& slot = lane.slots[index];
  return generation % 2 == 0 || slot.generation != generation ? nullptr : &slot;
}

bool TicketTable::Take(uint64_t ticket, StartedOperation* started) {
  Lane& lane = lanes_[ticket % lanes_.size()];
  std::lock_guard<std::mutex> lock(lane.mutex);
  Slot* slot = SlotOf(lane, ticket);
  if (slot == nullptr) return false;
  *started = slot->started;
  ++slot->generation;
  lane.free.push_back(static_cast<uint32_t>(ticket) >> kLaneBits);
  return true;
}

bool TicketTable::Look(uint64_t ticket, const std::function<void(const StartedOperation&)>& look) {
  Lane& lane = lanes_[ticket % lanes_.size()];
  std::lock_guard<std::mutex> lock(lane.mutex);
  const Slot* slot = SlotOf(lane, ticket);
  if (slot == nullptr) return false;
  look(slot->started);
  return true;
}

void TicketTable::Drop(int64_t device, uint64_t program, uint64_t launch, const Status& why) {
  Lane& lane = lanes_[static_cast<uint64_t>(device) % lanes_.size()];
  std::vector<StartedOperation> dropped;
  {
    std::lock_guard<std::mutex> lock(lane.mutex);
    dropped = Remove(lane, [&](const StartedOperation& other) {
      return other.device == device && other.program == program && other.launch == launch;
    });
    if (!dropped.empty()) lane.last_drop = why;
  }
  for (const StartedOperation& operation : dropped) reaper_(operation);
}

Status TicketTable::WhyGone(uint64_t ticket) {
  Lane& lane = lanes_[ticket % lanes_.size()];
  const uint32_t index = static_cast<uint32_t>(ticket) >> kLaneBits;
  const uint32_t generation = static_cast<uint32_t>(ticket >> 32);
  std::lock_guard<std::mutex> lock(lane.mutex);
  if (index < lane.slots.size() && generation % 2 == 1 && lane.slots[index].dropped == generation) {
    return lane.last_drop;
  }
  return Status(StatusCode::kInvalidArgument,
                "done got ticket " + std::to_string(ticket) +
                    ", which no start gave or which another done has used");
}

int64_t TicketTable::size() {
  int64_t total = 0;
  for (Lane& lane : lanes_) {
    std::lock_guard<std::mutex> lock(lane.mutex);
    total += static_cast<int64_t>(lane.slots.size() - lane.free.size());
  }
  return total;
}

}  // namespace dfccl
