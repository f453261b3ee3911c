// SPDX-License-Identifier: Apache-2.0
// The handlers of the CUDA platform. XLA calls them while it fills a device's stream, so
// they only hand the call to the service and leave what waits in the stream. No Future:
// XLA:GPU blocks the host for one.
//
// A done does not read its ticket, which would be in device memory by the time at which the
// stream comes there. But a device's calls are made by one thread in the order of its
// stream, so a done is that of the first start of the same launch and call site, and with
// the same source, that has had none.
//
// The handlers do not have the trait for command buffers: a CUDA graph would replay what
// they left in the stream, but not what they told the daemon. XLA then runs them between
// its graphs.
#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/runtime.h"
#include "cuda/driver.h"
#include "cuda/service.h"
#include "xla_ffi/call_frame.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/ffi_status.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/stages.h"

namespace dfccl {
namespace {

using gpu::Service;

// What was started and whose done has not come.
class Started {
 public:
  struct Call : StartedCall {
    int32_t site = -1;
    uint64_t ticket = 0;
  };
  static Started& Get() {
    static Started& started = *new Started;
    return started;
  }

  // *lost: earlier launches with dones that will not come any more, which are forgotten.
  void Put(int gpu, const Call& call, std::vector<uint64_t>* lost) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::map<uint64_t, std::vector<Call>>& launches = launches_[{gpu, call.program}];
    while (!launches.empty() && launches.begin()->first + kLostAfterLaunches < call.launch) {
      lost->push_back(launches.begin()->first);
      launches.erase(launches.begin());
    }
    launches[call.launch].push_back(call);
  }

  // The start of a done whose source is at `source`; false: there is none.
  bool Take(int gpu, int64_t device, uint64_t program, uint64_t launch, int32_t site,
            const void* source, Call* call) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto launches = launches_.find({gpu, program});
    if (launches == launches_.end()) return false;
    const auto entry = launches->second.find(launch);
    if (entry == launches->second.end()) return false;
    std::vector<Call>& calls = entry->second;
    const auto find = [&](auto matches) {
      return std::find_if(calls.begin(), calls.end(), [&](const Call& other) {
        return other.device == device && other.site == site && matches(other);
      });
    };
    auto found =
        find([source](const Call& other) { return other.staged || other.source == source; });
    // If it is none of them, CheckDone says so.
    if (found == calls.end()) found = find([](const Call&) { return true; });
    if (found == calls.end()) return false;
    *call = *found;
    calls.erase(found);
    if (calls.empty()) launches->second.erase(entry);
    if (launches->second.empty()) launches_.erase(launches);
    return true;
  }

  void Forget(int gpu, uint64_t program, uint64_t launch) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto launches = launches_.find({gpu, program});
    if (launches != launches_.end()) launches->second.erase(launch);
  }

  void ForgetAll() {
    std::lock_guard<std::mutex> lock(mutex_);
    launches_.clear();
  }

 private:
  // XLA has at most 32 launches of a device in flight.
  static constexpr uint64_t kLostAfterLaunches = 64;

  std::mutex mutex_;
  // By GPU and program, then by launch.
  std::map<std::pair<int, uint64_t>, std::map<uint64_t, std::vector<Call>>> launches_;
};

// The process's GPUs, opened by the first call.
class Gpus {
 public:
  static Gpus& Get() {
    static Gpus& gpus = *new Gpus;
    return gpus;
  }

  void Configure(const CudaOptions& options) {
    Shutdown();
    std::lock_guard<std::mutex> lock(mutex_);
    options_ = options;
    status_ = Status();
  }

  void Shutdown() {
    std::shared_ptr<Service> service;
    Started::Get().ForgetAll();
    std::lock_guard<std::mutex> lock(mutex_);
    service.swap(service_);
    status_ = Status(StatusCode::kAborted, "the runtime has been shut down");
  }

  // The service, the number in it of the GPU that XLA calls `ordinal`, and the device's id.
  Status Find(int64_t ordinal, std::shared_ptr<Service>* service, int* gpu, int64_t* device) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (service_ == nullptr && status_.ok()) status_ = Open();
    if (!status_.ok()) return status_;
    const auto found = std::find_if(
        options_.devices.begin(), options_.devices.end(),
        [ordinal](const CudaOptions::Device& known) { return known.ordinal == ordinal; });
    if (found == options_.devices.end()) {
      return Status(StatusCode::kInternal, "GPU " + std::to_string(ordinal) + " is not known");
    }
    *service = service_;
    *gpu = static_cast<int>(found - options_.devices.begin());
    *device = found->id;
    return Status();
  }

  // nullptr: no call has come yet, or none could be served.
  std::shared_ptr<Service> service() {
    std::lock_guard<std::mutex> lock(mutex_);
    return service_;
  }

 private:
  Status Open() {
    std::vector<std::unique_ptr<gpu::Gpu>> gpus;
    gpu::ServiceOptions options = options_.service;
    Status status;
    for (const CudaOptions::Device& device : options_.devices) {
      options.gpu_of[device.id] = static_cast<int>(gpus.size());
      gpus.push_back(gpu::OpenGpu(options_.driver, device.ordinal, &status));
      if (!status.ok()) return status;
    }
    options.site_of = [](uint64_t program, int32_t site) {
      return Runtime::Get().FindSite(program, site);
    };
    service_ = Service::Make(std::move(gpus), options, &status);
    return status;
  }

  std::mutex mutex_;
  CudaOptions options_;
  std::shared_ptr<Service> service_;
  Status status_;  // why there is no service
};

