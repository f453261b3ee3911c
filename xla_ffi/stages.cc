// SPDX-License-Identifier: Apache-2.0
#include "xla_ffi/stages.h"

namespace dfccl {
namespace {

Status Invalid(const char* message) { return Status(StatusCode::kInvalidArgument, message); }

}  // namespace

Status CheckTicket(const XLA_FFI_Buffer& buffer) {
  const bool fits = buffer.dtype == XLA_FFI_DataType_U64 && buffer.rank == 1 && buffer.dims[0] == 1;
  return fits ? Status() : Invalid("the ticket must be a uint64[1]");
}

Status DecodeResult(const XLA_FFI_CallFrame& frame, Submission* submission) {
  BufferView result;
  if (Status status = DecodeBuffer(Result(frame), &result); !status.ok()) return status;
  if (result.dtype != submission->signature.dtype || result.bytes() != submission->result_bytes()) {
    return Invalid("the result's type or size does not go with the operand's");
  }
  submission->result = result.data;
  return Status();
}

StartedCall MakeStarted(const Submission& submission) {
  StartedCall started;
  started.device = submission.device;
  started.program = submission.program;
  started.launch = submission.launch;
  started.source = submission.source;
  started.staged = submission.stage_source;
  started.source_bytes = submission.source_bytes();
  started.result_bytes = submission.result_bytes();
  return started;
}

Status CheckDoneOperands(const XLA_FFI_CallFrame& frame) {
  if (frame.args.size < 2) return Invalid("done needs ticket and source");
  return CheckTicket(Operand(frame, 0));
}

Status CheckWaitOperands(const XLA_FFI_CallFrame& frame) {
  if (frame.args.size < 1) return Invalid("a wait needs a ticket");
  return CheckTicket(Operand(frame, 0));
}

Status CheckDone(const XLA_FFI_CallFrame& frame, const StartedCall& started) {
  BufferView source, result;
  if (Status status = DecodeBuffer(Operand(frame, 1), &source); !status.ok()) return status;
  if (Status status = DecodeBuffer(Result(frame), &result); !status.ok()) return status;
  if (source.bytes() != started.source_bytes || result.bytes() != started.result_bytes) {
    return Invalid("start and done differ in size");
  }
  if (!started.staged && started.source_bytes != 0 && source.data != started.source) {
    return Status(StatusCode::kInternal,
                  "the operand of a collective moved between start and done: XLA copied a buffer "
                  "that was to be read in place");
  }
  return Status();
}

}  // namespace dfccl
