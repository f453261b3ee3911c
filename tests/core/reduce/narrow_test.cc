// SPDX-License-Identifier: Apache-2.0
// Conversions of narrow floats, for every kernel set: against ml_dtypes, through
// hashes that narrow_hashes.py prints, and against the reference, which shows
// where a difference is.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "core/reduce/kernels.h"
#include "tests/core/reduce/reference.h"

namespace dfccl {
namespace {

struct Expected {
  const char* name;
  uint64_t decoded;
  uint64_t encoded;
};
constexpr Expected kExpected[] = {
    {"float16", 0xa29fcd307f1d2325, 0x485cf6307da07005},
    {"bfloat16", 0xae864f38855e2325, 0x83c09f8028212561},
    {"float8_e3m4", 0xbc74072710fbb725, 0x75501ea5efaa7008},
    {"float8_e4m3", 0xb0ba52aad84bb725, 0xcbb76861f6889349},
    {"float8_e4m3fn", 0x08993af4628bb725, 0x1ab993dc867b53da},
    {"float8_e4m3fnuz", 0x4065565af2abb725, 0xc98f6ee665fc1763},
    {"float8_e4m3b11fnuz", 0x8b5af59376abb725, 0x4229e4668d47951c},
    {"float8_e5m2", 0x00cee2838e6bb725, 0xdb6d8df6b8bbd5fc},
    {"float8_e5m2fnuz", 0x39969815ceabb725, 0xc00d5d1e51c7a47a},
    {"float8_e8m0fnu", 0x56f9e0582b6bb725, 0x42b518bd0a01f5bd},
};

uint64_t Fnv1a(const std::vector<uint32_t>& words) {
  uint64_t value = 0xcbf29ce484222325u;
  for (uint32_t word : words) value = (value ^ word) * 0x100000001b3u;
  return value;
}

uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

DType DTypeNamed(const std::string& name) {
  for (int d = 0; d <= static_cast<int>(DType::kF8E8M0FNU); ++d) {
    if (name == DTypeName(static_cast<DType>(d))) return static_cast<DType>(d);
  }
  ADD_FAILURE() << "no type " << name;
  return DType::kF32;
}

std::vector<float> DecodeAll(const Kernels& kernels, DType dtype) {
  const int64_t size = DTypeSize(dtype);
  const int count = 1 << (8 * size);
  std::vector<uint8_t> codes(count * size);
  for (int c = 0; c < count; ++c) std::memcpy(codes.data() + c * size, &c, size);
  std::vector<float> values(count);
  kernels.decode(dtype)(codes.data(), values.data(), count);
  return values;
}

std::vector<uint32_t> EncodeAll(const Kernels& kernels, DType dtype,
                                const std::vector<uint32_t>& samples) {
  const int64_t size = DTypeSize(dtype);
  std::vector<float> values((samples.size() + kNarrowGroup - 1) / kNarrowGroup * kNarrowGroup);
  std::memcpy(values.data(), samples.data(), samples.size() * sizeof(float));
  std::vector<uint8_t> bytes(samples.size() * size);
  kernels.encode(dtype)(values.data(), bytes.data(), static_cast<int>(samples.size()));
  std::vector<uint32_t> codes(samples.size());
  for (size_t i = 0; i < codes.size(); ++i) {
    std::memcpy(&codes[i], bytes.data() + i * size, size);
  }
  return codes;
}

// The same samples as in narrow_hashes.py.
std::vector<uint32_t> Samples(const std::vector<float>& values) {
  std::vector<double> finite;
  for (float value : values) {
    if (std::isfinite(value) && !std::signbit(value)) finite.push_back(value);
  }
  std::sort(finite.begin(), finite.end());
  finite.push_back(2 * finite.back() - finite[finite.size() - 2]);
  std::vector<uint32_t> near;
  for (int step : {-1, 0, 1}) {
    for (size_t i = 0; i + 1 < finite.size(); ++i) {
      near.push_back(BitsOf(static_cast<float>((finite[i] + finite[i + 1]) / 2)) + step);
    }
  }
  std::vector<uint32_t> samples = near;
  for (uint32_t bits : near) samples.push_back(bits | 0x80000000u);
  for (uint32_t i = 0; i < 1u << 16; ++i) samples.push_back(i * 65521u);
  return samples;
}

TEST(NarrowTest, MatchesMlDtypes) {
  const Kernels* sets[kMaxKernelSets];
  const int set_count = SupportedKernels(sets);
  for (int s = 0; s < set_count; ++s) {
    for (const Expected& expected : kExpected) {
      const DType dtype = DTypeNamed(expected.name);
      const std::vector<float> values = DecodeAll(*sets[s], dtype);
      std::vector<uint32_t> words;
      for (float value : values) words.push_back(std::isnan(value) ? 0x7fc00000u : BitsOf(value));
      EXPECT_EQ(Fnv1a(words), expected.decoded) << sets[s]->name << " " << expected.name;
      std::vector<uint32_t> codes = EncodeAll(*sets[s], dtype, Samples(values));
      for (uint32_t& code : codes) {
        if (std::isnan(values[code])) code = 0xffff;
      }
      EXPECT_EQ(Fnv1a(codes), expected.encoded) << sets[s]->name << " " << expected.name;
    }
  }
}

TEST(NarrowTest, MatchesReferenceToTheBit) {
  const Kernels* sets[kMaxKernelSets];
  const int set_count = SupportedKernels(sets);
  for (int s = 0; s < set_count; ++s) {
    for (const Expected& expected : kExpected) {
      const DType dtype = DTypeNamed(expected.name);
      const std::vector<float> values = DecodeAll(*sets[s], dtype);
      for (uint32_t code = 0; code < values.size(); ++code) {
        const float right = reference::Decode(dtype, code);
        ASSERT_TRUE(std::isnan(right) ? std::isnan(values[code])
                                      : BitsOf(values[code]) == BitsOf(right))
            << sets[s]->name << " " << expected.name << " code " << code << ": " << values[code]
            << ", not " << right;
      }
      const std::vector<uint32_t> samples = Samples(values);
      const std::vector<uint32_t> codes = EncodeAll(*sets[s], dtype, samples);
      for (size_t i = 0; i < samples.size(); ++i) {
        ASSERT_EQ(codes[i], reference::Encode(dtype, FloatOf(samples[i])))
            << sets[s]->name << " " << expected.name << " of " << FloatOf(samples[i]);
      }
    }
  }
}

// Tails are neither read nor written beyond their end.
TEST(NarrowTest, CountsThatAreNotGroups) {
  const Kernels* sets[kMaxKernelSets];
  const int set_count = SupportedKernels(sets);
  for (int s = 0; s < set_count; ++s) {
    for (const Expected& expected : kExpected) {
      const DType dtype = DTypeNamed(expected.name);
      const int64_t size = DTypeSize(dtype);
      for (int count = 1; count <= 3 * kNarrowGroup; ++count) {
        const std::vector<uint8_t> codes(count * size, 0x35);
        const int rounded = (count + kNarrowGroup - 1) / kNarrowGroup * kNarrowGroup;
        std::vector<float> values(rounded);
        sets[s]->decode(dtype)(codes.data(), values.data(), count);
        std::vector<uint8_t> back(count * size + 1, 0xa5);
        sets[s]->encode(dtype)(values.data(), back.data(), count);
        ASSERT_EQ(back.back(), 0xa5) << sets[s]->name << " " << expected.name << " " << count;
        back.pop_back();
        ASSERT_EQ(back, codes) << sets[s]->name << " " << expected.name << " " << count;
      }
    }
  }
}

}  // namespace
}  // namespace dfccl
