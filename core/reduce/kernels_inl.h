// SPDX-License-Identifier: Apache-2.0
// Body of the kernels. Included once by each kernels_<set>.cc, which defines
//   DFCCL_KERNELS       name of the Kernels object it makes,
//   DFCCL_KERNELS_NAME  its name as a string,
//   kVectorBytes        width of a vector register,
//   StoreStreaming()    non-temporal store of one aligned register,
// and turns its instruction set on. Everything here has internal linkage and
// calls no library function, so that no code for a newer CPU leaks out of its
// set through the linker.

#include "core/reduce/kernels.h"
#include "core/reduce/narrow.h"

#define DFCCL_INLINE inline __attribute__((always_inline))

namespace dfccl {
namespace {

template <typename T, int kBytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kBytes)));
};
template <typename T, int kBytes>
using Vector = typename VectorOf<T, kBytes>::Type;

template <typename V>
DFCCL_INLINE V Load(const void* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof(V));
  return value;
}
template <typename V>
DFCCL_INLINE void Store(void* to, V value) {
  __builtin_memcpy(to, &value, sizeof(V));
}

// Operators. `Lane` is the lane type, `kElementBytes` the smallest piece that
// may be folded alone. Prepare() is applied to each source, Finish() to the value.
template <typename T>
struct Operator {
  using Lane = T;
  static constexpr int kElementBytes = sizeof(T);
  DFCCL_INLINE void Start(const FoldArgs&) {}
  template <typename V>
  DFCCL_INLINE V Prepare(V a) const {
    return a;
  }
  template <typename V>
  DFCCL_INLINE V Finish(V a) const {
    return a;
  }
};

template <typename T>
struct Sum : Operator<T> {
  template <typename V>
  DFCCL_INLINE V Apply(V a, V b) const {
    return a + b;
  }
};

template <typename T>
struct Mean : Sum<T> {
  T divisor;
  DFCCL_INLINE void Start(const FoldArgs& args) { divisor = static_cast<T>(args.mean_divisor); }
  template <typename V>
  DFCCL_INLINE V Finish(V a) const {
    return a / divisor;
  }
};

template <typename T>
struct Prod : Operator<T> {
  template <typename V>
  DFCCL_INLINE V Apply(V a, V b) const {
    return a * b;
  }
};

template <typename T>
struct IntMin : Operator<T> {
  template <typename V>
  DFCCL_INLINE V Apply(V a, V b) const {
    return a < b ? a : b;
  }
};

template <typename T>
struct IntMax : Operator<T> {
  template <typename V>
  DFCCL_INLINE V Apply(V a, V b) const {
    return a > b ? a : b;
  }
};

// Both orders of the comparison differ only for NaN, where each gives the other
// operand, and for zeros of either sign. Or-ing them keeps NaN and minus.
template <typename T>
struct FloatMin : Operator<T> {
  template <typename V>
  DFCCL_INLINE V Apply(V a, V b) const {
    using Bits = decltype(a < b);
    const V ab = a < b ? a : b;
    const V ba = b < a ? b : a;
    return (V)((Bits)ab | (Bits)ba);
  }
};

// And-ing keeps plus, but not NaN.
template <typename T>
struct FloatMax : Operator<T> {
  template <typename V>
  DFCCL_INLINE V Apply(V a, V b) const {
    using Bits = decltype(a < b);
    const V ab = a > b ? a : b;
    const V ba = b > a ? b : a;
    return (V)(((Bits)ab & (Bits)ba) | (a != a) | (b != b));
  }
};

// Keeps GCC from fusing a product with a later addition, which changes bits: it
// matches fused complex patterns even with contraction off.
template <typename V>
DFCCL_INLINE void KeepRounded([[maybe_unused]] V& value) {
#if defined(__clang__)
#elif defined(__x86_64__)
  __asm__("" : "+v"(value));
#elif defined(__aarch64__)
  __asm__("" : "+w"(value));
#else
  __asm__("" : "+m"(value));
#endif
}

// The textbook formula, without recovery of infinities from NaN.
template <typename T>
struct ComplexProd : Operator<T> {
  static constexpr int kElementBytes = 2 * sizeof(T);
  template <typename V>
  DFCCL_INLINE V Apply(V a, V b) const {
    V real, imaginary, swapped, signs;
    for (unsigned i = 0; i < sizeof(V) / sizeof(T); i += 2) {
      real[i] = real[i + 1] = a[i];
      imaginary[i] = imaginary[i + 1] = a[i + 1];
      swapped[i] = b[i + 1];
      swapped[i + 1] = b[i];
      signs[i] = -1;
      signs[i + 1] = 1;
    }
    V direct = real * b;
    V cross = imaginary * swapped;
    KeepRounded(direct);
    KeepRounded(cross);
    return direct + signs * cross;
  }
};

