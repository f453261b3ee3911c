// SPDX-License-Identifier: Apache-2.0
// What goes over a wire: frames, each a fixed header in little-endian order, then
// `header_bytes` of the message's header, then `bytes` of its payload. The frames
// of different messages may alternate; those of one have the same stream.
#ifndef DFCCL_CORE_TRANSPORT_FRAME_H_
#define DFCCL_CORE_TRANSPORT_FRAME_H_

#include <cstdint>
#include <cstring>

#include "core/hash.h"

namespace dfccl {

enum class FrameKind : uint8_t {
  kMessage = 1,  // the first of a message has header_bytes > 0
  kAbort,        // the rest of the stream's message does not come
  kHeartbeat,
  kGoodbye,  // the last frame: the process ends in order
  // As kMessage, but in place of `bytes` of payload come 8 that say where they lie in the
  // sender's memory.
  kLent,
};

struct Frame {
  static constexpr uint32_t kSize = 24;
  // So many messages of one process may be in the middle at once.
  static constexpr uint32_t kStreams = 64;
  static constexpr uint64_t kMostPayload = uint64_t{1} << 48;

  FrameKind kind = FrameKind::kMessage;
  uint16_t header_bytes = 0;
  uint32_t stream = 0;
  uint32_t bytes = 0;
  uint64_t payload_bytes = 0;  // of the whole message

  // Frames are numbered by both ends, and the number goes into the check word: so a
  // lost, doubled or damaged header is noticed.
  void Encode(uint64_t number, char* out) const {
    Put(Word0(), out);
    Put(bytes | uint64_t{Check(number)} << 32, out + 8);
    Put(payload_bytes, out + 16);
  }

  // False if the check word is wrong.
  bool Decode(uint64_t number, const char* in) {
    const uint64_t word0 = Get(in);
    const uint64_t word1 = Get(in + 8);
    kind = static_cast<FrameKind>(word0 & 0xff);
    header_bytes = static_cast<uint16_t>(word0 >> 16);
    stream = static_cast<uint32_t>(word0 >> 32);
    bytes = static_cast<uint32_t>(word1);
    payload_bytes = Get(in + 16);
    return word0 == Word0() && word1 >> 32 == Check(number);
  }

 private:
  uint64_t Word0() const {
    return static_cast<uint64_t>(kind) | uint64_t{header_bytes} << 16 | uint64_t{stream} << 32;
  }
  uint32_t Check(uint64_t number) const {
    return static_cast<uint32_t>(
        MixBits(Word0() * 0x9e3779b97f4a7c15u ^ bytes * 0xd1342543de82ef95u ^
                payload_bytes * 0xaf251af3b0f025b5u ^ (number + 1) * 0xb564ef22ec7aece5u));
  }
  static void Put(uint64_t value, char* out) {
    for (int i = 0; i < 8; ++i) out[i] = static_cast<char>(value >> (8 * i));
  }
  static uint64_t Get(const char* in) {
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value |= uint64_t{static_cast<unsigned char>(in[i])} << (8 * i);
    return value;
  }
};

}  // namespace dfccl

#endif  // DFCCL_CORE_TRANSPORT_FRAME_H_
