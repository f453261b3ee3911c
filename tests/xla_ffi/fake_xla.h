// SPDX-License-Identifier: Apache-2.0
// XLA's side of the FFI, as far as our handlers see it: errors, state, stream, device and
// run of an execution, and call frames of custom calls.
#ifndef DFCCL_TESTS_XLA_FFI_FAKE_XLA_H_
#define DFCCL_TESTS_XLA_FFI_FAKE_XLA_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/c_api.h"
#include "xla_ffi/handlers.h"

struct XLA_FFI_Error {
  std::string message;
  XLA_FFI_Error_Code code;
};

namespace dfccl {
namespace testing {

// What is behind a frame's opaque context, whose type has another name in newer headers.
struct Context {
  using Opaque = decltype(XLA_FFI_CallFrame::ctx);

  void* state = nullptr;
  int32_t ordinal = 0;
  int64_t run_id = 0;
  void* stream = nullptr;

  static Context& Of(Opaque opaque) { return *reinterpret_cast<Context*>(opaque); }
  Opaque opaque() { return reinterpret_cast<Opaque>(this); }
};

inline const XLA_FFI_Api* FakeApi() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api made = {};
    made.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    made.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
    made.api_version.major_version = XLA_FFI_API_MAJOR;
    made.api_version.minor_version = XLA_FFI_API_MINOR;
    made.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{args->message, args->errc};
    };
    made.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
    made.XLA_FFI_State_Set = [](XLA_FFI_State_Set_Args* args) -> XLA_FFI_Error* {
      Context::Of(args->ctx).state = args->state;
      return nullptr;
    };
    made.XLA_FFI_State_Get = [](XLA_FFI_State_Get_Args* args) -> XLA_FFI_Error* {
      args->state = Context::Of(args->ctx).state;
      return nullptr;
    };
    made.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
      args->stream = Context::Of(args->ctx).stream;
      return nullptr;
    };
    made.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
      args->device_ordinal = Context::Of(args->ctx).ordinal;
      return nullptr;
    };
    made.XLA_FFI_RunId_Get = [](XLA_FFI_RunId_Get_Args* args) -> XLA_FFI_Error* {
      args->run_id = Context::Of(args->ctx).run_id;
      return nullptr;
    };
    return made;
  }();
  return &api;
}

// Attributes of a custom call.
class Attributes {
 public:
  void Set(const std::string& name, int64_t value) { integers_[name] = value; }
  void Set(const std::string& name, std::string value) { strings_[name] = std::move(value); }
  void Set(const std::string& name, std::vector<int64_t> value) {
    arrays_[name] = std::move(value);
  }

  // Good while this is not changed.
  XLA_FFI_Attrs Frame() {
    types_.clear();
    names_.clear();
    values_.clear();
    spans_.clear();
    scalars_.clear();
    lists_.clear();
    std::map<std::string, std::pair<XLA_FFI_AttrType, void*>> sorted;
    for (auto& [name, value] : integers_) {
      scalars_.push_back({XLA_FFI_DataType_S64, &value});
      sorted[name] = {XLA_FFI_AttrType_SCALAR, &scalars_.back()};
    }
    for (auto& [name, value] : strings_) {
      spans_.push_back({value.data(), value.size()});
      sorted[name] = {XLA_FFI_AttrType_STRING, &spans_.back()};
    }
    for (auto& [name, value] : arrays_) {
      lists_.push_back({XLA_FFI_DataType_S64, value.size(), value.data()});
      sorted[name] = {XLA_FFI_AttrType_ARRAY, &lists_.back()};
    }
    for (auto& [name, value] : sorted) {
      const auto& own = *(integers_.count(name) != 0  ? &integers_.find(name)->first
                          : strings_.count(name) != 0 ? &strings_.find(name)->first
                                                      : &arrays_.find(name)->first);
      spans_.push_back({own.data(), own.size()});
      names_.push_back(&spans_.back());
      types_.push_back(value.first);
      values_.push_back(value.second);
    }
    return {XLA_FFI_Attrs_STRUCT_SIZE,
            nullptr,
            static_cast<int64_t>(names_.size()),
            types_.data(),
            names_.data(),
            values_.data()};
  }

