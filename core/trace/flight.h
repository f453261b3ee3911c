// SPDX-License-Identifier: Apache-2.0
// The flight record: what every device issued lately, what is in flight and
// what it waits for. Always on; fixed size per device.
#ifndef DFCCL_CORE_TRACE_FLIGHT_H_
#define DFCCL_CORE_TRACE_FLIGHT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace dfccl {

struct FlightEntry {
  int64_t device = 0;
  uint64_t sequence = 0;  // n-th operation this device submitted
  std::string operation;  // "all_reduce(sum)"
  std::string name;
  std::string key;  // "" or the run-time key
  std::string program;
  uint64_t launch = 0;
  std::string source;  // Python source line
  std::string dtype;
  int64_t count = 0;
  int64_t bytes = 0;
  std::string plan;  // "direct_flat"
  std::vector<int64_t> group;
  std::vector<int64_t> absent;  // members that have not arrived
  std::string state;            // "waiting for members", "moving", "done", "failed"
  std::string error;
  bool blocks_device = false;  // the device's program waits for it right now
  double age_s = 0;            // since submission
  double wait_s = 0;           // until the last member arrived (or so far)
  double total_s = 0;          // until finished (0: not yet)
  int64_t preemptions = 0;
};

struct DeviceCounters {
  int64_t device = 0;
  uint64_t submitted = 0, completed = 0, failed = 0;
  uint64_t preemptions = 0, context_saves = 0, context_loads = 0, quits = 0, restarts = 0;
  uint64_t bytes = 0;
  double largest_wait_s = 0;
};

struct FlightReport {
  std::vector<FlightEntry> in_flight;
  std::vector<FlightEntry> recent;  // newest first
  std::vector<DeviceCounters> devices;
  std::vector<std::string> cycles;  // one line each, "" when none
};

}  // namespace dfccl

#endif  // DFCCL_CORE_TRACE_FLIGHT_H_