struct BitAnd : Operator<uint8_t> {
  template <typename V>
  DFCCL_INLINE V Apply(V a, V b) const {
    return a & b;
  }
};
struct BitOr : Operator<uint8_t> {
  template <typename V>
  DFCCL_INLINE V Apply(V a, V b) const {
    return a | b;
  }
};
struct BitXor : Operator<uint8_t> {
  template <typename V>
  DFCCL_INLINE V Apply(V a, V b) const {
    return a ^ b;
  }
};

// Any byte but zero is true; the result is 0 or 1.
template <typename BitOperator>
struct Logical : BitOperator {
  template <typename V>
  DFCCL_INLINE V Prepare(V a) const {
    return (V)(a != 0) & 1;
  }
};

// Folds kUnroll vectors of kBytes at byte `at`.
template <int kBytes, int kUnroll, bool kStreaming, typename Op>
DFCCL_INLINE void FoldVectors(const Op& op, const FoldArgs& args, int64_t at) {
  using V = Vector<typename Op::Lane, kBytes>;
  V value[kUnroll];
  const char* source = static_cast<const char*>(args.sources[0].data) + at;
  for (int u = 0; u < kUnroll; ++u) value[u] = op.Prepare(Load<V>(source + u * kBytes));
  for (int s = 1; s < args.source_count; ++s) {
    source = static_cast<const char*>(args.sources[s].data) + at;
    for (int u = 0; u < kUnroll; ++u) {
      value[u] = op.Apply(value[u], op.Prepare(Load<V>(source + u * kBytes)));
    }
  }
  for (int u = 0; u < kUnroll; ++u) value[u] = op.Finish(value[u]);
  for (int d = 0; d < args.destination_count; ++d) {
    char* destination = static_cast<char*>(args.destinations[d].data) + at;
    for (int u = 0; u < kUnroll; ++u) {
      if constexpr (kStreaming) {
        StoreStreaming(destination + u * kBytes, (StreamedVector)value[u]);
      } else {
        Store(destination + u * kBytes, value[u]);
      }
    }
  }
}

// Folds less than 2 * kBytes in ever smaller vectors.
template <int kBytes, typename Op>
DFCCL_INLINE void FoldTail(const Op& op, const FoldArgs& args, int64_t at, int64_t end) {
  if (end - at >= kBytes) {
    FoldVectors<kBytes, 1, false>(op, args, at);
    at += kBytes;
  }
  if constexpr (kBytes > Op::kElementBytes) {
    if (at != end) FoldTail<kBytes / 2>(op, args, at, end);
  }
}

// Folds a range of any length with normal stores.
template <typename Op>
DFCCL_INLINE void FoldRange(const Op& op, const FoldArgs& args, int64_t at, int64_t end) {
  for (; at + kVectorBytes <= end; at += kVectorBytes) {
    FoldVectors<kVectorBytes, 1, false>(op, args, at);
  }
  if constexpr (kVectorBytes > Op::kElementBytes) {
    if (at != end) FoldTail<kVectorBytes / 2>(op, args, at, end);
  }
}

constexpr int kUnroll = kVectorBytes >= 64 ? 4 : 8;

// Bytes before the first multiple of the cache line in every destination, or -1
// if they aren't aligned alike or an element lies across the boundary.
DFCCL_INLINE int64_t StreamingHead(const FoldArgs& args, int element_bytes) {
  const uintptr_t line = 64;
  const uintptr_t offset = reinterpret_cast<uintptr_t>(args.destinations[0].data) % line;
  for (int d = 1; d < args.destination_count; ++d) {
    if (reinterpret_cast<uintptr_t>(args.destinations[d].data) % line != offset) return -1;
  }
  const int64_t head = (line - offset) % line;
  return head % element_bytes == 0 ? head : -1;
}

template <typename Op>
void Fold(const FoldArgs& args) {
  Op op;
  op.Start(args);
  constexpr int64_t kStride = kVectorBytes * kUnroll;
  const int64_t end = args.bytes;
  int64_t at = 0;
  if (args.streaming && end >= kStride) {
    const int64_t head = StreamingHead(args, Op::kElementBytes);
    if (head >= 0) {
      FoldRange(op, args, 0, head);
      at = head;
      for (; at + kStride <= end; at += kStride) {
        FoldVectors<kVectorBytes, kUnroll, true>(op, args, at);
      }
    }
  }
  for (; at + kStride <= end; at += kStride) {
    FoldVectors<kVectorBytes, kUnroll, false>(op, args, at);
  }
  FoldRange(op, args, at, end);
}

