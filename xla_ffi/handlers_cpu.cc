// SPDX-License-Identifier: Apache-2.0
// The handlers of the CPU platform: make a submission, hand it to the runtime,
// and tell XLA "done" at once or through a future.
//
// XLA reuses the call frame when a handler returns, so everything a completion
// needs is copied out of it. Completing a future runs the program's following
// thunks, other handlers among them, on the completing thread.
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/runtime.h"
#include "xla_ffi/call_frame.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/ffi_status.h"
#include "xla_ffi/handlers.h"
#include "xla_ffi/stages.h"
#include "xla_ffi/tickets.h"

namespace dfccl {
namespace {

void ReleaseFinished(void* operation) {
  Runtime::Get().Release(static_cast<Operation*>(operation));
}

// Calls function(argument) when the operation finishes, or now if it has.
void WhenFinished(Operation* operation, Runtime::Callback function, void* argument, bool blocks) {
  if (!Runtime::Get().OnFinish(operation, function, argument, blocks)) function(argument);
}

// Gives an operation that nobody will collect back.
void ReleaseEventually(Operation* operation) {
  WhenFinished(operation, ReleaseFinished, operation, /*blocks=*/false);
}

void ReapLost(const StartedOperation& started) {
  Runtime::Get().Abandon(started.device, started.program, started.launch,
                         Status(StatusCode::kAborted, "the program ended before its done"));
  ReleaseEventually(started.operation);
}

TicketTable& Tickets() {
  static TicketTable& tickets = *new TicketTable(ReapLost);
  return tickets;
}

// Ends what else the failed launch has in flight on its device: XLA runs no
// more of it and takes its buffers back once the error is returned.
void AbandonLaunch(int64_t device, uint64_t program, uint64_t launch, const Status& status) {
  Runtime::Get().Abandon(device, program, launch, status);
  Tickets().Drop(device, program, launch, status);
}

// One operation whose result the program waits for.
struct Awaited {
  Operation* operation;
  void* collect_to;  // nullptr: the result is written in place
  int64_t device;
  uint64_t program;
  uint64_t launch;
  bool sends = false;
};

// Of a sender that has failed: its program may give nothing that could carry the error. What
// ends because of something else is said there.
void TellOfSender(const Status& status) {
  if (status.ok() || status.code() == StatusCode::kAborted) return;
  std::fprintf(stderr, "jax_dfccl: %s\n", status.message().c_str());
}

// Consumes a finished operation and returns what the program gets.
Status Settle(const Awaited& awaited, Status status) {
  Runtime& runtime = Runtime::Get();
  if (status.ok() && awaited.collect_to != nullptr) {
    runtime.Collect(awaited.operation, awaited.collect_to);
    return status;
  }
  runtime.Release(awaited.operation);
  if (awaited.sends) TellOfSender(status);
  if (!status.ok()) AbandonLaunch(awaited.device, awaited.program, awaited.launch, status);
  return status;
}

struct Completion {
  Awaited awaited;
  const XLA_FFI_Api* api;
  XLA_FFI_Future* future;

