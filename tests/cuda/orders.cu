// SPDX-License-Identifier: Apache-2.0
// One kernel for each operation on a shared word that the CUDA daemon uses: what they
// compile to is read by tools/check_kernel.py.
#include "core/protocol/flagged_word.h"
#include "core/protocol/progress.h"
#include "core/protocol/roll.h"
#include "core/protocol/spsc_queue.h"
#include "cuda/thread_block.h"

using dfccl::Atomic;
using dfccl::FlaggedWord;
using dfccl::Plain;
using dfccl::ProgressWord;
using dfccl::Roll;

extern "C" {

__global__ void spsc_push(dfccl::SpscEnds* ends, Plain<uint64_t>* slots, int count) {
  dfccl::SpscProducer<uint64_t> producer(ends, slots, 64);
  while (count-- > 0) producer.TryPush(7);
}
__global__ void spsc_pop(dfccl::SpscEnds* ends, Plain<uint64_t>* slots, uint64_t* value) {
  dfccl::SpscConsumer<uint64_t> consumer(ends, slots, 64);
  consumer.TryPop(value);
}
__global__ void progress_publish(ProgressWord* word) { word->Publish(3); }
__global__ void progress_reached(ProgressWord* word, bool* reached) { *reached = word->Reached(3); }
__global__ void roll_arrive(Roll* roll, bool* takes_part) { *takes_part = roll->Arrive(); }
__global__ void roll_leave(Roll* roll, Roll::Left* left) { *left = roll->Leave(4); }
__global__ void roll_fail(Roll* roll) { roll->Fail(); }
__global__ void roll_quiet(Roll* roll, bool* quiet) { *quiet = roll->Quiet(); }
__global__ void word_ready(Atomic<uint64_t>* ready, uint64_t* value) {
  *value = ready->LoadAcquire();
}
__global__ void flagged_post(FlaggedWord* word) { word->Post(7, 3); }
__global__ void flagged_read(const FlaggedWord* word, uint32_t* data, bool* is_there) {
  *is_there = word->TryRead(3, data);
}
__global__ void bulk_copy(const char* from, const uint64_t* to, int64_t bytes) {
  __shared__ dfccl::gpu::Bulk bulk;
  dfccl::gpu::ThreadBlock block;
  if (block.leader()) block.CopyInBulk(&bulk, from, to, 2, bytes);
}
__global__ void word_done(Atomic<uint64_t>* done) { done->StoreRelease(5); }

}  // extern "C"