// One execution of a call.
struct Execution {
  CudaCallState* state = nullptr;
  int64_t run_id = 0;
  gpu::Stream stream = nullptr;
  std::shared_ptr<Service> service;
  int gpu = 0;
  int64_t device = 0;

  XLA_FFI_Error* Begin(const XLA_FFI_CallFrame* frame) {
    int64_t ordinal;
    if (XLA_FFI_Error* error = GetState(frame, &state)) return error;
    if (XLA_FFI_Error* error = GetDeviceOrdinal(frame, &ordinal)) return error;
    if (XLA_FFI_Error* error = GetRunId(frame, &run_id)) return error;
    if (XLA_FFI_Error* error = GetStream(frame, &stream)) return error;
    const Status status = Gpus::Get().Find(ordinal, &service, &gpu, &device);
    device = state->DeviceOf(device);
    return ToFfiError(frame->api, status);
  }

  Status Decode(const XLA_FFI_CallFrame& frame, Submission* submission,
                RaggedOperands* ragged) const {
    // Waits for the stream, as nobody can say which collective this is without its key.
    const ReadMemory read = [this](void* to, const void* from, size_t bytes) {
      return service->gpu(gpu).Download(stream, to, from, bytes);
    };
    return DecodeSubmission(*state, frame, device, run_id, read, submission, ragged);
  }

  Status Start(const Submission& submission, const RaggedOperands& ragged, uint64_t* ticket,
               void* keep = nullptr) const {
    if (submission.ragged == nullptr) {
      return service->Start(gpu, stream, submission, nullptr, ticket, keep);
    }
    const RaggedOperands::Array* arrays = ragged.arrays;
    for (int i = 1; i < 4; ++i) {
      if (arrays[i].wide != arrays[0].wide) {
        return Status(StatusCode::kInvalidArgument,
                      "offsets and sizes must be all int32 or all int64 on GPUs");
      }
    }
    const RaggedPart& part = ragged.part;
    const gpu::RaggedArrays there = {arrays[0].data,   arrays[1].data,
                                     arrays[2].data,   arrays[3].data,
                                     part.initial,     part.source_rows,
                                     part.result_rows, arrays[0].wide ? uint32_t{1} : uint32_t{0}};
    return service->Start(gpu, stream, submission, &there, ticket, keep);
  }

  // Ends what else the failed launch has in flight: XLA runs no more of it and takes its
  // buffers back, in the order of the stream.
  XLA_FFI_Error* Fail(const XLA_FFI_CallFrame* frame, const Status& status) const {
    const uint64_t launch = state->call_site->Launch(run_id);
    Started::Get().Forget(gpu, state->program, launch);
    Abandon(stream, launch, status);
    return ToFfiError(frame->api, status);
  }

  void Abandon(gpu::Stream of_launch, uint64_t launch, const Status& status) const {
    service->Abandon(gpu, of_launch, state->program, launch, status);
    // Of what has gone to the host; and other processes hear that they wait in vain.
    Runtime::Get().Abandon(device, state->program, launch, status);
  }
};

XLA_FFI_Error* ExecuteSingle(XLA_FFI_CallFrame* frame) {
  Execution execution;
  if (XLA_FFI_Error* error = execution.Begin(frame)) return error;
  Submission submission;
  RaggedOperands ragged;
  uint64_t ticket;
  Status status = execution.Decode(*frame, &submission, &ragged);
  if (status.ok()) status = DecodeResult(*frame, &submission);
  if (status.ok()) status = execution.Start(submission, ragged, &ticket);
  if (status.ok()) status = execution.service->Finish(execution.stream, ticket, submission.result);
  return status.ok() ? nullptr : execution.Fail(frame, status);
}

XLA_FFI_Error* ExecuteStart(XLA_FFI_CallFrame* frame) {
  Execution execution;
  if (XLA_FFI_Error* error = execution.Begin(frame)) return error;
  Submission submission;
  RaggedOperands ragged;
  Started::Call call;
  Status status = CheckTicket(Result(*frame));
  if (status.ok()) status = execution.Decode(*frame, &submission, &ragged);
  if (status.ok()) status = execution.Start(submission, ragged, &call.ticket);
  if (!status.ok()) return execution.Fail(frame, status);
  static_cast<StartedCall&>(call) = MakeStarted(submission);
  call.site = submission.site;
  std::vector<uint64_t> lost;
  Started::Get().Put(execution.gpu, call, &lost);
  for (uint64_t launch : lost) {
    execution.Abandon(nullptr, launch,
                      Status(StatusCode::kAborted, "the program ended before its done"));
  }
  return nullptr;
}

