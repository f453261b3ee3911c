// SPDX-License-Identifier: Apache-2.0
// What the handlers of all platforms do alike: the instantiate stage, the answer to
// XLA's question for a handler's metadata, and the checks of results and dones.
#ifndef DFCCL_XLA_FFI_STAGES_H_
#define DFCCL_XLA_FFI_STAGES_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "core/runtime.h"
#include "core/status.h"
#include "xla/ffi/api/ffi.h"
#include "xla_ffi/call_frame.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/ffi_status.h"
#include "xla_ffi/tickets.h"

namespace dfccl {

inline const XLA_FFI_Buffer& Operand(const XLA_FFI_CallFrame& frame, int64_t index) {
  return *static_cast<const XLA_FFI_Buffer*>(frame.args.args[index]);
}

inline const XLA_FFI_Buffer& Result(const XLA_FFI_CallFrame& frame) {
  return *static_cast<const XLA_FFI_Buffer*>(frame.rets.rets[0]);
}

// Whether a buffer can hold a ticket.
Status CheckTicket(const XLA_FFI_Buffer& buffer);

// Of a single call: whether the result fits, and then where it is.
Status DecodeResult(const XLA_FFI_CallFrame& frame, Submission* submission);

// What its done must know of a submission that is started.
StartedCall MakeStarted(const Submission& submission);

// Of a done: whether it has the operands that it needs, and then whether source and
// result are those of the start.
Status CheckDoneOperands(const XLA_FFI_CallFrame& frame);
Status CheckDone(const XLA_FFI_CallFrame& frame, const StartedCall& started);

// Of a wait for a handle.
Status CheckWaitOperands(const XLA_FFI_CallFrame& frame);

// `State` is CallState, or one for another platform: XLA's copies of different
// platforms number types independently.
template <typename State, Target target>
XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame) {
  namespace ffi = ::xla::ffi;
  static const auto* const handler =
      ffi::Ffi::BindInstantiate()
          .Attrs()
          .To([](const ffi::Dictionary& attributes) -> ffi::ErrorOr<std::unique_ptr<State>> {
            auto state = std::make_unique<State>();
            const Status status = DecodeCall(target, attributes, state.get());
            if (!status.ok()) return ffi::Unexpected(ToFfiError(status));
            return state;
          })
          .release();
  return handler->Call(frame);
}

// XLA also calls each handler for its metadata (API version, traits: none); the bindings
// of the C++ API answer that.
template <typename State, XLA_FFI_Error* (*execute)(XLA_FFI_CallFrame*)>
XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
  namespace ffi = ::xla::ffi;
  if (frame->extension_start == nullptr) return execute(frame);
  static const auto* const metadata =
      ffi::Ffi::Bind()
          .Ctx<ffi::State<State>>()
          .To([](State*) {
            return ffi::Error::Internal("jax_dfccl: unknown extension of the call frame");
          })
          .release();
  return metadata->Call(frame);
}

}  // namespace dfccl

#endif  // DFCCL_XLA_FFI_STAGES_H_