 private:
  std::map<std::string, int64_t> integers_;
  std::map<std::string, std::string> strings_;
  std::map<std::string, std::vector<int64_t>> arrays_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<void*> values_;
  std::deque<XLA_FFI_ByteSpan> spans_;
  std::deque<XLA_FFI_Scalar> scalars_;
  std::deque<XLA_FFI_Array> lists_;
};

struct Array {
  XLA_FFI_DataType dtype;
  void* data;
  std::vector<int64_t> dims;
};

// Where and when a program runs.
struct Launch {
  int ordinal = 0;
  int64_t id = 0;
  void* stream = nullptr;
};

// One custom call of an executable.
class CustomCall {
 public:
  // `error`: "" or why it cannot be instantiated.
  CustomCall(const TargetHandlers& target, const XLA_FFI_TypeInfo& type, Attributes attributes,
             std::string* error)
      : target_(target), type_(type), attributes_(std::move(attributes)) {
    Context context;
    XLA_FFI_CallFrame frame = MakeFrame(&context, XLA_FFI_ExecutionStage_INSTANTIATE);
    frame.attrs = attributes_.Frame();
    *error = Message(target_.instantiate(&frame));
    state_ = context.state;
  }
  ~CustomCall() {
    if (state_ != nullptr) type_.deleter(state_);
  }
  CustomCall(const CustomCall&) = delete;
  CustomCall& operator=(const CustomCall&) = delete;

  // "" or the error.
  std::string Execute(const Launch& launch, std::vector<Array> operands, Array result) {
    Context context;
    context.state = state_;
    context.ordinal = launch.ordinal;
    context.run_id = launch.id;
    context.stream = launch.stream;
    XLA_FFI_CallFrame frame = MakeFrame(&context, XLA_FFI_ExecutionStage_EXECUTE);
    std::deque<XLA_FFI_Buffer> buffers;
    std::vector<void*> pointers;
    const auto add = [&](Array& array) {
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, array.dtype, array.data,
                         static_cast<int64_t>(array.dims.size()), array.dims.data()});
      pointers.push_back(&buffers.back());
    };
    for (Array& operand : operands) add(operand);
    add(result);
    std::vector<XLA_FFI_ArgType> types(operands.size(), XLA_FFI_ArgType_BUFFER);
    XLA_FFI_RetType result_type = XLA_FFI_RetType_BUFFER;
    frame.args.size = static_cast<int64_t>(operands.size());
    frame.args.types = types.data();
    frame.args.args = pointers.data();
    frame.rets.size = 1;
    frame.rets.types = &result_type;
    frame.rets.rets = &pointers.back();
    const std::string message = Message(target_.execute(&frame));
    // A GPU's handler that leaves a future would block the host.
    return frame.future == nullptr ? message : "it left a future";
  }

 private:
  static XLA_FFI_CallFrame MakeFrame(Context* context, XLA_FFI_ExecutionStage stage) {
    XLA_FFI_CallFrame frame = {};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = FakeApi();
    frame.ctx = context->opaque();
    frame.stage = stage;
    frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
    frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
    frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
    return frame;
  }
  static std::string Message(XLA_FFI_Error* error) {
    const std::unique_ptr<XLA_FFI_Error> owner(error);
    return error != nullptr ? error->message : "";
  }

  const TargetHandlers& target_;
  const XLA_FFI_TypeInfo& type_;
  Attributes attributes_;
  void* state_ = nullptr;
};

}  // namespace testing
}  // namespace dfccl

#endif  // DFCCL_TESTS_XLA_FFI_FAKE_XLA_H_
