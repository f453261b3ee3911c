// SPDX-License-Identifier: Apache-2.0
// What a collective is: its kind, operator, element type, identity and
// signature. Plain values, used by every layer above core/protocol.
#ifndef DFCCL_CORE_COLLECTIVE_H_
#define DFCCL_CORE_COLLECTIVE_H_

#include <cstdint>

namespace dfccl {

enum class Kind : uint8_t { kAllReduce = 0 };

enum class ReduceOp : uint8_t {
  kSum = 0,
  kMean,  // floating and complex types only; divides in the accumulation type
  kProd,
  kMin,  // NaN wins, as in lax.pmin
  kMax,  // NaN wins, as in lax.pmax
  kAnd,  // bitwise on integers, logical on bool
  kOr,
  kXor,
};

// Element types as they lie in memory. Sub-byte integers never reach the core:
// the lowering widens them to 8 bits (exact for every operator modulo 2^bits).
enum class DType : uint8_t {
  kBool = 0,
  kS8,
  kS16,
  kS32,
  kS64,
  kU8,
  kU16,
  kU32,
  kU64,
  kF16,
  kBF16,
  kF32,
  kF64,
  kC64,
  kC128,
  kF8E3M4,
  kF8E4M3,
  kF8E4M3FN,
  kF8E4M3FNUZ,
  kF8E4M3B11FNUZ,
  kF8E5M2,
  kF8E5M2FNUZ,
  kF8E8M0FNU,
};

// Identity of one collective instance: a hash of everything that must be equal
// on its members and different from every other instance (core/identity.h).
struct CollectiveId {
  uint64_t hi = 0;
  uint64_t lo = 0;
  bool operator==(const CollectiveId& other) const { return hi == other.hi && lo == other.lo; }
  bool operator!=(const CollectiveId& other) const { return !(*this == other); }
};

// What members must agree on, checked on every match before data moves.
struct Signature {
  Kind kind = Kind::kAllReduce;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kF32;
  int64_t count = 0;  // elements on each member
  bool operator==(const Signature& other) const {
    return kind == other.kind && op == other.op && dtype == other.dtype && count == other.count;
  }
  bool operator!=(const Signature& other) const { return !(*this == other); }
};

const char* KindName(Kind kind);
const char* ReduceOpName(ReduceOp op);
const char* DTypeName(DType dtype);  // NumPy/ml_dtypes spelling: "float32", "bfloat16", ...
int64_t DTypeSize(DType dtype);      // bytes

}  // namespace dfccl

#endif  // DFCCL_CORE_COLLECTIVE_H_
