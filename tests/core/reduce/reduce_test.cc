// SPDX-License-Identifier: Apache-2.0
// Every operator on every type against the scalar reference, for every kernel
// set this CPU can run, and the promises of reduce.h about bits.
#include "core/reduce/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/reduce/float_mode.h"
#include "core/reduce/kernels.h"
#include "tests/core/reduce/reference.h"

namespace dfccl {
namespace {

using reference::Bytes;

constexpr int kDTypes = static_cast<int>(DType::kF8E8M0FNU) + 1;
constexpr int kOps = static_cast<int>(ReduceOp::kXor) + 1;

bool IsNarrow(DType dtype) { return AccumulationType(dtype) != dtype; }
bool IsComplex(DType dtype) { return dtype == DType::kC64 || dtype == DType::kC128; }
bool IsFloat(DType dtype) {
  return IsNarrow(dtype) || dtype == DType::kF32 || dtype == DType::kF64;
}
bool IsInt(DType dtype) { return dtype >= DType::kS8 && dtype <= DType::kU64; }

int64_t SizeOf(DType dtype, bool accumulated) {
  return DTypeSize(accumulated ? AccumulationType(dtype) : dtype);
}

// Elements of a type at an address that is `offset` past a cache line.
class Buffer {
 public:
  Buffer(int64_t bytes, int64_t offset) : bytes_(bytes), memory_(bytes + offset + 128) {
    const auto start = reinterpret_cast<uintptr_t>(memory_.data());
    data_ = memory_.data() + (64 - start % 64) % 64 + offset;
    std::fill(memory_.begin(), memory_.end(), uint8_t{0xa5});
  }
  uint8_t* data() { return data_; }
  // Nothing but the buffer itself was written.
  bool Intact() const {
    const auto clean = [](uint8_t byte) { return byte == 0xa5; };
    return std::all_of(memory_.data(), static_cast<const uint8_t*>(data_), clean) &&
           std::all_of(static_cast<const uint8_t*>(data_) + bytes_, memory_.data() + memory_.size(),
                       clean);
  }

