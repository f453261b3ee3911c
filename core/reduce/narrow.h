// SPDX-License-Identifier: Apache-2.0
// Element types that accumulate in f32: their codes to f32 and back, on lanes of 32-bit
// patterns. Only arithmetic on normal floats is used. Lanes may be a vector register
// (the CPU's kernels) or one word (a thread of a GPU):
//   U32                                    the lanes, with the operators of uint32_t
//   U32 Choose(condition, U32 yes, U32 no)
//   U32 Fill(uint32_t)
//   U32 AddFloats(U32, U32), SubtractFloats(U32, U32)   of the floats with these patterns
#ifndef DFCCL_CORE_REDUCE_NARROW_H_
#define DFCCL_CORE_REDUCE_NARROW_H_

#include <stdint.h>  // nothing else: kernels include this with their instruction set turned on

// Inlined also where nothing else is: a CPU's lanes must not leave their kernels.
#if defined(__CUDACC__)
#define DFCCL_LANES __host__ __device__ inline __attribute__((always_inline))
#else
#define DFCCL_LANES inline __attribute__((always_inline))
#endif

namespace dfccl {

// What lies beyond the largest finite value.
enum class Special {
  kIeee,  // infinities and NaNs, as in IEEE 754
  kFn,    // no infinity; NaN is the code with all bits set but the sign
  kFnuz,  // no infinity, no minus zero; NaN takes its code
};

template <typename Lanes, typename Code, int kExponentBits, int kMantissaBits, int kBias,
          Special kSpecial>
struct Format {
  using U32 = typename Lanes::U32;
  using CodeType = Code;
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr uint32_t kSign = 1u << (kExponentBits + kMantissaBits);
  static constexpr uint32_t kMagnitude = kSign - 1;
  static constexpr uint32_t kExponent = kMagnitude & ~((1u << kMantissaBits) - 1);
  // f32 pattern of the smallest normal value.
  static constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - kBias) << 23;

  static DFCCL_LANES U32 Decode(U32 code) {
    const U32 magnitude = code & kMagnitude;
    const U32 sign = (code & kSign) << (31 - kExponentBits - kMantissaBits);
    U32 bits = magnitude << kShift;
    if constexpr (kExponentBits < 8) {
      // Without its implicit one, a subnormal is what exceeds the smallest normal value.
      const U32 subnormal = Lanes::SubtractFloats(bits + kMinNormal, Lanes::Fill(kMinNormal));
      bits = Lanes::Choose(magnitude < (1u << kMantissaBits), subnormal,
                           bits + (static_cast<uint32_t>(127 - kBias) << 23));
      if constexpr (kSpecial == Special::kIeee) {
        bits = Lanes::Choose(magnitude >= kExponent, (magnitude << kShift) | 0x7f800000u, bits);
      }
    }
    if constexpr (kSpecial == Special::kFn) {
      bits = Lanes::Choose(magnitude == kMagnitude, Lanes::Fill(0x7fc00000u), bits);
    }
    if constexpr (kSpecial == Special::kFnuz) {
      return Lanes::Choose(code == kSign, Lanes::Fill(0xffc00000u), bits | sign);
    }
    return bits | sign;
  }

