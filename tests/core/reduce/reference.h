// SPDX-License-Identifier: Apache-2.0
// Slow scalar folds, written from the definition of the types and operators and
// independently of core/reduce: what the tests compare with.
#ifndef DFCCL_TESTS_CORE_REDUCE_REFERENCE_H_
#define DFCCL_TESTS_CORE_REDUCE_REFERENCE_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/collective.h"

namespace dfccl {
namespace reference {

using Bytes = std::vector<uint8_t>;

struct NarrowFormat {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  enum { kIeee, kFn, kFnuz } special;
};

inline NarrowFormat FormatOf(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return {5, 10, 15, NarrowFormat::kIeee};
    case DType::kBF16:
      return {8, 7, 127, NarrowFormat::kIeee};
    case DType::kF8E3M4:
      return {3, 4, 3, NarrowFormat::kIeee};
    case DType::kF8E4M3:
      return {4, 3, 7, NarrowFormat::kIeee};
    case DType::kF8E4M3FN:
      return {4, 3, 7, NarrowFormat::kFn};
    case DType::kF8E4M3FNUZ:
      return {4, 3, 8, NarrowFormat::kFnuz};
    case DType::kF8E4M3B11FNUZ:
      return {4, 3, 11, NarrowFormat::kFnuz};
    case DType::kF8E5M2:
      return {5, 2, 15, NarrowFormat::kIeee};
    default:
      return {5, 2, 16, NarrowFormat::kFnuz};
  }
}

// The number a magnitude code would stand for if no code were special.
inline double PlainValue(const NarrowFormat& f, uint32_t magnitude) {
  const int exponent = static_cast<int>(magnitude >> f.mantissa_bits);
  const double mantissa = magnitude & ((1u << f.mantissa_bits) - 1);
  const double one = std::ldexp(1.0, f.mantissa_bits);
  return exponent == 0 ? std::ldexp(mantissa, 1 - f.bias - f.mantissa_bits)
                       : std::ldexp(one + mantissa, exponent - f.bias - f.mantissa_bits);
}

inline uint32_t LargestFinite(const NarrowFormat& f) {
  const uint32_t all = (1u << (f.exponent_bits + f.mantissa_bits)) - 1;
  if (f.special == NarrowFormat::kIeee) return all - (1u << f.mantissa_bits);
  return f.special == NarrowFormat::kFn ? all - 1 : all;
}

inline float Decode(DType dtype, uint32_t code) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (dtype == DType::kF8E8M0FNU) {
    return code == 255 ? nan : static_cast<float>(std::ldexp(1.0, static_cast<int>(code) - 127));
  }
  const NarrowFormat f = FormatOf(dtype);
  const uint32_t sign = 1u << (f.exponent_bits + f.mantissa_bits);
  const uint32_t magnitude = code & (sign - 1);
  if (f.special == NarrowFormat::kFnuz && code == sign) return nan;
  float value;
  if (magnitude <= LargestFinite(f)) {
    value = static_cast<float>(PlainValue(f, magnitude));
  } else if (f.special == NarrowFormat::kIeee && magnitude == LargestFinite(f) + 1) {
    value = std::numeric_limits<float>::infinity();
  } else {
    return nan;
  }
  return (code & sign) != 0 ? -value : value;
}

// Rounds to the nearest value, to the even code between two. NaN is kept as NaN
// in whatever spelling the type has.
inline uint32_t Encode(DType dtype, float value) {
  if (dtype == DType::kF8E8M0FNU) {
    if (!(value > 0) || std::isinf(value)) return 255;
    // The two smallest are not divided in the middle, as in ml_dtypes.
    if (value <= std::ldexp(1.0, -127)) return 0;
    for (int code = 1; code < 255; ++code) {
      // Up to, not including, the middle of this power of two and the next.
      if (value < 1.5 * std::ldexp(1.0, code - 127)) return static_cast<uint32_t>(code);
    }
    return 255;
  }
  const NarrowFormat f = FormatOf(dtype);
  const uint32_t sign = 1u << (f.exponent_bits + f.mantissa_bits);
  const uint32_t largest = LargestFinite(f);
  const uint32_t minus = std::signbit(value) ? sign : 0;
  const uint32_t nan = f.special == NarrowFormat::kIeee
                           ? minus | (largest + 1) | (1u << (f.mantissa_bits - 1))
                           : (f.special == NarrowFormat::kFn ? minus | (sign - 1) : sign);
  if (std::isnan(value)) return nan;
  const double magnitude = std::fabs(static_cast<double>(value));
  uint32_t low = 0;
  for (uint32_t step = sign; step != 0; step /= 2) {
    if (low + step <= largest && PlainValue(f, low + step) <= magnitude) low += step;
  }
  // One past the largest has the value the next code would have.
  const double below = magnitude - PlainValue(f, low);
  const double above = PlainValue(f, low + 1) - magnitude;
  if (above < below || (above == below && low % 2 == 1)) ++low;
  if (low > largest) return f.special == NarrowFormat::kIeee ? minus | (largest + 1) : nan;
  return f.special == NarrowFormat::kFnuz && low == 0 ? 0 : minus | low;
}

template <typename T>
T Get(const uint8_t* from, int64_t i) {
  T value;
  std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}
