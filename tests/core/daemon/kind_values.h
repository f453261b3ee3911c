// SPDX-License-Identifier: Apache-2.0
// What every member of a collective of any kind sends, and what it must get: values that
// depend on member, position and instance. Without GoogleTest, which is not everywhere
// where there is a GPU.
#ifndef DFCCL_TESTS_CORE_DAEMON_KIND_VALUES_H_
#define DFCCL_TESTS_CORE_DAEMON_KIND_VALUES_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/collective.h"
#include "core/group.h"
#include "core/runtime.h"

namespace dfccl {
namespace testing {

[[noreturn]] inline void NoValues(const char* of) {
  std::fprintf(stderr, "kind_values.h has no values for %s\n", of);
  std::abort();
}

// Small integers: sums are exact in any order.
inline float Value(int64_t device, int64_t position, uint64_t instance) {
  return static_cast<float>(
      (device * 31 + position * 7 + static_cast<int64_t>(instance % 1009) * 3) % 97);
}

constexpr int64_t kZero = -1;  // in lists of values: an element of zero bytes

// An element that stands for `value`: a number where it is folded, else bytes that
// are no valid bool and differ in every byte of the element.
inline void Encode(const Signature& signature, int64_t value, char* element) {
  const int64_t size = DTypeSize(signature.dtype);
  std::memset(element, 0, size);
  if (value == kZero) return;
  if (!Folds(signature.kind)) {
    for (int64_t i = 0; i < size; ++i) element[i] = static_cast<char>(value * 7 + i * 29 + 3);
    return;
  }
  const auto number = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  switch (signature.dtype) {
    case DType::kBool:
      element[0] = static_cast<char>(value % 2);
      return;
    case DType::kS32:
      std::memcpy(element, &value, size);  // little-endian
      return;
    case DType::kF32:
      std::memcpy(element, &bits, size);
      return;
    case DType::kBF16:
      bits >>= 16;
      std::memcpy(element, &bits, size);
      return;
    default:
      NoValues(DTypeName(signature.dtype));
  }
}

inline int64_t Fold(const Signature& signature, int64_t a, int64_t b) {
  switch (signature.op) {
    case ReduceOp::kSum:
      return a + b;
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kXor:
      return a ^ b;
    default:
      NoValues(ReduceOpName(signature.op));
  }
}

struct Call {
  const Group* group = nullptr;
  uint64_t number = 0;
  Signature signature;

  int members() const { return group->size(); }
  CollectiveId id() const { return {number * 0x9e3779b97f4a7c15u, number}; }
  Submission MakeSubmission(int member, const void* source, void* result) const {
    Submission submission;
    submission.device = group->members[member];
    submission.group = group;
    submission.member = member;
    submission.id = id();
    submission.signature = signature;
    submission.source = source;
    submission.result = result;
    return submission;
  }
  std::string Text(int member) const {
    return std::string(KindName(signature.kind)) + " of " + std::to_string(signature.count) + " " +
           DTypeName(signature.dtype) + ", member " + std::to_string(member) + " of " +
           std::to_string(members()) + ", root " + std::to_string(signature.root);
  }
  int64_t Source(int member, int64_t block, int64_t i) const {
    return static_cast<int64_t>(Value(group->members[member], block * signature.count + i, number));
  }
  int64_t Folded(int end, int64_t block, int64_t i) const {
    int64_t value = Source(0, block, i);
    for (int p = 1; p < end; ++p) value = Fold(signature, value, Source(p, block, i));
    return value;
  }
  // Element i of a block of a member's result.
  int64_t Expected(int member, int64_t block, int64_t i) const {
    const int p = static_cast<int>(block);
    const bool is_root = member == signature.root;
    switch (signature.kind) {
      case Kind::kAllReduce:
        return Folded(members(), 0, i);
      case Kind::kAllGather:
        return Source(p, 0, i);
      case Kind::kReduceScatter:
        return Folded(members(), member, i);
      case Kind::kAllToAll:
        return Source(p, member, i);
      case Kind::kPermute:
        for (const auto& [from, to] : signature.pairs->list) {
          if (to == member) return Source(from, 0, i);
        }
        return kZero;
      case Kind::kBroadcast:
        return Source(signature.root, 0, i);
      case Kind::kReduce:
        return is_root ? Folded(members(), 0, i) : kZero;
      case Kind::kGather:
        return is_root ? Source(p, 0, i) : kZero;
      case Kind::kScatter:
        return Source(signature.root, member, i);
      case Kind::kScan:
        return Folded(member + 1, 0, i);
      case Kind::kExscan:
        return member == 0 ? kZero : Folded(member, 0, i);
      case Kind::kBarrier:
        return Source(member, 0, i);
      case Kind::kRaggedAllToAll:
        break;
    }
    return kZero;
  }

  int64_t SourceElements() const {
    return SourceBlocks(signature.kind, members()) * signature.count;
  }
  int64_t ResultElements() const {
    return ResultBlocks(signature.kind, members()) * signature.count;
  }
  void FillSource(int member, char* source) const {
    const int64_t size = DTypeSize(signature.dtype);
    for (int64_t i = 0; i < SourceElements(); ++i) {
      Encode(signature, Source(member, i / signature.count, i % signature.count),
             source + i * size);
    }
  }
  // The first element of a member's result that is not what it must be; -1: none.
  int64_t FirstWrong(int member, const char* result) const {
    const int64_t size = DTypeSize(signature.dtype);
    char expected[16];
    for (int64_t i = 0; i < ResultElements(); ++i) {
      Encode(signature, Expected(member, i / signature.count, i % signature.count), expected);
      if (std::memcmp(result + i * size, expected, size) != 0) return i;
    }
    return -1;
  }
};

// With a root, pairs, type and operation at random, where the kind has them.
inline Call MakeCall(Kind kind, const std::vector<int64_t>& devices, int64_t count,
                     std::mt19937* random) {
  static std::atomic<uint64_t> next{1};
  Call call;
  call.group = InternGroup(devices);
  call.number = next++;
  call.signature.kind = kind;
  call.signature.count = count;
  const int n = call.members();
  if (HasRoot(kind)) call.signature.root = static_cast<int>((*random)() % n);
  if (kind == Kind::kPermute) {
    std::vector<int> targets(n);
    for (int i = 0; i < n; ++i) targets[i] = i;
    std::shuffle(targets.begin(), targets.end(), *random);
    std::vector<std::pair<int, int>> pairs;
    for (int i = 0; i < n; ++i) {
      if ((*random)() % 4 != 0) pairs.emplace_back(i, targets[i]);
    }
    call.signature.pairs = InternPairs(pairs);
  }
  if (Folds(kind)) {
    const std::pair<DType, ReduceOp> folds[] = {{DType::kF32, ReduceOp::kSum},
                                                {DType::kS32, ReduceOp::kSum},
                                                {DType::kBF16, ReduceOp::kMax},
                                                {DType::kBool, ReduceOp::kXor}};
    std::tie(call.signature.dtype, call.signature.op) = folds[(*random)() % 4];
  } else {
    const DType types[] = {DType::kBool, DType::kF8E5M2, DType::kBF16,
                           DType::kF32,  DType::kS64,    DType::kC128};
    call.signature.dtype = types[(*random)() % 6];
  }
  return call;
}

}  // namespace testing
}  // namespace dfccl

#endif  // DFCCL_TESTS_CORE_DAEMON_KIND_VALUES_H_