// Sum, product and bits of signed integers are those of unsigned ones, which wrap.
template <typename T, typename Unsigned>
FoldFunction IntFold(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return Fold<Sum<Unsigned>>;
    case ReduceOp::kProd:
      return Fold<Prod<Unsigned>>;
    case ReduceOp::kMin:
      return Fold<IntMin<T>>;
    case ReduceOp::kMax:
      return Fold<IntMax<T>>;
    case ReduceOp::kAnd:
      return Fold<BitAnd>;
    case ReduceOp::kOr:
      return Fold<BitOr>;
    case ReduceOp::kXor:
      return Fold<BitXor>;
    case ReduceOp::kMean:
      break;
  }
  return nullptr;
}

template <typename T>
FoldFunction FloatFold(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return Fold<Sum<T>>;
    case ReduceOp::kMean:
      return Fold<Mean<T>>;
    case ReduceOp::kProd:
      return Fold<Prod<T>>;
    case ReduceOp::kMin:
      return Fold<FloatMin<T>>;
    case ReduceOp::kMax:
      return Fold<FloatMax<T>>;
    default:
      return nullptr;
  }
}

template <typename T>
FoldFunction ComplexFold(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return Fold<Sum<T>>;
    case ReduceOp::kMean:
      return Fold<Mean<T>>;
    case ReduceOp::kProd:
      return Fold<ComplexProd<T>>;
    default:
      return nullptr;
  }
}

FoldFunction BoolFold(ReduceOp op) {
  switch (op) {
    case ReduceOp::kAnd:
    case ReduceOp::kMin:
      return Fold<Logical<BitAnd>>;
    case ReduceOp::kOr:
    case ReduceOp::kMax:
      return Fold<Logical<BitOr>>;
    case ReduceOp::kXor:
      return Fold<Logical<BitXor>>;
    default:
      return nullptr;
  }
}

FoldFunction FindFold(ReduceOp op, DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return BoolFold(op);
    case DType::kS8:
      return IntFold<int8_t, uint8_t>(op);
    case DType::kS16:
      return IntFold<int16_t, uint16_t>(op);
    case DType::kS32:
      return IntFold<int32_t, uint32_t>(op);
    case DType::kS64:
      return IntFold<int64_t, uint64_t>(op);
    case DType::kU8:
      return IntFold<uint8_t, uint8_t>(op);
    case DType::kU16:
      return IntFold<uint16_t, uint16_t>(op);
    case DType::kU32:
      return IntFold<uint32_t, uint32_t>(op);
    case DType::kU64:
      return IntFold<uint64_t, uint64_t>(op);
    case DType::kF32:
      return FloatFold<float>(op);
    case DType::kF64:
      return FloatFold<double>(op);
    case DType::kC64:
      return ComplexFold<float>(op);
    case DType::kC128:
      return ComplexFold<double>(op);
    default:
      return nullptr;
  }
}

// Narrow types (narrow.h), kNarrowGroup lanes at a time.
constexpr int kPiece = kVectorBytes < 64 ? kVectorBytes / 4 : kNarrowGroup;  // lanes per register
using U32 = Vector<uint32_t, 4 * kPiece>;
using F32 = Vector<float, 4 * kPiece>;

// What narrow.h needs to know of a vector.
struct VectorLanes {
  using U32 = dfccl::U32;
  static DFCCL_INLINE U32 Choose(Vector<int32_t, 4 * kPiece> condition, U32 yes, U32 no) {
    return condition ? yes : no;
  }
  static DFCCL_INLINE U32 Fill(uint32_t value) { return U32{} + value; }
  static DFCCL_INLINE U32 AddFloats(U32 a, U32 b) { return (U32)((F32)a + (F32)b); }
  static DFCCL_INLINE U32 SubtractFloats(U32 a, U32 b) { return (U32)((F32)a - (F32)b); }
};

// Conversions between lanes and codes go through 16 bits: a compiler may do a
// step of two lane by lane.
using U16 = Vector<uint16_t, 2 * kPiece>;
using U8 = Vector<uint8_t, kPiece>;

DFCCL_INLINE U32 LoadCodes(const uint16_t* from) {
  return __builtin_convertvector(Load<U16>(from), U32);
}
DFCCL_INLINE U32 LoadCodes(const uint8_t* from) {
  return __builtin_convertvector(__builtin_convertvector(Load<U8>(from), U16), U32);
}
DFCCL_INLINE void StoreCodes(uint16_t* to, U32 codes) {
  Store(to, __builtin_convertvector(codes, U16));
}
DFCCL_INLINE void StoreCodes(uint8_t* to, U32 codes) {
  Store(to, __builtin_convertvector(__builtin_convertvector(codes, U16), U8));
}

