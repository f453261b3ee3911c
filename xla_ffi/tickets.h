// SPDX-License-Identifier: Apache-2.0
// Operations between their start and their done. A start leaves its operation
// here and gives the program a 64-bit ticket; the done takes it out, once.
//
// A ticket says lane, slot and generation, so a ticket that was used before or
// never given is recognised. Thread-safe; the usual call takes one lock that
// only the same device (modulo the lanes) uses.
#ifndef DFCCL_XLA_FFI_TICKETS_H_
#define DFCCL_XLA_FFI_TICKETS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "core/runtime.h"
#include "core/status.h"

namespace dfccl {

// What a done is compared with.
struct StartedCall {
  int64_t device = 0;
  uint64_t program = 0;
  uint64_t launch = 0;
  const void* source = nullptr;  // must be the same at done, unless staged
  bool staged = false;
  bool kept = false;  // by a handle, whatever becomes of its launch
  int64_t source_bytes = 0;
  int64_t result_bytes = 0;
};

struct StartedOperation : StartedCall {
  Operation* operation = nullptr;
};

class TicketTable {
 public:
  // Ends an operation that will have no done.
  using Reaper = std::function<void(const StartedOperation&)>;

  explicit TicketTable(Reaper reaper) : reaper_(std::move(reaper)) {}

  uint64_t Put(const StartedOperation& started);

  // False: the ticket is not, or no longer, in the table.
  bool Take(uint64_t ticket, StartedOperation* started);

  // Looks at it without taking it out; nobody takes it out while `look` runs.
  bool Look(uint64_t ticket, const std::function<void(const StartedOperation&)>& look);

  // Reaps what `device` has started in (program, launch). A later Take of such
  // a ticket fails; WhyGone then tells why.
  void Drop(int64_t device, uint64_t program, uint64_t launch, const Status& why);
  Status WhyGone(uint64_t ticket);

  // Number of operations that wait for their done.
  int64_t size();

 private:
  struct Slot {
    StartedOperation started;
    uint32_t generation = 0;  // odd: in use
    uint32_t dropped = 0;     // last generation that was dropped
  };
  struct Lane {
    std::mutex mutex;
    std::vector<Slot> slots;
    std::vector<uint32_t> free;
    size_t sweep_at = 256;
    Status last_drop;
  };
  static constexpr int kLaneBits = 4;
  static constexpr int kSlotBits = 28;
  // A program that fails outside our handlers never runs its dones. Its
  // operations are recognised by their age: no device has this many launches of
  // one program in flight (XLA allows 32).
  static constexpr uint64_t kLostAfterLaunches = 64;

  // The slot of a ticket that is in the table, else nullptr.
  static Slot* SlotOf(Lane& lane, uint64_t ticket);
  template <typename Predicate>
  std::vector<StartedOperation> Remove(Lane& lane, Predicate matches);

  const Reaper reaper_;
  std::array<Lane, 1 << kLaneBits> lanes_;
};

}  // namespace dfccl

#endif  // DFCCL_XLA_FFI_TICKETS_H_