template <typename T>
void Put(uint8_t* to, int64_t i, T value) {
  std::memcpy(to + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

template <typename T>
T Two(ReduceOp op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    const bool a_nan = std::isnan(a), b_nan = std::isnan(b);
    switch (op) {
      case ReduceOp::kProd:
        return a * b;
      case ReduceOp::kMin:
        if (a_nan || b_nan) return a_nan ? a : b;
        if (a == 0 && b == 0) return std::signbit(a) ? a : b;
        return a < b ? a : b;
      case ReduceOp::kMax:
        if (a_nan || b_nan) return a_nan ? a : b;
        if (a == 0 && b == 0) return std::signbit(a) ? b : a;
        return a < b ? b : a;
      default:
        return a + b;
    }
  } else {
    const uint64_t x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    switch (op) {
      case ReduceOp::kProd:
        return static_cast<T>(x * y);
      case ReduceOp::kMin:
        return a < b ? a : b;
      case ReduceOp::kMax:
        return a < b ? b : a;
      case ReduceOp::kAnd:
        return static_cast<T>(x & y);
      case ReduceOp::kOr:
        return static_cast<T>(x | y);
      case ReduceOp::kXor:
        return static_cast<T>(x ^ y);
      default:
        return static_cast<T>(x + y);
    }
  }
}

template <typename T>
T Element(ReduceOp op, const std::vector<const uint8_t*>& sources, int64_t i, int64_t divisor) {
  T value = Get<T>(sources[0], i);
  for (size_t s = 1; s < sources.size(); ++s) value = Two<T>(op, value, Get<T>(sources[s], i));
  if constexpr (std::is_floating_point_v<T>) {
    if (op == ReduceOp::kMean && divisor != 0) value = value / static_cast<T>(divisor);
  }
  return value;
}

template <typename T>
void ComplexElement(ReduceOp op, const std::vector<const uint8_t*>& sources, int64_t i,
                    int64_t divisor, uint8_t* to) {
  if (op != ReduceOp::kProd) {
    Put<T>(to, 2 * i, Element<T>(op, sources, 2 * i, divisor));
    Put<T>(to, 2 * i + 1, Element<T>(op, sources, 2 * i + 1, divisor));
    return;
  }
  T re = Get<T>(sources[0], 2 * i), im = Get<T>(sources[0], 2 * i + 1);
  for (size_t s = 1; s < sources.size(); ++s) {
    const T other_re = Get<T>(sources[s], 2 * i), other_im = Get<T>(sources[s], 2 * i + 1);
    // Volatile: each product is rounded, never fused with the addition.
    const volatile T rr = re * other_re, ii = im * other_im;
    const volatile T ri = re * other_im, ir = im * other_re;
    re = rr - ii;
    im = ri + ir;
  }
  Put<T>(to, 2 * i, re);
  Put<T>(to, 2 * i + 1, im);
}

// Element i of a narrow type, in f32.
inline float NarrowElement(ReduceOp op, DType dtype, const std::vector<const uint8_t*>& sources,
                           const std::vector<bool>& accumulated, int64_t i, int64_t divisor) {
  float value = 0;
  for (size_t s = 0; s < sources.size(); ++s) {
    float next;
    if (accumulated[s]) {
      next = Get<float>(sources[s], i);
    } else {
      next = Decode(dtype, DTypeSize(dtype) == 1 ? Get<uint8_t>(sources[s], i)
                                                 : Get<uint16_t>(sources[s], i));
    }
    value = s == 0 ? next : Two<float>(op, value, next);
  }
  if (op == ReduceOp::kMean && divisor != 0) value /= static_cast<float>(divisor);
  return value;
}

inline void WideElement(ReduceOp op, DType dtype, const std::vector<const uint8_t*>& sources,
                        int64_t i, int64_t divisor, uint8_t* to) {
  switch (dtype) {
    case DType::kBool: {
      bool value = Get<uint8_t>(sources[0], i) != 0;
      for (size_t s = 1; s < sources.size(); ++s) {
        const bool next = Get<uint8_t>(sources[s], i) != 0;
        if (op == ReduceOp::kAnd || op == ReduceOp::kMin) value = value && next;
        if (op == ReduceOp::kOr || op == ReduceOp::kMax) value = value || next;
        if (op == ReduceOp::kXor) value = value != next;
      }
      return Put<uint8_t>(to, i, value);
    }
    case DType::kS8:
      return Put(to, i, Element<int8_t>(op, sources, i, 0));
    case DType::kS16:
      return Put(to, i, Element<int16_t>(op, sources, i, 0));
    case DType::kS32:
      return Put(to, i, Element<int32_t>(op, sources, i, 0));
    case DType::kS64:
      return Put(to, i, Element<int64_t>(op, sources, i, 0));
    case DType::kU8:
      return Put(to, i, Element<uint8_t>(op, sources, i, 0));
    case DType::kU16:
      return Put(to, i, Element<uint16_t>(op, sources, i, 0));
    case DType::kU32:
      return Put(to, i, Element<uint32_t>(op, sources, i, 0));
    case DType::kU64:
      return Put(to, i, Element<uint64_t>(op, sources, i, 0));
    case DType::kF32:
      return Put(to, i, Element<float>(op, sources, i, divisor));
    case DType::kF64:
      return Put(to, i, Element<double>(op, sources, i, divisor));
    case DType::kC64:
      return ComplexElement<float>(op, sources, i, divisor, to);
    default:
      return ComplexElement<double>(op, sources, i, divisor, to);
  }
}

}  // namespace reference
}  // namespace dfccl

#endif  // DFCCL_TESTS_CORE_REDUCE_REFERENCE_H_
