// SPDX-License-Identifier: Apache-2.0
// The folds of a block against those of the CPU, bit by bit: every operator of every
// type, all alignments, lengths, threads, and buffers of the accumulation type.
#include "cuda/fold.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/reduce/reduce.h"

namespace dfccl {
namespace gpu {
namespace {

constexpr int kDTypes = static_cast<int>(DType::kF8E8M0FNU) + 1;
constexpr int kOps = static_cast<int>(ReduceOp::kXor) + 1;

// One of the threads of a block that never meet: each run folds one thread's share.
struct LoneThread {
  uint32_t index;
  uint32_t count;
  bool askew;
  uint32_t thread() const { return index; }
  uint32_t threads() const { return count; }
  // The other threads have looked at other buffers.
  bool Any(bool mine) {
    askew |= mine;
    return askew;
  }
};

bool IsNan(DType dtype, const char* element, int64_t size) {
  uint64_t bits = 0;
  std::memcpy(&bits, element, size);
  switch (dtype) {
    case DType::kF32:
      return (bits & 0x7fffffffu) > 0x7f800000u;
    case DType::kF64:
      return (bits & ~(uint64_t{1} << 63)) > uint64_t{0x7ff} << 52;
#define DFCCL_CASE(name, ...)                                                                 \
  case DType::name: {                                                                         \
    const float value = ScalarLanes::Float(__VA_ARGS__::Decode(static_cast<uint32_t>(bits))); \
    return value != value;                                                                    \
  }
      DFCCL_NARROW_FORMATS(DFCCL_CASE, ScalarLanes)
#undef DFCCL_CASE
    default:
      return false;
  }
}

// Complex numbers are pairs of floats.
DType PartOf(DType dtype) {
  return dtype == DType::kC64 ? DType::kF32 : dtype == DType::kC128 ? DType::kF64 : dtype;
}

struct Buffers {
  std::vector<std::vector<char>> memory;
  std::vector<char*> address;
  std::vector<bool> accumulated;

