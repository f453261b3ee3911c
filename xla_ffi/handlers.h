// SPDX-License-Identifier: Apache-2.0
// The handlers that bindings.cc registers with XLA.
#ifndef DFCCL_XLA_FFI_HANDLERS_H_
#define DFCCL_XLA_FFI_HANDLERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/trace/flight.h"
#include "cuda/driver.h"
#include "cuda/service.h"
#include "xla/ffi/api/ffi.h"

namespace dfccl {

struct TargetHandlers {
  const char* name;
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* execute;
};

// dfccl_collective        (source[, ragged][, key]) -> result
// dfccl_collective_start  (source[, ragged][, key]) -> ticket u64[1]
// dfccl_collective_done   (ticket, source, more tickets...) -> result
// dfccl_handle_start      (source[, ragged][, key][, tag]) -> ticket u64[1]
// dfccl_handle_wait       (ticket, more tickets...) -> result
// The first three stand in one computation. A handle may be waited for in a later program.
// On CUDA there is no tag.
// ragged, for ragged_all_to_all: what the result holds before, and the four index
// arrays in the order of RaggedPart (core/runtime.h)
constexpr int kTargetCount = 5;
const TargetHandlers* CpuTargets();
const TargetHandlers* CudaTargets();

// Operations that were started and whose done has not come.
int64_t OpenTicketCount();

// What has become of an operation that a handle stands for, by the number of its platform.
enum class HandleState { kPending, kFinished, kGone };
HandleState StateOfHandle(uint64_t ticket);
HandleState StateOfCudaHandle(uint64_t ticket);
// Nobody will wait for it. False: it is gone already.
bool DropHandle(uint64_t ticket);
bool DropCudaHandle(uint64_t ticket);
// Ends it with an error, on all its members. False: it is gone or has finished.
bool CancelHandle(uint64_t ticket);
bool CancelCudaHandle(uint64_t ticket);

// The ends of operations that were started with a tag, on this process's devices.
struct TaggedEnd {
  int32_t tag;
  std::string error;  // empty: it succeeded
};
// Waits for some, at most so long.
std::vector<TaggedEnd> TakeTaggedEnds(int64_t timeout_ns);

// What the first call on CUDA opens. Nothing of CUDA is loaded before.
struct CudaOptions {
  struct Device {
    int ordinal = 0;  // the driver's number of the GPU
    int64_t id = 0;   // the device's global id
  };
  gpu::DriverOptions driver;
  gpu::ServiceOptions service;
  std::vector<Device> devices;
};
void ConfigureCuda(const CudaOptions& options);
// Ends everything pending with an error, and the daemons, within a bound.
void ShutdownCuda();
// False: no call has come yet.
bool CudaCounters(gpu::ServiceCounters* counters);
// What is unfinished on GPUs, but for what the runtime reports.
std::vector<FlightEntry> CudaInFlight();

}  // namespace dfccl

#endif  // DFCCL_XLA_FFI_HANDLERS_H_
