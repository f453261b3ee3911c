// SPDX-License-Identifier: Apache-2.0
// Names and sizes of the plain values in collective.h.
#include "core/collective.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "core/hash.h"

namespace dfccl {

const Pairs* InternPairs(std::vector<std::pair<int, int>> list) {
  struct Table {
    std::mutex mutex;
    std::map<std::vector<std::pair<int, int>>, std::unique_ptr<Pairs>> pairs;
  };
  // Leaked: call sites may outlive static destructors.
  static Table& table = *new Table;
  std::sort(list.begin(), list.end());
  std::lock_guard<std::mutex> lock(table.mutex);
  std::unique_ptr<Pairs>& pairs = table.pairs[list];
  if (pairs == nullptr) {
    Hash128 hash;
    hash.Add(list.size());
    for (const auto& [source, target] : list) {
      hash.Add(static_cast<uint64_t>(source)).Add(static_cast<uint64_t>(target));
    }
    pairs = std::make_unique<Pairs>(Pairs{std::move(list), hash.hi});
  }
  return pairs.get();
}

bool Folds(Kind kind) {
  switch (kind) {
    case Kind::kAllReduce:
    case Kind::kReduceScatter:
    case Kind::kReduce:
    case Kind::kScan:
    case Kind::kExscan:
      return true;
    default:
      return false;
  }
}

bool HasRoot(Kind kind) {
  return kind == Kind::kBroadcast || kind == Kind::kReduce || kind == Kind::kGather ||
         kind == Kind::kScatter;
}

int64_t SourceBlocks(Kind kind, int members) {
  return kind == Kind::kReduceScatter || kind == Kind::kAllToAll || kind == Kind::kScatter ? members
                                                                                           : 1;
}

int64_t ResultBlocks(Kind kind, int members) {
  return kind == Kind::kAllGather || kind == Kind::kAllToAll || kind == Kind::kGather ? members : 1;
}

bool IsTogether(Kind kind, bool across) {
  switch (kind) {
    case Kind::kPermute:
    case Kind::kBroadcast:
    case Kind::kGather:
    case Kind::kScatter:
      return false;
    case Kind::kScan:
    case Kind::kExscan:
      return across;
    default:
      return true;
  }
}

bool Needs(const Signature& signature, int members, int member, int peer, bool across) {
  if (member == peer || IsTogether(signature.kind, across)) return true;
  switch (signature.kind) {
    case Kind::kBroadcast:
    case Kind::kGather:
    case Kind::kScatter:
      return member == signature.root || peer == signature.root;
    case Kind::kPermute:
      return std::any_of(signature.pairs->list.begin(), signature.pairs->list.end(),
                         [=](const std::pair<int, int>& pair) {
                           return pair == std::pair(member, peer) ||
                                  pair == std::pair(peer, member);
                         });
    case Kind::kScan:
    case Kind::kExscan:
      return peer < std::min(member + 2, members);
    default:
      return true;
  }
}

const char* KindName(Kind kind) {
  switch (kind) {
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kAllGather:
      return "all_gather";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kAllToAll:
      return "all_to_all";
    case Kind::kPermute:
      return "permute";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kReduce:
      return "reduce";
    case Kind::kGather:
      return "gather";
    case Kind::kScatter:
      return "scatter";
    case Kind::kScan:
      return "scan";
    case Kind::kExscan:
      return "exscan";
    case Kind::kBarrier:
      return "barrier";
    case Kind::kRaggedAllToAll:
      return "ragged_all_to_all";
  }
  return "unknown";
}

const char* ReduceOpName(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMean:
      return "mean";
    case ReduceOp::kProd:
      return "prod";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kAnd:
      return "and";
    case ReduceOp::kOr:
      return "or";
    case ReduceOp::kXor:
      return "xor";
  }
  return "unknown";
}

const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return "bool";
    case DType::kS8:
      return "int8";
    case DType::kS16:
      return "int16";
    case DType::kS32:
      return "int32";
    case DType::kS64:
      return "int64";
    case DType::kU8:
      return "uint8";
    case DType::kU16:
      return "uint16";
    case DType::kU32:
      return "uint32";
    case DType::kU64:
      return "uint64";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF32:
      return "float32";
    case DType::kF64:
      return "float64";
    case DType::kC64:
      return "complex64";
    case DType::kC128:
      return "complex128";
    case DType::kF8E3M4:
      return "float8_e3m4";
    case DType::kF8E4M3:
      return "float8_e4m3";
    case DType::kF8E4M3FN:
      return "float8_e4m3fn";
    case DType::kF8E4M3FNUZ:
      return "float8_e4m3fnuz";
    case DType::kF8E4M3B11FNUZ:
      return "float8_e4m3b11fnuz";
    case DType::kF8E5M2:
      return "float8_e5m2";
    case DType::kF8E5M2FNUZ:
      return "float8_e5m2fnuz";
    case DType::kF8E8M0FNU:
      return "float8_e8m0fnu";
  }
  return "unknown";
}

int64_t DTypeSize(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kS8:
    case DType::kU8:
    case DType::kF8E3M4:
    case DType::kF8E4M3:
    case DType::kF8E4M3FN:
    case DType::kF8E4M3FNUZ:
    case DType::kF8E4M3B11FNUZ:
    case DType::kF8E5M2:
    case DType::kF8E5M2FNUZ:
    case DType::kF8E8M0FNU:
      return 1;
    case DType::kS16:
    case DType::kU16:
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kS32:
    case DType::kU32:
    case DType::kF32:
      return 4;
    case DType::kS64:
    case DType::kU64:
    case DType::kF64:
    case DType::kC64:
      return 8;
    case DType::kC128:
      return 16;
  }
  return 0;
}

}  // namespace dfccl
