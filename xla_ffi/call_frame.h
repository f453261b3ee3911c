// SPDX-License-Identifier: Apache-2.0
// Thin inline calls of the FFI's C API for the execute stage. The C++ bindings
// would do, but their Future costs a microsecond or two per device and call
// even when there is nothing to wait for; here one is made only when needed.
#ifndef DFCCL_XLA_FFI_CALL_FRAME_H_
#define DFCCL_XLA_FFI_CALL_FRAME_H_

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace dfccl {

template <typename T>
XLA_FFI_Error* GetState(const XLA_FFI_CallFrame* frame, T** state) {
  XLA_FFI_State_Get_Args args = {};
  args.struct_size = XLA_FFI_State_Get_Args_STRUCT_SIZE;
  args.ctx = frame->ctx;
  args.stage = XLA_FFI_ExecutionStage_INSTANTIATE;
  args.type_id = &T::id;
  XLA_FFI_Error* error = frame->api->XLA_FFI_State_Get(&args);
  *state = static_cast<T*>(args.state);
  return error;
}

// The global device id on CPU, the number of the GPU in this process on CUDA.
inline XLA_FFI_Error* GetDeviceOrdinal(const XLA_FFI_CallFrame* frame, int64_t* device) {
  XLA_FFI_DeviceOrdinal_Get_Args args = {};
  args.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE;
  args.ctx = frame->ctx;
  XLA_FFI_Error* error = frame->api->XLA_FFI_DeviceOrdinal_Get(&args);
  *device = args.device_ordinal;
  return error;
}

inline XLA_FFI_Error* GetRunId(const XLA_FFI_CallFrame* frame, int64_t* run_id) {
  XLA_FFI_RunId_Get_Args args = {};
  args.struct_size = XLA_FFI_RunId_Get_Args_STRUCT_SIZE;
  args.ctx = frame->ctx;
  XLA_FFI_Error* error = frame->api->XLA_FFI_RunId_Get(&args);
  *run_id = args.run_id;
  return error;
}

// A CUstream.
inline XLA_FFI_Error* GetStream(const XLA_FFI_CallFrame* frame, void** stream) {
  XLA_FFI_Stream_Get_Args args = {};
  args.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
  args.ctx = frame->ctx;
  XLA_FFI_Error* error = frame->api->XLA_FFI_Stream_Get(&args);
  *stream = args.stream;
  return error;
}

inline XLA_FFI_Error* CreateFuture(const XLA_FFI_Api* api, XLA_FFI_Future** future) {
  XLA_FFI_Future_Create_Args args = {};
  args.struct_size = XLA_FFI_Future_Create_Args_STRUCT_SIZE;
  XLA_FFI_Error* error = api->XLA_FFI_Future_Create(&args);
  *future = args.future;
  return error;
}

// Completes `future`: available if `error` is null. Runs the program's next
// thunks before it returns, and `future` is dead then.
inline void CompleteFuture(const XLA_FFI_Api* api, XLA_FFI_Future* future, XLA_FFI_Error* error) {
  XLA_FFI_Error* failure;
  if (error == nullptr) {
    XLA_FFI_Future_SetAvailable_Args args = {};
    args.struct_size = XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE;
    args.future = future;
    failure = api->XLA_FFI_Future_SetAvailable(&args);
  } else {
    XLA_FFI_Future_SetError_Args args = {};
    args.struct_size = XLA_FFI_Future_SetError_Args_STRUCT_SIZE;
    args.future = future;
    args.error = error;
    failure = api->XLA_FFI_Future_SetError(&args);
  }
  if (failure != nullptr) {  // only for arguments of a wrong size: an ABI mismatch
    XLA_FFI_Error_Destroy_Args args = {};
    args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
    args.error = failure;
    api->XLA_FFI_Error_Destroy(&args);
  }
}

}  // namespace dfccl

#endif  // DFCCL_XLA_FFI_CALL_FRAME_H_
