// SPDX-License-Identifier: Apache-2.0
// What connects the processes of a test, made before these are.
#ifndef DFCCL_TESTS_CORE_DAEMON_WIRES_H_
#define DFCCL_TESTS_CORE_DAEMON_WIRES_H_

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <map>
#include <utility>

#include "core/runtime.h"

namespace dfccl {
namespace testing {

// What connects two processes; the ends are in the order of the processes.
struct Wire {
  int socket[2];
  int memory;
};
using Wires = std::map<std::pair<int, int>, Wire>;

inline Wires Connect(int processes, bool shared_memory) {
  constexpr int kMemoryBytes = 1 << 17;
  Wires wires;
  for (int low = 0; low < processes; ++low) {
    for (int high = low + 1; high < processes; ++high) {
      Wire& wire = wires[{low, high}];
      EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, wire.socket), 0);
      wire.memory = -1;
      if (!shared_memory) continue;
      wire.memory = memfd_create("dfccl_test", 0);
      EXPECT_EQ(ftruncate(wire.memory, kMemoryBytes), 0);
    }
  }
  return wires;
}

inline void Close(const Wire& wire) {
  close(wire.socket[0]);
  close(wire.socket[1]);
  if (wire.memory >= 0) close(wire.memory);
}

// In the parent, once the children have them.
inline void CloseAll(const Wires& wires) {
  for (const auto& [ends, wire] : wires) Close(wire);
}

// In child `self`, which has told its runtime the topology.
inline void AddLinks(int self, const Wires& wires) {
  for (const auto& [ends, wire] : wires) {
    const bool low = ends.first == self;
    if (!low && ends.second != self) {
      Close(wire);
      continue;
    }
    close(wire.socket[low ? 1 : 0]);
    const int peer = low ? ends.second : ends.first;
    if (!Runtime::Get().AddLink(peer, {wire.socket[low ? 0 : 1]}, wire.memory).ok()) _exit(11);
  }
}

}  // namespace testing
}  // namespace dfccl

#endif  // DFCCL_TESTS_CORE_DAEMON_WIRES_H_