  static void Run(void* argument) {
    std::unique_ptr<Completion> self(static_cast<Completion*>(argument));
    Status status;
    if (!Runtime::Get().Finished(self->awaited.operation, &status)) {
      status = Status(StatusCode::kInternal, "completion of an unfinished operation");
    }
    status = Settle(self->awaited, std::move(status));
    CompleteFuture(self->api, self->future, ToFfiError(self->api, status));
  }
};

// Returns plain success if the operation has finished, else leaves a future.
XLA_FFI_Error* Await(XLA_FFI_CallFrame* frame, const Awaited& awaited) {
  const XLA_FFI_Api* api = frame->api;
  Runtime& runtime = Runtime::Get();
  Status status;
  if (runtime.Finished(awaited.operation, &status)) {
    return ToFfiError(api, Settle(awaited, std::move(status)));
  }
  XLA_FFI_Future* future;
  if (XLA_FFI_Error* error = CreateFuture(api, &future)) return error;
  frame->future = future;
  auto* completion = new Completion{awaited, api, future};
  WhenFinished(awaited.operation, Completion::Run, completion, /*blocks=*/true);
  return nullptr;
}

// Ends an execution that failed before it could wait for anything.
XLA_FFI_Error* Fail(const XLA_FFI_CallFrame* frame, const Status& status) {
  CallState* state;
  int64_t device, run_id;
  if (XLA_FFI_Error* error = GetState(frame, &state)) return error;
  if (XLA_FFI_Error* error = GetDeviceOrdinal(frame, &device)) return error;
  if (XLA_FFI_Error* error = GetRunId(frame, &run_id)) return error;
  AbandonLaunch(state->DeviceOf(device), state->program, state->call_site->Launch(run_id), status);
  return ToFfiError(frame->api, status);
}

// What the execute stages of a single call and of the starts have in common.
XLA_FFI_Error* Prepare(const XLA_FFI_CallFrame* frame, Submission* submission,
                       RaggedOperands* ragged) {
  CallState* state;
  int64_t device, run_id;
  if (XLA_FFI_Error* error = GetState(frame, &state)) return error;
  if (XLA_FFI_Error* error = GetDeviceOrdinal(frame, &device)) return error;
  if (XLA_FFI_Error* error = GetRunId(frame, &run_id)) return error;
  static const ReadMemory* const read =
      new ReadMemory([](void* to, const void* from, size_t bytes) {
        std::memcpy(to, from, bytes);
        return Status();
      });
  const Status status =
      DecodeSubmission(*state, *frame, state->DeviceOf(device), run_id, *read, submission, ragged);
  if (!status.ok()) return Fail(frame, status);
  if (submission->ragged != nullptr) ragged->CopyArrays(submission->group->size());
  return nullptr;
}

XLA_FFI_Error* ExecuteSingle(XLA_FFI_CallFrame* frame) {
  Submission submission;
  RaggedOperands ragged;
  if (XLA_FFI_Error* error = Prepare(frame, &submission, &ragged)) return error;
  if (Status status = DecodeResult(*frame, &submission); !status.ok()) return Fail(frame, status);
  Operation* operation = Runtime::Get().Submit(submission);
  return Await(frame, {operation, /*collect_to=*/nullptr, submission.device, submission.program,
                       submission.launch});
}

// Ends of operations with a tag that nobody has taken yet.
struct TaggedEnds {
  std::mutex mutex;
  std::condition_variable some;
  std::vector<TaggedEnd> ends;

  static TaggedEnds& Get() {
    static TaggedEnds& ends = *new TaggedEnds;
    return ends;
  }
};

// Tells how an operation has ended; it stays its ticket's.
struct Announcement {
  Operation* operation;
  int32_t tag;

