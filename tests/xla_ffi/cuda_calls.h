// SPDX-License-Identifier: Apache-2.0
// Custom calls of the CUDA platform and their members' buffers, on the GPUs of the stand-in
// for the driver (DFCCL_DRIVER_STAND_IN).
#ifndef DFCCL_TESTS_XLA_FFI_CUDA_CALLS_H_
#define DFCCL_TESTS_XLA_FFI_CUDA_CALLS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/core/daemon/kind_values.h"
#include "tests/xla_ffi/fake_xla.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/handlers.h"

namespace dfccl {
namespace testing {

constexpr char kImage[] = "a kernel";
// Ids of the devices on the stand-in's two GPUs; others are members that a program runs
// beside its own.
constexpr int64_t kFirst = 100;

inline CudaOptions SmallOptions() {
  CudaOptions options;
  options.driver = {DFCCL_DRIVER_STAND_IN, kImage};
  options.service.blocks = 2;
  options.service.tasks_of_a_block = 256;
  options.service.lane_bytes = 4096;
  options.service.quit_polls = 50;
  options.service.memory_bytes = size_t{8} << 20;
  options.service.timeout_ns = 60'000'000'000;
  options.devices = {{1, kFirst + 1}, {0, kFirst}};
  return options;
}

inline XLA_FFI_DataType TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return XLA_FFI_DataType_PRED;
    case DType::kF8E5M2:
      return XLA_FFI_DataType_F8E5M2;
    case DType::kBF16:
      return XLA_FFI_DataType_BF16;
    case DType::kF32:
      return XLA_FFI_DataType_F32;
    case DType::kS32:
      return XLA_FFI_DataType_S32;
    case DType::kS64:
      return XLA_FFI_DataType_S64;
    case DType::kC128:
      return XLA_FFI_DataType_C128;
    default:
      return XLA_FFI_DataType_INVALID;
  }
}

inline Attributes MakeAttributes(const Call& call, int64_t site, const std::string& name) {
  Attributes attributes;
  const Signature& signature = call.signature;
  std::vector<int64_t> pairs, positions;
  if (signature.pairs != nullptr) {
    for (const auto& [from, to] : signature.pairs->list) {
      pairs.push_back(from);
      pairs.push_back(to);
    }
  }
  for (int i = 0; i < call.members(); ++i) positions.push_back(i);
  attributes.Set("kind", std::string(KindName(signature.kind)));
  attributes.Set("op", std::string(Folds(signature.kind) ? ReduceOpName(signature.op) : ""));
  attributes.Set("root", int64_t{signature.root});
  attributes.Set("pairs", pairs);
  attributes.Set("groups", positions);
  attributes.Set("group_sizes", std::vector<int64_t>{call.members()});
  attributes.Set("members", std::vector<int64_t>{});
  attributes.Set("devices", call.group->members);
  attributes.Set("name", name);
  attributes.Set("has_key", int64_t{0});
  attributes.Set("closed", int64_t{0});
  attributes.Set("priority", int64_t{0});
  attributes.Set("timeout_us", int64_t{0});
  attributes.Set("program", int64_t{4711});
  attributes.Set("site", site);
  attributes.Set("as_device", int64_t{-1});
  attributes.Set("acts", int64_t{-1});
  attributes.Set("shape", int64_t{0});
  attributes.Set("stage", int64_t{0});
  attributes.Set("has_tag", int64_t{0});
  attributes.Set("detached", int64_t{0});
  return attributes;
}

// In the order of CudaTargets().
enum CudaTarget { kSingle, kStart, kDone, kHandleStart, kHandleWait };

inline std::unique_ptr<CustomCall> Make(CudaTarget target, const Attributes& attributes) {
  std::string error;
  auto call = std::make_unique<CustomCall>(CudaTargets()[target], CudaCallState::type_info,
                                           attributes, &error);
  EXPECT_EQ(error, "");
  return call;
}

// A member's buffers.
struct Member {
  Member(const Call& call, int member)
      : call(call),
        member(member),
        source(call.SourceElements() * DTypeSize(call.signature.dtype)),
        result(call.ResultElements() * DTypeSize(call.signature.dtype), '\x5a') {
    call.FillSource(member, source.data());
  }
  Array Source() { return {TypeOf(call.signature.dtype), source.data(), {call.SourceElements()}}; }
  Array Result() { return {TypeOf(call.signature.dtype), result.data(), {call.ResultElements()}}; }
  Array Ticket() { return {XLA_FFI_DataType_U64, &ticket, {1}}; }
  void Check() const { EXPECT_EQ(call.FirstWrong(member, result.data()), -1) << call.Text(member); }

  const Call call;
  const int member;
  std::vector<char> source, result;
  uint64_t ticket = 0;
};

}  // namespace testing
}  // namespace dfccl

#endif  // DFCCL_TESTS_XLA_FFI_CUDA_CALLS_H_