// Copies less than kNarrowGroup codes.
template <typename Code>
DFCCL_INLINE void CopyCodes(const Code* from, Code* to, int count) {
  for (int piece = kNarrowGroup / 2, at = 0; piece > 0; piece /= 2) {
    if ((count & piece) == 0) continue;
    __builtin_memcpy(to + at, from + at, piece * sizeof(Code));
    at += piece;
  }
}

template <typename Format, typename Code>
DFCCL_INLINE void DecodeGroup(const Code* from, float* to) {
  for (int lane = 0; lane < kNarrowGroup; lane += kPiece) {
    Store(to + lane, Format::Decode(LoadCodes(from + lane)));
  }
}
template <typename Format, typename Code>
DFCCL_INLINE void EncodeGroup(const float* from, Code* to) {
  for (int lane = 0; lane < kNarrowGroup; lane += kPiece) {
    StoreCodes(to + lane, Format::Encode(Load<U32>(from + lane)));
  }
}

template <typename Format>
void DecodeCodes(const void* codes, float* values, int count) {
  using Code = typename Format::CodeType;
  const Code* from = static_cast<const Code*>(codes);
  int i = 0;
  for (; i + kNarrowGroup <= count; i += kNarrowGroup) DecodeGroup<Format>(from + i, values + i);
  if (i < count) {
    Code rest[kNarrowGroup] = {};
    CopyCodes(from + i, rest, count - i);
    DecodeGroup<Format>(rest, values + i);
  }
}

template <typename Format>
void EncodeCodes(const float* values, void* codes, int count) {
  using Code = typename Format::CodeType;
  Code* to = static_cast<Code*>(codes);
  int i = 0;
  for (; i + kNarrowGroup <= count; i += kNarrowGroup) EncodeGroup<Format>(values + i, to + i);
  if (i < count) {
    Code rest[kNarrowGroup];
    EncodeGroup<Format>(values + i, rest);
    CopyCodes(rest, to + i, count - i);
  }
}

DecodeFunction FindDecode(DType dtype) {
  switch (dtype) {
#define DFCCL_CASE(name, ...) \
  case DType::name:           \
    return DecodeCodes<__VA_ARGS__>;
    DFCCL_NARROW_FORMATS(DFCCL_CASE, VectorLanes)
#undef DFCCL_CASE
    default:
      return nullptr;
  }
}

EncodeFunction FindEncode(DType dtype) {
  switch (dtype) {
#define DFCCL_CASE(name, ...) \
  case DType::name:           \
    return EncodeCodes<__VA_ARGS__>;
    DFCCL_NARROW_FORMATS(DFCCL_CASE, VectorLanes)
#undef DFCCL_CASE
    default:
      return nullptr;
  }
}

// As short as a loop with this memory traffic gets: no operators, types, tails or
// alignments to tell apart. Buffers start on cache lines.
template <bool kStreaming>
DFCCL_INLINE void PlainLines(const float* const* from, float* const* to, int members, int64_t begin,
                             int64_t end) {
  using V = Vector<float, kVectorBytes>;
  constexpr int kLanes = kVectorBytes / sizeof(float);
  for (int64_t i = begin; i < end; i += kUnroll * kLanes) {
    V sum[kUnroll] = {};
    for (int m = 0; m < members; ++m) {
      for (int u = 0; u < kUnroll; ++u) sum[u] += Load<V>(from[m] + i + u * kLanes);
    }
    for (int m = 0; m < members; ++m) {
      for (int u = 0; u < kUnroll; ++u) {
        if constexpr (kStreaming) {
          StoreStreaming(to[m] + i + u * kLanes, (StreamedVector)sum[u]);
        } else {
          Store(to[m] + i + u * kLanes, sum[u]);
        }
      }
    }
  }
}

void PlainLoop(const float* const* from, float* const* to, int members, int64_t begin, int64_t end,
               bool streaming) {
  constexpr int64_t kStride = kUnroll * kVectorBytes / sizeof(float);
  const int64_t lines_end = begin + (end - begin) / kStride * kStride;
  if (streaming) {
    PlainLines<true>(from, to, members, begin, lines_end);
  } else {
    PlainLines<false>(from, to, members, begin, lines_end);
  }
  for (int64_t i = lines_end; i < end; ++i) {
    float sum = 0;
    for (int m = 0; m < members; ++m) sum += from[m][i];
    for (int m = 0; m < members; ++m) to[m][i] = sum;
  }
}

}  // namespace

const Kernels DFCCL_KERNELS = {DFCCL_KERNELS_NAME, FindFold,   Fold<BitOr>,
                               FindDecode,         FindEncode, PlainLoop};

}  // namespace dfccl
