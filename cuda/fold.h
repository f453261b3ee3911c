// SPDX-License-Identifier: Apache-2.0
// A data step of one block: element-wise folds with 16-byte loads and stores where all
// buffers are aligned alike, and values in registers. The bits are those of the CPU's
// folds (core/reduce), but for the payload of NaNs.
#ifndef DFCCL_CUDA_FOLD_H_
#define DFCCL_CUDA_FOLD_H_

#include <stdint.h>
#include <string.h>

#include "core/collective.h"
#include "core/reduce/narrow.h"
#include "cuda/device.h"

namespace dfccl {
namespace gpu {

// The buffer holds elements of the accumulation type. Addresses end below this bit.
constexpr uint64_t kAccumulated = uint64_t{1} << 63;

struct FoldArguments {
  ReduceOp op;
  DType dtype;
  uint32_t element_size;
  uint32_t source_count;  // 0: the destinations become zero
  uint32_t destination_count;
  const uint64_t* buffers;  // sources, then destinations
  int64_t count;            // elements
  int64_t mean_divisor;     // kMean: members of the group; 0: not the last fold
};

template <typename To, typename From>
DFCCL_DEVICE inline To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// One lane of core/reduce/narrow.h.
struct ScalarLanes {
  using U32 = uint32_t;
  static DFCCL_LANES U32 Choose(bool condition, U32 yes, U32 no) { return condition ? yes : no; }
  static DFCCL_LANES U32 Fill(uint32_t value) { return value; }
  static DFCCL_LANES float Float(U32 bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
  }
  static DFCCL_LANES U32 Bits(float value) {
    U32 bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
  }
  static DFCCL_LANES U32 AddFloats(U32 a, U32 b) { return Bits(Float(a) + Float(b)); }
  static DFCCL_LANES U32 SubtractFloats(U32 a, U32 b) { return Bits(Float(a) - Float(b)); }
};

template <typename T>
struct Complex {
  T real, imaginary;
};

// How elements lie in memory (Code), and what is folded (Value).
template <typename T>
struct Same {
  using Code = T;
  using Value = T;
  static constexpr bool kNarrow = false;
  static DFCCL_DEVICE Value Decode(Code code) { return code; }
  static DFCCL_DEVICE Code Encode(Value value) { return value; }
};
template <typename Format>
struct Narrow {
  using Code = typename Format::CodeType;
  using Value = float;
  static constexpr bool kNarrow = true;
  static DFCCL_DEVICE Value Decode(Code code) { return ScalarLanes::Float(Format::Decode(code)); }
  static DFCCL_DEVICE Code Encode(Value value) {
    return static_cast<Code>(Format::Encode(ScalarLanes::Bits(value)));
  }
};

// Operators: Prepare() is applied to each source, Finish() to the value.
struct Operator {
  template <typename T>
  DFCCL_DEVICE T Prepare(T a) const {
    return a;
  }
  template <typename T>
  DFCCL_DEVICE T Finish(T a) const {
    return a;
  }
};

struct Sum : Operator {
  template <typename T>
  DFCCL_DEVICE T Apply(T a, T b) const {
    return static_cast<T>(a + b);
  }
  template <typename T>
  DFCCL_DEVICE Complex<T> Apply(Complex<T> a, Complex<T> b) const {
    return {a.real + b.real, a.imaginary + b.imaginary};
  }
};

struct Mean : Sum {
  int64_t divisor;
  template <typename T>
  DFCCL_DEVICE T Finish(T a) const {
    return a / static_cast<T>(divisor);
  }
  template <typename T>
  DFCCL_DEVICE Complex<T> Finish(Complex<T> a) const {
    return {a.real / static_cast<T>(divisor), a.imaginary / static_cast<T>(divisor)};
  }
};

struct Prod : Operator {
  template <typename T>
  DFCCL_DEVICE T Apply(T a, T b) const {
    return static_cast<T>(a * b);
  }
  // The product of two 16-bit numbers would be one of signed 32 bits, and may overflow.
  DFCCL_DEVICE uint16_t Apply(uint16_t a, uint16_t b) const {
    return static_cast<uint16_t>(uint32_t{a} * b);
  }
  // The textbook formula, without recovery of infinities from NaN.
  template <typename T>
  DFCCL_DEVICE Complex<T> Apply(Complex<T> a, Complex<T> b) const {
    return {a.real * b.real + -(a.imaginary * b.imaginary),
            a.real * b.imaginary + a.imaginary * b.real};
  }
};

// As on the CPU (kernels_inl.h): NaN wins, and minus zero is less than zero.
template <typename Bits>
struct FloatBits {
  template <typename T>
  static DFCCL_DEVICE T Min(T a, T b) {
    return BitCast<T>(
        static_cast<Bits>(BitCast<Bits>(a < b ? a : b) | BitCast<Bits>(b < a ? b : a)));
  }
  template <typename T>
  static DFCCL_DEVICE T Max(T a, T b) {
    const Bits nan = a != a || b != b ? ~Bits{0} : Bits{0};
    return BitCast<T>(
        static_cast<Bits>((BitCast<Bits>(a > b ? a : b) & BitCast<Bits>(b > a ? b : a)) | nan));
  }
};

struct Min : Operator {
  template <typename T>
  DFCCL_DEVICE T Apply(T a, T b) const {
    return a < b ? a : b;
  }
  DFCCL_DEVICE float Apply(float a, float b) const { return FloatBits<uint32_t>::Min(a, b); }
  DFCCL_DEVICE double Apply(double a, double b) const { return FloatBits<uint64_t>::Min(a, b); }
};

struct Max : Operator {
  template <typename T>
  DFCCL_DEVICE T Apply(T a, T b) const {
    return a > b ? a : b;
  }
  DFCCL_DEVICE float Apply(float a, float b) const { return FloatBits<uint32_t>::Max(a, b); }
  DFCCL_DEVICE double Apply(double a, double b) const { return FloatBits<uint64_t>::Max(a, b); }
};

struct And : Operator {
  template <typename T>
  DFCCL_DEVICE T Apply(T a, T b) const {
    return static_cast<T>(a & b);
  }
};
struct Or : Operator {
  template <typename T>
  DFCCL_DEVICE T Apply(T a, T b) const {
    return static_cast<T>(a | b);
  }
};
struct Xor : Operator {
  template <typename T>
  DFCCL_DEVICE T Apply(T a, T b) const {
    return static_cast<T>(a ^ b);
  }
};

// Any of the operators of floats, chosen for each element: for types that are rare, so
// that they do not fill the kernel.
struct AnyOfFloats : Operator {
  ReduceOp op;
  int64_t divisor;  // 0: no mean
  DFCCL_DEVICE float Apply(float a, float b) const {
    switch (op) {
      case ReduceOp::kProd:
        return a * b;
      case ReduceOp::kMin:
        return FloatBits<uint32_t>::Min(a, b);
      case ReduceOp::kMax:
        return FloatBits<uint32_t>::Max(a, b);
      default:
        return a + b;
    }
  }
  DFCCL_DEVICE float Finish(float a) const {
    return divisor != 0 ? a / static_cast<float>(divisor) : a;
  }
};

// Any byte but zero is true; the result is 0 or 1.
template <typename BitOperator>
struct Logical : BitOperator {
  DFCCL_DEVICE uint8_t Prepare(uint8_t a) const { return a != 0 ? 1 : 0; }
};

// Of one source, or of none.
struct Copy : Operator {
  template <typename T>
  DFCCL_DEVICE T Apply(T a, T) const {
    return a;
  }
};

constexpr uint32_t kWideBytes = 16;

// As many elements as one wide load brings. On a GPU the type's alignment makes it one
// instruction; on the host buffers are only bytes.
template <typename T, int kLanes>
struct alignas(sizeof(T) * kLanes < kWideBytes ? sizeof(T) * kLanes : kWideBytes) Wide {
  T lanes[kLanes];
};

template <typename V>
DFCCL_DEVICE inline V LoadAs(const char* from) {
#if defined(__CUDACC__)
  return *reinterpret_cast<const V*>(from);
#else
  V value;
  memcpy(&value, from, sizeof(value));
  return value;
#endif
}
template <typename V>
DFCCL_DEVICE inline void StoreAs(char* to, const V& value) {
#if defined(__CUDACC__)
  *reinterpret_cast<V*>(to) = value;
#else
  memcpy(to, &value, sizeof(value));
#endif
}

DFCCL_DEVICE inline char* BufferOf(uint64_t buffer) {
  return reinterpret_cast<char*>(buffer & ~kAccumulated);
}

// Folds kLanes elements from `at` on.
template <typename Type, int kLanes, typename Op>
DFCCL_DEVICE inline void FoldLanes(const Op& op, const FoldArguments& a, int64_t at) {
  using Code = typename Type::Code;
  using Value = typename Type::Value;
  Wide<Value, kLanes> value = {};
  for (uint32_t s = 0; s < a.source_count; ++s) {
    const uint64_t buffer = a.buffers[s];
    Wide<Value, kLanes> next;
    if (Type::kNarrow && (buffer & kAccumulated) != 0) {
      next = LoadAs<Wide<Value, kLanes>>(BufferOf(buffer) + at * int64_t{sizeof(Value)});
    } else {
      const auto codes = LoadAs<Wide<Code, kLanes>>(BufferOf(buffer) + at * int64_t{sizeof(Code)});
      DFCCL_UNROLL
      for (int i = 0; i < kLanes; ++i) next.lanes[i] = Type::Decode(codes.lanes[i]);
    }
    DFCCL_UNROLL
    for (int i = 0; i < kLanes; ++i) {
      const Value prepared = op.Prepare(next.lanes[i]);
      value.lanes[i] = s == 0 ? prepared : op.Apply(value.lanes[i], prepared);
    }
  }
  DFCCL_UNROLL
  for (int i = 0; i < kLanes; ++i) value.lanes[i] = op.Finish(value.lanes[i]);
  Wide<Code, kLanes> codes;
  DFCCL_UNROLL
  for (int i = 0; i < kLanes; ++i) codes.lanes[i] = Type::Encode(value.lanes[i]);
  for (uint32_t d = 0; d < a.destination_count; ++d) {
    const uint64_t buffer = a.buffers[a.source_count + d];
    if (Type::kNarrow && (buffer & kAccumulated) != 0) {
      StoreAs(BufferOf(buffer) + at * int64_t{sizeof(Value)}, value);
    } else {
      StoreAs(BufferOf(buffer) + at * int64_t{sizeof(Code)}, codes);
    }
  }
}

// Elements before all buffers are aligned for wide loads; beyond `count` if they never
// are all at once. All threads of the block get the same.
template <typename Type, typename Block>
DFCCL_DEVICE inline int64_t WideHead(Block& block, const FoldArguments& a) {
  const auto size_of = [](uint64_t buffer) {
    return Type::kNarrow && (buffer & kAccumulated) != 0 ? sizeof(typename Type::Value)
                                                         : sizeof(typename Type::Code);
  };
  const uint64_t first = a.buffers[0];
  const uint64_t gap = (kWideBytes - (first & (kWideBytes - 1))) & (kWideBytes - 1);
  const uint64_t head = gap / size_of(first);
  bool askew = gap % size_of(first) != 0;
  for (uint32_t i = block.thread(); i < a.source_count + a.destination_count;
       i += block.threads()) {
    const uint64_t buffer = a.buffers[i];
    askew |= ((buffer + head * size_of(buffer)) & (kWideBytes - 1)) != 0;
  }
  return block.Any(askew) ? a.count + 1 : static_cast<int64_t>(head);
}

// Elements of a wide load. Of the rare types, which are slow in computing anyway, few, as
// the compiler has all in registers.
template <typename Type>
constexpr int kLanesOf = Type::kNarrow && sizeof(typename Type::Code) == 1
                             ? 4
                             : static_cast<int>(kWideBytes / sizeof(typename Type::Code));

template <typename Type, typename Op, typename Block>
DFCCL_DEVICE_CALL void FoldWith(Block& block, const FoldArguments& a, const Op& op) {
  constexpr int kLanes = kLanesOf<Type>;
  const int64_t thread = block.thread(), threads = block.threads();
  const int64_t head = WideHead<Type>(block, a);
  if (head + kLanes > a.count) {
    for (int64_t at = thread; at < a.count; at += threads) FoldLanes<Type, 1>(op, a, at);
    return;
  }
  const int64_t tail = head + (a.count - head) / kLanes * kLanes;
  for (int64_t at = head + thread * kLanes; at < tail; at += threads * kLanes) {
    FoldLanes<Type, kLanes>(op, a, at);
  }
  for (int64_t at = thread; at < head; at += threads) FoldLanes<Type, 1>(op, a, at);
  for (int64_t at = tail + thread; at < a.count; at += threads) FoldLanes<Type, 1>(op, a, at);
}

template <typename Type, typename Block>
DFCCL_DEVICE inline bool FoldBits(Block& block, const FoldArguments& a) {
  switch (a.op) {
    case ReduceOp::kSum:
      FoldWith<Type>(block, a, Sum());
      return true;
    case ReduceOp::kProd:
      FoldWith<Type>(block, a, Prod());
      return true;
    case ReduceOp::kAnd:
      FoldWith<Type>(block, a, And());
      return true;
    case ReduceOp::kOr:
      FoldWith<Type>(block, a, Or());
      return true;
    case ReduceOp::kXor:
      FoldWith<Type>(block, a, Xor());
      return true;
    default:
      return false;
  }
}

// Only the order knows a sign: sum, product and bits of signed integers are those of
// unsigned ones, which wrap.
template <typename T, typename Unsigned, typename Block>
DFCCL_DEVICE inline bool FoldIntegers(Block& block, const FoldArguments& a) {
  switch (a.op) {
    case ReduceOp::kMin:
      FoldWith<Same<T>>(block, a, Min());
      return true;
    case ReduceOp::kMax:
      FoldWith<Same<T>>(block, a, Max());
      return true;
    default:
      return FoldBits<Same<Unsigned>>(block, a);
  }
}

// What floats and complex numbers share.
template <typename Type, typename Block>
DFCCL_DEVICE inline bool FoldField(Block& block, const FoldArguments& a) {
  switch (a.op) {
    case ReduceOp::kMean:
      if (a.mean_divisor != 0) {
        Mean mean;
        mean.divisor = a.mean_divisor;
        FoldWith<Type>(block, a, mean);
        return true;
      }
      FoldWith<Type>(block, a, Sum());  // until its last fold
      return true;
    case ReduceOp::kSum:
      FoldWith<Type>(block, a, Sum());
      return true;
    case ReduceOp::kProd:
      FoldWith<Type>(block, a, Prod());
      return true;
    default:
      return false;
  }
}

template <typename Type, typename Block>
DFCCL_DEVICE inline bool FoldRare(Block& block, const FoldArguments& a) {
  switch (a.op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean:
    case ReduceOp::kProd:
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      break;
    default:
      return false;
  }
  AnyOfFloats op;
  op.op = a.op;
  op.divisor = a.op == ReduceOp::kMean ? a.mean_divisor : 0;
  FoldWith<Type>(block, a, op);
  return true;
}

template <typename Type, typename Block>
DFCCL_DEVICE inline bool FoldFloats(Block& block, const FoldArguments& a) {
  switch (a.op) {
    case ReduceOp::kMin:
      FoldWith<Type>(block, a, Min());
      return true;
    case ReduceOp::kMax:
      FoldWith<Type>(block, a, Max());
      return true;
    default:
      return FoldField<Type>(block, a);
  }
}

template <typename Format, typename Block>
DFCCL_DEVICE inline bool FoldNarrow(Block& block, const FoldArguments& a) {
  if constexpr (sizeof(typename Format::CodeType) == 1) {
    return FoldRare<Narrow<Format>>(block, a);
  } else {
    return FoldFloats<Narrow<Format>>(block, a);
  }
}

template <typename Block>
DFCCL_DEVICE inline bool FoldBools(Block& block, const FoldArguments& a) {
  switch (a.op) {
    case ReduceOp::kAnd:
    case ReduceOp::kMin:
      FoldWith<Same<uint8_t>>(block, a, Logical<And>());
      return true;
    case ReduceOp::kOr:
    case ReduceOp::kMax:
      FoldWith<Same<uint8_t>>(block, a, Logical<Or>());
      return true;
    case ReduceOp::kXor:
      FoldWith<Same<uint8_t>>(block, a, Logical<Xor>());
      return true;
    default:
      return false;
  }
}

template <typename Block>
DFCCL_DEVICE inline bool CopyElements(Block& block, const FoldArguments& a, uint32_t size) {
  switch (size) {
    case 1:
      FoldWith<Same<uint8_t>>(block, a, Copy());
      return true;
    case 2:
      FoldWith<Same<uint16_t>>(block, a, Copy());
      return true;
    case 4:
      FoldWith<Same<uint32_t>>(block, a, Copy());
      return true;
    case 8:
      FoldWith<Same<uint64_t>>(block, a, Copy());
      return true;
    case 16:
      FoldWith<Same<Complex<uint64_t>>>(block, a, Copy());
      return true;
    default:
      return false;
  }
}

DFCCL_DEVICE inline bool IsNarrow(DType dtype) {
  switch (dtype) {
#define DFCCL_CASE(name, ...) case DType::name:
    DFCCL_NARROW_FORMATS(DFCCL_CASE, ScalarLanes)
#undef DFCCL_CASE
    return true;
    default:
      return false;
  }
}

// Whether nothing is to be computed; *accumulated: the elements are of the accumulation
// type. (Bools become 0 or 1, so that is something.)
DFCCL_DEVICE inline bool IsCopy(const FoldArguments& a, bool* accumulated) {
  *accumulated = false;
  if (a.source_count == 0) return true;
  if (a.dtype == DType::kBool || a.source_count != 1 ||
      (a.op == ReduceOp::kMean && a.mean_divisor != 0)) {
    return false;
  }
  if (!IsNarrow(a.dtype)) return true;
  *accumulated = (a.buffers[0] & kAccumulated) != 0;
  for (uint32_t d = 0; d < a.destination_count; ++d) {
    if (((a.buffers[1 + d] & kAccumulated) != 0) != *accumulated) return false;
  }
  return true;
}

// Folds the sources left to right in the accumulation type, rounds once, and writes
// every destination; by all threads of the block. False: there is no such fold.
template <typename Block>
DFCCL_DEVICE_CALL bool Fold(Block& block, const FoldArguments& a) {
  bool accumulated;
  if (IsCopy(a, &accumulated)) {
    return CopyElements(block, a, accumulated ? sizeof(float) : a.element_size);
  }
  switch (a.dtype) {
    case DType::kBool:
      return FoldBools(block, a);
    case DType::kS8:
      return FoldIntegers<int8_t, uint8_t>(block, a);
    case DType::kS16:
      return FoldIntegers<int16_t, uint16_t>(block, a);
    case DType::kS32:
      return FoldIntegers<int32_t, uint32_t>(block, a);
    case DType::kS64:
      return FoldIntegers<int64_t, uint64_t>(block, a);
    case DType::kU8:
      return FoldIntegers<uint8_t, uint8_t>(block, a);
    case DType::kU16:
      return FoldIntegers<uint16_t, uint16_t>(block, a);
    case DType::kU32:
      return FoldIntegers<uint32_t, uint32_t>(block, a);
    case DType::kU64:
      return FoldIntegers<uint64_t, uint64_t>(block, a);
    case DType::kF32:
      return FoldFloats<Same<float>>(block, a);
    case DType::kF64:
      return FoldFloats<Same<double>>(block, a);
    case DType::kC64:
      return FoldField<Same<Complex<float>>>(block, a);
    case DType::kC128:
      return FoldField<Same<Complex<double>>>(block, a);
#define DFCCL_CASE(name, ...) \
  case DType::name:           \
    return FoldNarrow<__VA_ARGS__>(block, a);
      DFCCL_NARROW_FORMATS(DFCCL_CASE, ScalarLanes)
#undef DFCCL_CASE
  }
  return false;
}

}  // namespace gpu
}  // namespace dfccl

#endif  // DFCCL_CUDA_FOLD_H_