  static void Run(void* argument) {
    std::unique_ptr<Announcement> self(static_cast<Announcement*>(argument));
    Status status;
    Runtime::Get().Finished(self->operation, &status);
    TaggedEnds& ends = TaggedEnds::Get();
    std::lock_guard<std::mutex> lock(ends.mutex);
    ends.ends.push_back({self->tag, status.ok() ? std::string() : status.message()});
    ends.some.notify_one();
  }
};

void AnnounceEnd(Operation* operation, int32_t tag) {
  WhenFinished(operation, Announcement::Run, new Announcement{operation, tag}, /*blocks=*/false);
}

// Gives back a message that its sender does not wait for.
void EndDetached(void* argument) {
  auto* operation = static_cast<Operation*>(argument);
  Status status;
  Runtime::Get().Finished(operation, &status);
  TellOfSender(status);
  Runtime::Get().Release(operation);
}

template <bool kept>
XLA_FFI_Error* ExecuteStart(XLA_FFI_CallFrame* frame) {
  if (Status status = CheckTicket(Result(*frame)); !status.ok()) return Fail(frame, status);
  Submission submission;
  RaggedOperands ragged;
  if (XLA_FFI_Error* error = Prepare(frame, &submission, &ragged)) return error;
  StartedOperation started;
  static_cast<StartedCall&>(started) = MakeStarted(submission);
  started.operation = Runtime::Get().Submit(submission);
  started.kept = kept;
  CallState* state = nullptr;
  bool detached = false;
  if constexpr (kept) {
    if (XLA_FFI_Error* error = GetState(frame, &state)) return error;
    detached = state->detached;
  }
  const uint64_t ticket = detached ? 0 : Tickets().Put(started);
  std::memcpy(Result(*frame).data, &ticket, sizeof(ticket));
  if constexpr (kept) {
    if (detached) {
      WhenFinished(started.operation, EndDetached, started.operation, /*blocks=*/false);
    } else if (state->has_tag) {
      int32_t tag;
      std::memcpy(&tag, Operand(*frame, frame->args.size - 1).data, sizeof(tag));
      AnnounceEnd(started.operation, tag);
    }
  }
  return nullptr;
}

XLA_FFI_Error* ExecuteDone(XLA_FFI_CallFrame* frame) {
  if (Status status = CheckDoneOperands(*frame); !status.ok()) return Fail(frame, status);
  uint64_t ticket;
  std::memcpy(&ticket, Operand(*frame, 0).data, sizeof(ticket));
  StartedOperation started;
  if (!Tickets().Take(ticket, &started)) return Fail(frame, Tickets().WhyGone(ticket));
  if (Status status = CheckDone(*frame, started); !status.ok()) {
    XLA_FFI_Error* error = Fail(frame, status);
    ReleaseEventually(started.operation);
    return error;
  }
  CallState* state;
  if (XLA_FFI_Error* error = GetState(frame, &state)) return error;
  return Await(frame, {started.operation, Result(*frame).data, started.device, started.program,
                       started.launch, state->sends});
}

// Whether this device may wait for what a handle stands for.
Status CheckWait(const StartedOperation& started, int64_t device, const XLA_FFI_Buffer& buffer) {
  if (!started.kept || started.device != device) {
    return Status(StatusCode::kInvalidArgument,
                  "a handle of device " + std::to_string(started.device) +
                      " is waited for on device " + std::to_string(device) +
                      "; a handle goes from program to program as it is, on the same devices");
  }
  BufferView result;
  if (Status status = DecodeBuffer(buffer, &result); !status.ok()) return status;
  if (result.bytes() != started.result_bytes) {
    return Status(StatusCode::kInvalidArgument, "start and wait differ in size");
  }
  return Status();
}

XLA_FFI_Error* ExecuteWait(XLA_FFI_CallFrame* frame) {
  if (Status status = CheckWaitOperands(*frame); !status.ok()) return Fail(frame, status);
  CallState* state;
  int64_t device, run_id;
  if (XLA_FFI_Error* error = GetState(frame, &state)) return error;
  if (XLA_FFI_Error* error = GetDeviceOrdinal(frame, &device)) return error;
  if (XLA_FFI_Error* error = GetRunId(frame, &run_id)) return error;
  device = state->DeviceOf(device);
  uint64_t ticket;
  std::memcpy(&ticket, Operand(*frame, 0).data, sizeof(ticket));
  StartedOperation started;
  Status status;
  Tickets().Look(ticket, [&](const StartedOperation& found) {
    status = CheckWait(found, device, Result(*frame));
  });
  if (!status.ok()) return Fail(frame, status);
  if (!Tickets().Take(ticket, &started)) return Fail(frame, Tickets().WhyGone(ticket));
  // If it has failed, so has the launch that waits, not the one that started it.
  return Await(frame, {started.operation, Result(*frame).data, device, state->program,
                       state->call_site->Launch(run_id), state->sends});
}

}  // namespace

const TargetHandlers* CpuTargets() {
  static constexpr TargetHandlers kTargets[kTargetCount] = {
      {"dfccl_collective", Instantiate<CallState, Target::kSingle>,
       Execute<CallState, ExecuteSingle>},
      {"dfccl_collective_start", Instantiate<CallState, Target::kStart>,
       Execute<CallState, ExecuteStart<false>>},
      {"dfccl_collective_done", Instantiate<CallState, Target::kDone>,
       Execute<CallState, ExecuteDone>},
      {"dfccl_handle_start", Instantiate<CallState, Target::kHandleStart>,
       Execute<CallState, ExecuteStart<true>>},
      {"dfccl_handle_wait", Instantiate<CallState, Target::kHandleWait>,
       Execute<CallState, ExecuteWait>},
  };
  return kTargets;
}

int64_t OpenTicketCount() { return Tickets().size(); }

HandleState StateOfHandle(uint64_t ticket) {
  HandleState state = HandleState::kGone;
  Tickets().Look(ticket, [&](const StartedOperation& started) {
    Status status;
    state = Runtime::Get().Finished(started.operation, &status) ? HandleState::kFinished
                                                                : HandleState::kPending;
  });
  return state;
}

bool DropHandle(uint64_t ticket) {
  StartedOperation started;
  if (!Tickets().Take(ticket, &started)) return false;
  ReleaseEventually(started.operation);
  return true;
}

bool CancelHandle(uint64_t ticket) {
  bool cancelled = false;
  Tickets().Look(ticket, [&](const StartedOperation& started) {
    const Status status(StatusCode::kAborted, "a member has cancelled its handle");
    cancelled = Runtime::Get().Cancel(started.operation, status);
  });
  return cancelled;
}

std::vector<TaggedEnd> TakeTaggedEnds(int64_t timeout_ns) {
  TaggedEnds& ends = TaggedEnds::Get();
  std::unique_lock<std::mutex> lock(ends.mutex);
  ends.some.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                     [&] { return !ends.ends.empty(); });
  return std::exchange(ends.ends, {});
}

}  // namespace dfccl