XLA_FFI_Error* ExecuteDone(XLA_FFI_CallFrame* frame) {
  Execution execution;
  if (XLA_FFI_Error* error = execution.Begin(frame)) return error;
  const CudaCallState& state = *execution.state;
  Status status = CheckDoneOperands(*frame);
  if (!status.ok()) return execution.Fail(frame, status);
  Started::Call call;
  if (!Started::Get().Take(execution.gpu, execution.device, state.program,
                           state.call_site->Launch(execution.run_id), state.site,
                           Operand(*frame, 1).data, &call)) {
    return execution.Fail(frame, Status(StatusCode::kInvalidArgument, "a done without its start"));
  }
  status = CheckDone(*frame, call);
  if (status.ok()) {
    status = execution.service->Finish(execution.stream, call.ticket, Result(*frame).data);
  }
  return status.ok() ? nullptr : execution.Fail(frame, status);
}

XLA_FFI_Error* ExecuteHandleStart(XLA_FFI_CallFrame* frame) {
  Execution execution;
  if (XLA_FFI_Error* error = execution.Begin(frame)) return error;
  Submission submission;
  RaggedOperands ragged;
  uint64_t ticket;
  Status status = CheckTicket(Result(*frame));
  if (status.ok() && execution.state->has_tag) {
    status =
        Status(StatusCode::kInvalidArgument, "ends are announced under a tag on CPU devices only");
  }
  if (status.ok()) status = execution.Decode(*frame, &submission, &ragged);
  if (status.ok()) status = execution.Start(submission, ragged, &ticket, Result(*frame).data);
  return status.ok() ? nullptr : execution.Fail(frame, status);
}

XLA_FFI_Error* ExecuteHandleWait(XLA_FFI_CallFrame* frame) {
  Execution execution;
  if (XLA_FFI_Error* error = execution.Begin(frame)) return error;
  BufferView result;
  Status status = CheckWaitOperands(*frame);
  if (status.ok()) status = DecodeBuffer(Result(*frame), &result);
  if (!status.ok()) return execution.Fail(frame, status);
  const CudaCallState& state = *execution.state;
  Service::Wait wait;
  wait.device = execution.device;
  wait.program = state.program;
  wait.launch = state.call_site->Launch(execution.run_id);
  wait.ticket = Operand(*frame, 0).data;
  wait.destination = result.data;
  wait.result_bytes = result.bytes();
  status = execution.service->Await(execution.gpu, execution.stream, wait);
  return status.ok() ? nullptr : execution.Fail(frame, status);
}

}  // namespace

void ConfigureCuda(const CudaOptions& options) { Gpus::Get().Configure(options); }
void ShutdownCuda() { Gpus::Get().Shutdown(); }

bool CudaCounters(gpu::ServiceCounters* counters) {
  const std::shared_ptr<Service> service = Gpus::Get().service();
  if (service != nullptr) *counters = service->Counters();
  return service != nullptr;
}

std::vector<FlightEntry> CudaInFlight() {
  const std::shared_ptr<Service> service = Gpus::Get().service();
  return service != nullptr ? service->InFlight() : std::vector<FlightEntry>();
}

HandleState StateOfCudaHandle(uint64_t ticket) {
  const std::shared_ptr<Service> service = Gpus::Get().service();
  if (service == nullptr) return HandleState::kGone;
  switch (service->StateOfKept(ticket)) {
    case Service::KeptState::kPending:
      return HandleState::kPending;
    case Service::KeptState::kOver:
      return HandleState::kFinished;
    case Service::KeptState::kGone:
      break;
  }
  return HandleState::kGone;
}

bool DropCudaHandle(uint64_t ticket) {
  const std::shared_ptr<Service> service = Gpus::Get().service();
  return service != nullptr && service->DropKept(ticket);
}

bool CancelCudaHandle(uint64_t ticket) {
  const std::shared_ptr<Service> service = Gpus::Get().service();
  const Status why(StatusCode::kAborted, "a member has cancelled its handle");
  return service != nullptr && service->CancelKept(ticket, why);
}

const TargetHandlers* CudaTargets() {
  static constexpr TargetHandlers kTargets[kTargetCount] = {
      {"dfccl_collective", Instantiate<CudaCallState, Target::kSingle>,
       Execute<CudaCallState, ExecuteSingle>},
      {"dfccl_collective_start", Instantiate<CudaCallState, Target::kStart>,
       Execute<CudaCallState, ExecuteStart>},
      {"dfccl_collective_done", Instantiate<CudaCallState, Target::kDone>,
       Execute<CudaCallState, ExecuteDone>},
      {"dfccl_handle_start", Instantiate<CudaCallState, Target::kHandleStart>,
       Execute<CudaCallState, ExecuteHandleStart>},
      {"dfccl_handle_wait", Instantiate<CudaCallState, Target::kHandleWait>,
       Execute<CudaCallState, ExecuteHandleWait>},
  };
  return kTargets;
}

}  // namespace dfccl
