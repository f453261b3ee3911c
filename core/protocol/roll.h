// SPDX-License-Identifier: Apache-2.0
// Who has come to a collective, who has left it, and whether it has failed, in one
// word: so everybody sees these in one order, without fences on the way of data.
//
//   a member                          whoever fails the collective
//   Arrive(), then publishes its      Fail()
//     buffers
//   moves data, while !Failed()
//   Leave(): touches nothing any more
//   failed: waits until Quiet(), then its buffers are its own again
//
// A member that arrives after Fail() is told so and must leave without touching
// anything. So from the moment at which all who have come have left, nobody touches
// a buffer of theirs.
#ifndef DFCCL_CORE_PROTOCOL_ROLL_H_
#define DFCCL_CORE_PROTOCOL_ROLL_H_

#include <stdint.h>

#include "core/protocol/atomics.h"

namespace dfccl {

class alignas(kCacheLine) Roll {
 public:
  // False: the collective has failed.
  DFCCL_HOST_DEVICE bool Arrive() { return (word_.FetchAddAcqRel(kOneArrived) & kFailed) == 0; }

  DFCCL_HOST_DEVICE void Fail() { word_.FetchOrAcqRel(kFailed); }
  // Relaxed: the word is all that a member wants to know.
  DFCCL_HOST_DEVICE bool Failed() const { return (word_.LoadRelaxed() & kFailed) != 0; }

  enum class Left : uint8_t { kOthersRemain, kLast, kFailed };

  // By a member that has arrived, of `expected`. Release and acquire: partners are the
  // other members' Leave and Quiet. kLast: nobody uses what the members shared any
  // more. kFailed: the collective has failed, by now.
  DFCCL_HOST_DEVICE Left Leave(uint32_t expected) {
    const uint64_t word = word_.FetchAddAcqRel(kOneGone) + kOneGone;
    if ((word & kFailed) != 0) return Left::kFailed;
    return static_cast<uint32_t>(word) == expected ? Left::kLast : Left::kOthersRemain;
  }

  // After Fail: all who came have left.
  DFCCL_HOST_DEVICE bool Quiet() const {
    const uint64_t word = word_.LoadAcquire();
    return static_cast<uint32_t>((word & ~kFailed) >> 32) == static_cast<uint32_t>(word);
  }

  // By who was told kLast: for the next use.
  DFCCL_HOST_DEVICE void Reset() { word_.StoreRelaxed(0); }

 private:
  static constexpr uint64_t kFailed = uint64_t{1} << 63;
  static constexpr uint64_t kOneArrived = uint64_t{1} << 32;
  static constexpr uint64_t kOneGone = 1;

  Atomic<uint64_t> word_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_PROTOCOL_ROLL_H_