 private:
  int64_t bytes_;
  std::vector<uint8_t> memory_;
  uint8_t* data_;
};

// Small numbers, so that products stay finite, with special values strewn in.
template <typename T>
T RandomFloat(std::mt19937_64& random) {
  switch (random() % 16) {
    case 0: {
      const T specials[] = {T(0),
                            -T(0),
                            std::numeric_limits<T>::infinity(),
                            -std::numeric_limits<T>::infinity(),
                            std::numeric_limits<T>::quiet_NaN(),
                            std::numeric_limits<T>::denorm_min(),
                            std::numeric_limits<T>::max(),
                            std::numeric_limits<T>::min() / 3};
      return specials[random() % 8];
    }
    case 1:
      return T(random() % 2 == 0 ? 0.0 : -0.0);
    default:
      return static_cast<T>(
          std::ldexp(static_cast<double>(static_cast<int64_t>(random() >> 10)) - 9e15,
                     static_cast<int>(random() % 5) - 52));
  }
}

void Fill(DType dtype, bool accumulated, uint8_t* data, int64_t count, std::mt19937_64& random) {
  const DType type = accumulated ? AccumulationType(dtype) : dtype;
  for (int64_t i = 0; i < count; ++i) {
    if (type == DType::kF32) {
      reference::Put(data, i, RandomFloat<float>(random));
    } else if (type == DType::kF64) {
      reference::Put(data, i, RandomFloat<double>(random));
    } else if (type == DType::kC64) {
      reference::Put(data, 2 * i, RandomFloat<float>(random));
      reference::Put(data, 2 * i + 1, RandomFloat<float>(random));
    } else if (type == DType::kC128) {
      reference::Put(data, 2 * i, RandomFloat<double>(random));
      reference::Put(data, 2 * i + 1, RandomFloat<double>(random));
    } else if (type == DType::kBool) {
      const uint8_t bools[] = {0, 0, 0, 1, 1, 1, 2, 255};
      data[i] = bools[random() % 8];
    } else {
      const uint64_t bits = random();
      std::memcpy(data + i * DTypeSize(type), &bits, DTypeSize(type));
    }
  }
}

// Equal as values: same bits, or both NaN.
bool Same(DType dtype, bool accumulated, const uint8_t* a, const uint8_t* b, int64_t i) {
  const DType type = accumulated ? AccumulationType(dtype) : dtype;
  const int64_t size = DTypeSize(type);
  if (std::memcmp(a + i * size, b + i * size, size) == 0) return true;
  const auto same = [](auto x, auto y) {
    return (std::isnan(x) && std::isnan(y)) || (x == y && std::signbit(x) == std::signbit(y));
  };
  using reference::Get;
  switch (type) {
    case DType::kF32:
      return same(Get<float>(a, i), Get<float>(b, i));
    case DType::kF64:
      return same(Get<double>(a, i), Get<double>(b, i));
    case DType::kC64:
      return same(Get<float>(a, 2 * i), Get<float>(b, 2 * i)) &&
             same(Get<float>(a, 2 * i + 1), Get<float>(b, 2 * i + 1));
    case DType::kC128:
      return same(Get<double>(a, 2 * i), Get<double>(b, 2 * i)) &&
             same(Get<double>(a, 2 * i + 1), Get<double>(b, 2 * i + 1));
    default:
      break;
  }
  if (!IsNarrow(type)) return false;
  const auto decode = [&](const uint8_t* p) {
    return reference::Decode(type, size == 1 ? Get<uint8_t>(p, i) : Get<uint16_t>(p, i));
  };
  return std::isnan(decode(a)) && std::isnan(decode(b));
}

struct Case {
  ReduceOp op;
  DType dtype;
  int64_t count;
  int sources;
  int destinations;
  bool mixed = false;  // every other source and destination is accumulated
  bool streaming = false;
  int64_t divisor = 0;
  bool in_place = false;  // destination d is source d, where the types allow it
  bool aligned = false;
};

void Check(const Kernels& kernels, const Case& c, uint64_t seed) {
  std::mt19937_64 random(seed);
  const bool narrow = IsNarrow(c.dtype);
  std::vector<Buffer> buffers;
  std::vector<Bytes> originals;
  std::vector<ReduceSource> sources;
  std::vector<const uint8_t*> original_data;
  std::vector<bool> accumulated;
  buffers.reserve(c.sources + c.destinations);
  for (int s = 0; s < c.sources; ++s) {
    const bool wide = c.mixed && s % 2 == 0;
    const int64_t bytes = c.count * SizeOf(c.dtype, wide);
    buffers.emplace_back(bytes, c.aligned ? 0 : random() % 64);
    Fill(c.dtype, wide, buffers.back().data(), c.count, random);
    originals.emplace_back(buffers.back().data(), buffers.back().data() + bytes);
    sources.push_back({buffers.back().data(), wide});
    accumulated.push_back(wide);
  }
  for (const Bytes& original : originals) original_data.push_back(original.data());
  std::vector<ReduceDestination> destinations;
  for (int d = 0; d < c.destinations; ++d) {
    const bool wide = c.mixed && d % 2 == 0;
    if (c.in_place && d < c.sources) {
      destinations.push_back({buffers[d].data(), wide});
      continue;
    }
    buffers.emplace_back(c.count * SizeOf(c.dtype, wide), c.aligned ? 0 : random() % 64);
    destinations.push_back({buffers.back().data(), wide});
  }

  ReduceWith(kernels, {c.op, c.dtype, sources.data(), c.sources, destinations.data(),
                       c.destinations, c.count, c.divisor, c.streaming});

  // The reference must not be folded under flushed subnormals either; gtest runs
  // in the default mode.
  Bytes narrow_value(c.count * DTypeSize(c.dtype)), wide_value(c.count * 16);
  for (int64_t i = 0; i < c.count; ++i) {
    if (narrow) {
      const float value =
          reference::NarrowElement(c.op, c.dtype, original_data, accumulated, i, c.divisor);
      reference::Put(wide_value.data(), i, value);
      const uint32_t code = reference::Encode(c.dtype, value);
      std::memcpy(narrow_value.data() + i * DTypeSize(c.dtype), &code, DTypeSize(c.dtype));
    } else {
      reference::WideElement(c.op, c.dtype, original_data, i, c.divisor, wide_value.data());
    }
  }
  const std::string what = std::string(kernels.name) + " " + ReduceOpName(c.op) + " " +
                           DTypeName(c.dtype) + " count " + std::to_string(c.count) + " sources " +
                           std::to_string(c.sources) + " destinations " +
                           std::to_string(c.destinations) + " seed " + std::to_string(seed);
  for (int d = 0; d < c.destinations; ++d) {
    const bool wide = destinations[d].accumulated;
    const Bytes& expected = narrow && !wide ? narrow_value : wide_value;
    const auto* got = static_cast<const uint8_t*>(destinations[d].data);
    for (int64_t i = 0; i < c.count; ++i) {
      ASSERT_TRUE(Same(c.dtype, wide, got, expected.data(), i))
          << what << " destination " << d << " element " << i;
    }
  }
  for (const Buffer& buffer : buffers) ASSERT_TRUE(buffer.Intact()) << what;
}

std::vector<const Kernels*> AllKernels() {
  const Kernels* sets[kMaxKernelSets];
  const int count = SupportedKernels(sets);
  return std::vector<const Kernels*>(sets, sets + count);
}

template <typename Visit>
void ForEachSupported(Visit visit) {
  for (int d = 0; d < kDTypes; ++d) {
    for (int o = 0; o < kOps; ++o) {
      const auto op = static_cast<ReduceOp>(o);
      const auto dtype = static_cast<DType>(d);
      if (IsSupported(op, dtype)) visit(op, dtype);
    }
  }
}

TEST(ReduceTest, SupportedPairs) {
  for (int d = 0; d < kDTypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    const bool numeric = dtype != DType::kBool;
    EXPECT_EQ(IsSupported(ReduceOp::kSum, dtype), numeric) << DTypeName(dtype);
    EXPECT_EQ(IsSupported(ReduceOp::kProd, dtype), numeric) << DTypeName(dtype);
    EXPECT_EQ(IsSupported(ReduceOp::kMean, dtype), IsFloat(dtype) || IsComplex(dtype));
    EXPECT_EQ(IsSupported(ReduceOp::kMin, dtype), !IsComplex(dtype)) << DTypeName(dtype);
    EXPECT_EQ(IsSupported(ReduceOp::kMax, dtype), !IsComplex(dtype)) << DTypeName(dtype);
    for (ReduceOp op : {ReduceOp::kAnd, ReduceOp::kOr, ReduceOp::kXor}) {
      EXPECT_EQ(IsSupported(op, dtype), IsInt(dtype) || !numeric) << DTypeName(dtype);
    }
  }
}

TEST(ReduceTest, NamesAndSizesDiffer) {
  EXPECT_STREQ(KindName(Kind::kAllReduce), "all_reduce");
  std::vector<std::string> names;
  for (int o = 0; o < kOps; ++o) names.push_back(ReduceOpName(static_cast<ReduceOp>(o)));
  for (int d = 0; d < kDTypes; ++d) names.push_back(DTypeName(static_cast<DType>(d)));
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::unique(names.begin(), names.end()), names.end());
  EXPECT_EQ(DTypeSize(DType::kC128), 16);
  EXPECT_EQ(DTypeSize(DType::kF8E5M2), 1);
}

TEST(ReduceTest, SmallCounts) {
  for (const Kernels* kernels : AllKernels()) {
    ForEachSupported([&](ReduceOp op, DType dtype) {
      for (int64_t count = 0; count <= 70; ++count) {
        const int sources = static_cast<int>(1 + count % 9);
        Check(*kernels, {op, dtype, count, sources, static_cast<int>(1 + count % 3)}, count);
      }
    });
  }
}

TEST(ReduceTest, SourcesAndDestinations) {
  for (const Kernels* kernels : AllKernels()) {
    ForEachSupported([&](ReduceOp op, DType dtype) {
      for (int members = 1; members <= 17; ++members) {
        const int64_t divisor = op == ReduceOp::kMean ? members : 0;
        Case c = {op, dtype, 203, members, 18 - members};
        c.divisor = divisor;
        Check(*kernels, c, members);
        c.mixed = true;
        Check(*kernels, c, members);
      }
    });
  }
}

TEST(ReduceTest, LargeOddCounts) {
  for (const Kernels* kernels : AllKernels()) {
    ForEachSupported([&](ReduceOp op, DType dtype) {
      for (bool streaming : {false, true}) {
        for (bool aligned : {false, true}) {
          Case c = {op, dtype, 2531, 3, 2};
          c.streaming = streaming;
          c.aligned = aligned;
          c.divisor = op == ReduceOp::kMean ? 3 : 0;
          Check(*kernels, c, 7);
        }
      }
    });
  }
}

TEST(ReduceTest, InPlace) {
  for (const Kernels* kernels : AllKernels()) {
    ForEachSupported([&](ReduceOp op, DType dtype) {
      for (bool streaming : {false, true}) {
        Case c = {op, dtype, 1291, 10, 10};
        c.in_place = true;
        c.streaming = streaming;
        Check(*kernels, c, 3);
        c.mixed = true;
        c.aligned = true;
        Check(*kernels, c, 4);
      }
    });
  }
}

// Bits are the same for every kernel set, with streaming stores, at any address
// and however the range is split.
TEST(ReduceTest, BitsDependOnArgumentsOnly) {
  constexpr int64_t kCount = 1777;
  constexpr int kSources = 5;
  ForEachSupported([&](ReduceOp op, DType dtype) {
    const int64_t size = DTypeSize(dtype);
    std::mt19937_64 random(11);
    std::vector<Bytes> data;
    for (int s = 0; s < kSources; ++s) {
      data.emplace_back(kCount * size + 64);
      Fill(dtype, false, data.back().data(), kCount, random);
    }
    const int64_t divisor = op == ReduceOp::kMean ? kSources : 0;
    const auto fold = [&](const Kernels& kernels, int64_t begin, int64_t end, uint8_t* to,
                          bool streaming) {
      std::vector<ReduceSource> sources;
      for (const Bytes& bytes : data) sources.push_back({bytes.data() + begin * size, false});
      const ReduceDestination destination = {to + begin * size, false};
      ReduceWith(kernels, {op, dtype, sources.data(), kSources, &destination, 1, end - begin,
                           divisor, streaming});
    };
    Buffer whole(kCount * size, 0);
    fold(*AllKernels()[0], 0, kCount, whole.data(), false);
    for (const Kernels* kernels : AllKernels()) {
      for (int round = 0; round < 6; ++round) {
        Buffer split(kCount * size, round % 2 == 0 ? 0 : random() % 64);
        for (int64_t begin = 0; begin < kCount;) {
          const int64_t step = round < 2 ? kCount : static_cast<int64_t>(1 + random() % 300);
          const int64_t end = std::min(kCount, begin + step);
          fold(*kernels, begin, end, split.data(), round % 3 != 0);
          begin = end;
        }
        for (int64_t i = 0; i < kCount; ++i) {
          ASSERT_TRUE(Same(dtype, false, whole.data(), split.data(), i))
              << kernels->name << " " << ReduceOpName(op) << " " << DTypeName(dtype) << " " << i;
        }
      }
    }
  });
}

TEST(ReduceTest, OneSourceKeepsEveryBit) {
  for (int d = 0; d < kDTypes; ++d) {
    const auto dtype = static_cast<DType>(d);
    if (dtype == DType::kBool) continue;  // always written as 0 or 1
    Bytes from(301 * DTypeSize(dtype)), to(from.size());
    std::mt19937_64 random(5);
    for (uint8_t& byte : from) byte = static_cast<uint8_t>(random());
    const ReduceSource source = {from.data(), false};
    const ReduceDestination destination = {to.data(), false};
    Reduce({ReduceOp::kSum, dtype, &source, 1, &destination, 1, 301, 0, false});
    EXPECT_EQ(from, to) << DTypeName(dtype);
  }
}

#if defined(__x86_64__)
// XLA's threads flush subnormals; a fold gives the same bits on them.
TEST(ReduceTest, SubnormalsSurviveFlushingThreads) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  float result = 0;
  const ReduceSource sources[] = {{&tiny, false}, {&tiny, false}};
  const ReduceDestination destination = {&result, false};
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);
  Reduce({ReduceOp::kSum, DType::kF32, sources, 2, &destination, 1, 1, 0, false});
  const unsigned after = _mm_getcsr();
  _mm_setcsr(saved);
  uint32_t bits;
  std::memcpy(&bits, &result, sizeof(bits));
  EXPECT_EQ(bits, 2u);
  EXPECT_EQ(after & 0x8040, 0x8040u);
}
#endif

}  // namespace
}  // namespace dfccl
