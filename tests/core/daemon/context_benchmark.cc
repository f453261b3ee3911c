// SPDX-License-Identifier: Apache-2.0
// What it costs a CPU daemon to turn from one unfinished task to another: save
// the context of the one, load that of the other.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "core/daemon/context_slot.h"
#include "core/daemon/operation.h"
#include "core/daemon/record.h"

int main() {
  constexpr int kTasks = 64;
  constexpr int kSwitches = 1'000'000;
  std::vector<dfccl::Operation> operations(kTasks);
  std::vector<dfccl::Slot> slots(kTasks);
  for (int i = 0; i < kTasks; ++i) {
    operations[i].slot = &slots[i];
    operations[i].started = true;
  }
  dfccl::ContextSlot slot;
  double best_ns = 1e9;
  for (int round = 0; round < 20; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kSwitches; ++i) {
      slot.Load(&operations[i % kTasks]);
      ++slot.context().step;
      *slot.changed() = true;
    }
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    best_ns = std::min(best_ns, took.count() / kSwitches);
  }
  std::printf("%d tasks in turn: %.1f ns per save and load (%llu saves, %llu loads)\n", kTasks,
              best_ns, static_cast<unsigned long long>(slot.saves()),
              static_cast<unsigned long long>(slot.loads()));
  return 0;
}
