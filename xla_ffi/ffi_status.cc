// SPDX-License-Identifier: Apache-2.0
#include "xla_ffi/ffi_status.h"

#include <string>

namespace dfccl {
namespace {

XLA_FFI_Error_Code ErrorCode(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return XLA_FFI_Error_Code_OK;
    case StatusCode::kInvalidArgument:
    case StatusCode::kMismatch:
      return XLA_FFI_Error_Code_INVALID_ARGUMENT;
    case StatusCode::kDeadlineExceeded:
      return XLA_FFI_Error_Code_DEADLINE_EXCEEDED;
    case StatusCode::kCycle:
      return XLA_FFI_Error_Code_FAILED_PRECONDITION;
    case StatusCode::kAborted:
      return XLA_FFI_Error_Code_ABORTED;
    case StatusCode::kInternal:
      return XLA_FFI_Error_Code_INTERNAL;
  }
  return XLA_FFI_Error_Code_UNKNOWN;
}

std::string Message(const Status& status) { return "jax_dfccl: " + status.message(); }

}  // namespace

xla::ffi::Error ToFfiError(const Status& status) {
  if (status.ok()) return xla::ffi::Error::Success();
  return xla::ffi::Error(static_cast<xla::ffi::ErrorCode>(ErrorCode(status.code())),
                         Message(status));
}

XLA_FFI_Error* ToFfiError(const XLA_FFI_Api* api, const Status& status) {
  if (status.ok()) return nullptr;
  const std::string message = Message(status);
  XLA_FFI_Error_Create_Args args = {};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message.c_str();
  args.errc = ErrorCode(status.code());
  return api->XLA_FFI_Error_Create(&args);
}

}  // namespace dfccl
