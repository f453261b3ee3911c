// SPDX-License-Identifier: Apache-2.0
// The hash behind identities. It leaves the process (members of one instance
// must compute the same value anywhere), so it is ours and fixed: no std::hash,
// no seed, no dependence on byte order of strings' words or on pointer values.
#ifndef DFCCL_CORE_HASH_H_
#define DFCCL_CORE_HASH_H_

#include <cstdint>
#include <string_view>

namespace dfccl {

// A bijection on 64 bits in which every input bit flips about half of the
// output bits: xor-shifts spread high bits down, odd multipliers spread low
// bits up.
inline uint64_t MixBits(uint64_t value) {
  value ^= value >> 32;
  value *= 0xd6e8feb86659fd93u;
  value ^= value >> 29;
  value *= 0xa3b195354a39b70du;
  value ^= value >> 32;
  return value;
}

// Two independent 64-bit lanes that absorb one word after the other. As a lane
// is a bijection of its state for each word and of the word for each state, two
// inputs of equal length that differ in one word differ in both lanes, and
// others collide with probability about 2^-128.
struct Hash128 {
  uint64_t hi = 0x243f6a8885a308d3u;  // the first fraction bits of pi
  uint64_t lo = 0x13198a2e03707344u;

  Hash128& Add(uint64_t word) {
    hi = MixBits(hi ^ word) + 0xa4093822299f31d1u;
    lo = MixBits(lo + word * 0x9e3779b97f4a7c15u) ^ 0x082efa98ec4e6c89u;
    return *this;
  }
  Hash128& Add(std::string_view text) {
    Add(text.size());
    uint64_t word = 0;
    for (size_t i = 0; i < text.size(); ++i) {
      word |= static_cast<uint64_t>(static_cast<unsigned char>(text[i])) << (8 * (i % 8));
      if (i % 8 == 7 || i + 1 == text.size()) {
        Add(word);
        word = 0;
      }
    }
    return *this;
  }
};

}  // namespace dfccl

#endif  // DFCCL_CORE_HASH_H_
