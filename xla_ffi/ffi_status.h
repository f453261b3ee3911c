// SPDX-License-Identifier: Apache-2.0
// The one place that turns a core Status into what XLA reports. JAX users see
// "<CODE>: jax_dfccl: <message>".
#ifndef DFCCL_XLA_FFI_FFI_STATUS_H_
#define DFCCL_XLA_FFI_FFI_STATUS_H_

#include "core/status.h"
#include "xla/ffi/api/ffi.h"

namespace dfccl {

xla::ffi::Error ToFfiError(const Status& status);

// The same for handlers that use the C API; nullptr when ok.
XLA_FFI_Error* ToFfiError(const XLA_FFI_Api* api, const Status& status);

}  // namespace dfccl

#endif  // DFCCL_XLA_FFI_FFI_STATUS_H_
