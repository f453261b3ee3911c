// SPDX-License-Identifier: Apache-2.0
// What a collective is: its kind, operator, element type, identity and
// signature. Plain values, used by every layer above core/protocol.
#ifndef DFCCL_CORE_COLLECTIVE_H_
#define DFCCL_CORE_COLLECTIVE_H_

#include <cstdint>
#include <utility>
#include <vector>

namespace dfccl {

// What moves, for `count` elements, member r of n (block b of an array of n*count
// elements is [b*count, (b+1)*count)):
enum class Kind : uint8_t {
  kAllReduce = 0,  // the fold of all sources
  kAllGather,      // block p is source p
  kReduceScatter,  // the fold of block r of all sources
  kAllToAll,       // block p is block r of source p
  kPermute,        // source p if (p, r) is among the pairs, else zeros
  kBroadcast,      // the root's source
  kReduce,         // on the root the fold of all sources, elsewhere zeros
  kGather,         // on the root block p is source p, elsewhere zeros
  kScatter,        // block r of the root's source
  kScan,           // the fold of sources 0 to r
  kExscan,         // the fold of sources 0 to r-1; zeros on member 0
  kBarrier,        // its own source, once all have come
  // Rows of `count` elements: those that index arrays of the members name, from
  // source p to result r, whose others stay as they were.
  kRaggedAllToAll,
};
constexpr int kKindCount = 13;

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

// Who sends to whom in a permute.
struct Pairs {
  std::vector<std::pair<int, int>> list;  // (source, target), by source
  uint64_t hash = 0;                      // equal in every process
};

// The one Pairs with these entries in this process, in whatever order they come.
// Thread-safe; never freed.
const Pairs* InternPairs(std::vector<std::pair<int, int>> list);

// What members must agree on, checked on every match before data moves.
struct Signature {
  Kind kind = Kind::kAllReduce;
  ReduceOp op = ReduceOp::kSum;  // read for kinds that fold
  DType dtype = DType::kF32;
  int64_t count = 0;             // elements; see Kind
  int root = 0;                  // for kinds that have one
  const Pairs* pairs = nullptr;  // for kPermute
  uint64_t shape = 0;            // a hash of the operand's, where that must be equal; else 0
  bool operator==(const Signature& other) const {
    return kind == other.kind && op == other.op && dtype == other.dtype && count == other.count &&
           root == other.root && pairs == other.pairs && shape == other.shape;
  }
  bool operator!=(const Signature& other) const { return !(*this == other); }
};

bool Folds(Kind kind);    // it has an operator; the other kinds only move data
bool HasRoot(Kind kind);  // one member is special

// Blocks of `count` elements that a member's source and result have in a group
// of `members`; for kRaggedAllToAll these are members' to choose.
int64_t SourceBlocks(Kind kind, int members);
int64_t ResultBlocks(Kind kind, int members);

// Whether `member` of `members` cannot finish before `peer` has come: everyone for
// kinds in which everyone needs everyone, else those whose data it wants and those
// who want its data. Scans `across` processes are of the former.
bool Needs(const Signature& signature, int members, int member, int peer, bool across);
// Everyone needs everyone.
bool IsTogether(Kind kind, bool across);

const char* KindName(Kind kind);
const char* ReduceOpName(ReduceOp op);
const char* DTypeName(DType dtype);  // NumPy/ml_dtypes spelling: "float32", "bfloat16", ...
int64_t DTypeSize(DType dtype);      // bytes

}  // namespace dfccl

#endif  // DFCCL_CORE_COLLECTIVE_H_