  static DFCCL_LANES U32 Encode(U32 bits) {
    const U32 sign = (bits >> (31 - kExponentBits - kMantissaBits)) & kSign;
    const U32 magnitude = bits & 0x7fffffffu;
    U32 code = (magnitude + ((1u << (kShift - 1)) - 1) + ((magnitude >> kShift) & 1)) >> kShift;
    if constexpr (kExponentBits < 8) {
      code -= static_cast<uint32_t>(127 - kBias) << kMantissaBits;
      // An addend whose unit in the last place is that of subnormals rounds for us.
      constexpr uint32_t kRounder = kMinNormal + (static_cast<uint32_t>(kShift) << 23);
      const U32 subnormal = Lanes::AddFloats(magnitude, Lanes::Fill(kRounder)) - kRounder;
      code = Lanes::Choose(magnitude < kMinNormal, subnormal, code);
    }
    const auto nan = magnitude > 0x7f800000u;
    if constexpr (kSpecial == Special::kIeee) {
      constexpr uint32_t kQuietNan = kExponent | (1u << (kMantissaBits - 1));
      if constexpr (kExponentBits < 8) {
        // Also catches f32 exponents too large for the subtraction above.
        constexpr uint32_t kOverflow = static_cast<uint32_t>(127 - kBias + (1 << kExponentBits) - 1)
                                       << 23;
        code = Lanes::Choose((magnitude >= kOverflow) | (code > kExponent), Lanes::Fill(kExponent),
                             code);
      }
      return Lanes::Choose(nan, Lanes::Fill(kQuietNan), code) | sign;
    } else {
      constexpr uint32_t kLargest = kSpecial == Special::kFn ? kMagnitude - 1 : kMagnitude;
      constexpr uint32_t kTwicePast = static_cast<uint32_t>(127 - kBias + (1 << kExponentBits))
                                      << 23;
      const auto overflow = (magnitude >= kTwicePast) | (code > kLargest);
      if constexpr (kSpecial == Special::kFn) {
        return Lanes::Choose(overflow, Lanes::Fill(kMagnitude), code) | sign;
      } else {
        return Lanes::Choose(overflow, Lanes::Fill(kSign),
                             Lanes::Choose(code == 0, code, code | sign));
      }
    }
  }
};

// Powers of two from 2^-127, and NaN: no zero, no sign. As in ml_dtypes and XLA:
// ties round up, so does all between the two smallest values, smaller ones become
// the smallest, zero and negatives become NaN.
template <typename Lanes>
struct FormatE8M0 {
  using U32 = typename Lanes::U32;
  using CodeType = uint8_t;
  static DFCCL_LANES U32 Decode(U32 code) {
    const U32 bits = Lanes::Choose(code == 0u, Lanes::Fill(0x00400000u), code << 23);
    return Lanes::Choose(code == 0xffu, Lanes::Fill(0x7fc00000u), bits);
  }
  static DFCCL_LANES U32 Encode(U32 bits) {
    const U32 normal = (bits + 0x00400000u) >> 23;
    const U32 code =
        Lanes::Choose(bits < 0x00800000u,
                      Lanes::Choose(bits <= 0x00400000u, Lanes::Fill(0), Lanes::Fill(1)), normal);
    // `bits - 1` is huge for +0; the sign bit makes negatives huge.
    return Lanes::Choose(bits - 1 >= 0x7f3fffffu, Lanes::Fill(0xff), code);
  }
};

// USE(DType, format) for every narrow type.
#define DFCCL_NARROW_FORMATS(USE, Lanes)                                \
  USE(kF16, Format<Lanes, uint16_t, 5, 10, 15, Special::kIeee>)         \
  USE(kBF16, Format<Lanes, uint16_t, 8, 7, 127, Special::kIeee>)        \
  USE(kF8E3M4, Format<Lanes, uint8_t, 3, 4, 3, Special::kIeee>)         \
  USE(kF8E4M3, Format<Lanes, uint8_t, 4, 3, 7, Special::kIeee>)         \
  USE(kF8E4M3FN, Format<Lanes, uint8_t, 4, 3, 7, Special::kFn>)         \
  USE(kF8E4M3FNUZ, Format<Lanes, uint8_t, 4, 3, 8, Special::kFnuz>)     \
  USE(kF8E4M3B11FNUZ, Format<Lanes, uint8_t, 4, 3, 11, Special::kFnuz>) \
  USE(kF8E5M2, Format<Lanes, uint8_t, 5, 2, 15, Special::kIeee>)        \
  USE(kF8E5M2FNUZ, Format<Lanes, uint8_t, 5, 2, 16, Special::kFnuz>)    \
  USE(kF8E8M0FNU, FormatE8M0<Lanes>)

}  // namespace dfccl

#endif  // DFCCL_CORE_REDUCE_NARROW_H_
