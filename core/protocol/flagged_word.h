// SPDX-License-Identifier: Apache-2.0
// Data that says itself that it is there: four bytes and the generation of the use that
// wrote them, loaded and stored at once. A reader polls the data and needs no other word.
//
// Relaxed: the word is all that there is to see, so nothing has to come before or after
// it. What a GPU must give for that is that 8 bytes are loaded and stored as a whole; PTX
// promises so for scalars of 64 bits, and for no more: a vector access is several.
//
// A word is written once in each use of the memory that it is in, and is not cleared
// between uses. Whoever hands the memory on must have heard from all readers of the last
// use that they are over (release and acquire), and give all members the next generation.
// After 2^32 - 1 uses generations begin anew, and words that a short use left alone might
// pass for new ones: then they must be cleared.
#ifndef DFCCL_CORE_PROTOCOL_FLAGGED_WORD_H_
#define DFCCL_CORE_PROTOCOL_FLAGGED_WORD_H_

#include <stdint.h>

#include "core/protocol/atomics.h"

namespace dfccl {

class FlaggedWord {
 public:
  static constexpr uint32_t kBytes = sizeof(uint32_t);  // of data

  // For the next use; no use has generation 0, which is that of cleared words. True:
  // clear all words before.
  static bool NextGeneration(uint32_t* generation) {
    if (++*generation != 0) return false;
    *generation = 1;
    return true;
  }

  DFCCL_HOST_DEVICE void Post(uint32_t data, uint32_t generation) {
    word_.StoreRelaxed(uint64_t{generation} << 32 | data);
  }

  // False: it has not been posted in this use yet.
  DFCCL_HOST_DEVICE bool TryRead(uint32_t generation, uint32_t* data) const {
    const uint64_t word = word_.LoadRelaxed();
    *data = static_cast<uint32_t>(word);
    return word >> 32 == generation;
  }

  // By who has all words of the memory to itself.
  DFCCL_HOST_DEVICE void Clear() { word_.StoreRelaxed(0); }

 private:
  Atomic<uint64_t> word_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_PROTOCOL_FLAGGED_WORD_H_