  void Add(int64_t bytes, int64_t askew, bool is_accumulated, std::mt19937* random) {
    memory.emplace_back(bytes + 256);
    for (char& byte : memory.back()) byte = static_cast<char>((*random)());
    char* start = memory.back().data();
    start += (32 - reinterpret_cast<uintptr_t>(start) % 32) % 32;
    address.push_back(start + askew);
    accumulated.push_back(is_accumulated);
  }
};

void Check(DType dtype, ReduceOp op, int sources, int destinations, int64_t count, int64_t askew,
           bool mixed, uint32_t threads, std::mt19937* random) {
  const int64_t size = DTypeSize(dtype);
  const DType wide = AccumulationType(dtype);
  Buffers ours, theirs;
  for (int i = 0; i < sources + destinations; ++i) {
    const bool accumulated = mixed && wide != dtype && i % 2 == 1;
    const int64_t element = accumulated ? DTypeSize(wide) : size;
    // With `mixed`, buffers are not all aligned alike.
    const int64_t shift = (mixed && i == 2 ? askew + 1 : askew) % 8 * element;
    ours.Add(count * element, shift, accumulated, random);
    if (i < sources && dtype != DType::kBool) {
      // Numbers that do not all overflow, and some of everything.
      for (int64_t at = 0; at < count * element; at += 16) {
        if ((*random)() % 4 != 0) ours.address[i][at] = static_cast<char>((*random)() % 3);
      }
    }
    theirs.memory.push_back(ours.memory.back());
    theirs.address.push_back(theirs.memory.back().data() +
                             (ours.address[i] - ours.memory[i].data()));
  }
  const int64_t divisor = op == ReduceOp::kMean && (*random)() % 2 == 0 ? sources : 0;

  std::vector<ReduceSource> from;
  std::vector<ReduceDestination> to;
  std::vector<uint64_t> buffers;
  for (int i = 0; i < sources + destinations; ++i) {
    if (i < sources) {
      from.push_back({theirs.address[i], ours.accumulated[i]});
    } else {
      to.push_back({theirs.address[i], ours.accumulated[i]});
    }
    buffers.push_back(reinterpret_cast<uint64_t>(ours.address[i]) |
                      (ours.accumulated[i] ? kAccumulated : 0));
  }
  dfccl::Reduce({op, dtype, from.data(), sources, to.data(), destinations, count, divisor, false});

  FoldArguments arguments;
  arguments.op = op;
  arguments.dtype = dtype;
  arguments.element_size = static_cast<uint32_t>(size);
  arguments.source_count = static_cast<uint32_t>(sources);
  arguments.destination_count = static_cast<uint32_t>(destinations);
  arguments.buffers = buffers.data();
  arguments.count = count;
  arguments.mean_divisor = divisor;
  bool askew_anywhere = false;
  {
    LoneThread probe = {0, 1, false};
    FoldArguments none = arguments;
    none.count = 0;
    ASSERT_TRUE(Fold(probe, none));
    askew_anywhere = probe.askew;
  }
  for (uint32_t thread = 0; thread < threads; ++thread) {
    LoneThread block = {thread, threads, askew_anywhere};
    ASSERT_TRUE(Fold(block, arguments));
  }

  for (int d = sources; d < sources + destinations; ++d) {
    const DType part = PartOf(ours.accumulated[d] ? wide : dtype);
    const int64_t part_size = DTypeSize(part);
    const int64_t bytes = count * (ours.accumulated[d] ? DTypeSize(wide) : size);
    for (int64_t at = 0; at < bytes; at += part_size) {
      const char* got = ours.address[d] + at;
      const char* wanted = theirs.address[d] + at;
      if (IsNan(part, got, part_size) && IsNan(part, wanted, part_size)) continue;
      ASSERT_EQ(std::memcmp(got, wanted, part_size), 0)
          << ReduceOpName(op) << " of " << count << " " << DTypeName(dtype) << ", " << sources
          << " sources, destination " << d - sources << ", byte " << at << ", askew " << askew
          << (mixed ? ", mixed" : "");
    }
    // Nothing beyond was touched.
    ASSERT_EQ(std::memcmp(ours.address[d] + bytes, theirs.address[d] + bytes, 8), 0);
  }
}

TEST(FoldTest, EveryOperatorOfEveryTypeAsOnTheCpu) {
  std::mt19937 random(1);
  int folds = 0;
  for (int t = 0; t < kDTypes; ++t) {
    for (int o = 0; o < kOps; ++o) {
      const auto dtype = static_cast<DType>(t);
      const auto op = static_cast<ReduceOp>(o);
      if (!IsSupported(op, dtype)) continue;
      ++folds;
      for (int64_t count : {0, 1, 5, 16, 333}) {
        for (int64_t askew : {0, 1, 3}) {
          for (bool mixed : {false, true}) {
            Check(dtype, op, 1 + static_cast<int>(random() % 4), 1 + static_cast<int>(random() % 3),
                  count, askew, mixed, 1 + random() % 5, &random);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
  EXPECT_GT(folds, 100);
}

TEST(FoldTest, SumsOfNarrowTypesAreRoundedOnce) {
  std::mt19937 random(2);
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF8E4M3FN}) {
    for (int sources : {2, 9, 17}) {
      Check(dtype, ReduceOp::kSum, sources, 2, 1000, 0, false, 4, &random);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(FoldTest, NoSourceGivesZeros) {
  for (int64_t size : {1, 2, 4, 8, 16}) {
    alignas(16) char memory[100];
    std::memset(memory, '\x5a', sizeof(memory));
    const uint64_t buffer = reinterpret_cast<uint64_t>(memory + 16);
    FoldArguments arguments = {};
    arguments.dtype = PlainType(size);
    arguments.element_size = static_cast<uint32_t>(size);
    arguments.destination_count = 1;
    arguments.buffers = &buffer;
    arguments.count = 3;
    LoneThread block = {0, 1, false};
    ASSERT_TRUE(Fold(block, arguments));
    for (int64_t i = 0; i < 100; ++i) {
      EXPECT_EQ(memory[i], i >= 16 && i < 16 + 3 * size ? 0 : '\x5a') << i;
    }
  }
}

TEST(FoldTest, RefusesWhatHasNoMeaning) {
  float value[4] = {};
  const uint64_t buffers[3] = {reinterpret_cast<uint64_t>(value), reinterpret_cast<uint64_t>(value),
                               reinterpret_cast<uint64_t>(value)};
  FoldArguments arguments = {};
  arguments.op = ReduceOp::kXor;
  arguments.dtype = DType::kF32;
  arguments.element_size = 4;
  arguments.source_count = 2;
  arguments.destination_count = 1;
  arguments.buffers = buffers;
  arguments.count = 4;
  LoneThread block = {0, 1, false};
  EXPECT_FALSE(Fold(block, arguments));
}

}  // namespace
}  // namespace gpu
}  // namespace dfccl
