// SPDX-License-Identifier: Apache-2.0
// Members' parts that the daemons of GPUs cannot carry out, because members are in other
// processes or on GPUs without access to each other's memory: the host's runtime
// (core/runtime.h) does, in host memory. A stream copies the operand there and says so by
// a word; a thread that sleeps in between looks for that, submits the part, and what its
// end calls writes the word for which the stream waits before it fetches the result.
#ifndef DFCCL_CUDA_RELAY_H_
#define DFCCL_CUDA_RELAY_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/runtime.h"
#include "core/status.h"
#include "cuda/layout.h"

namespace dfccl {
namespace gpu {

class Relay {
 public:
  struct End {
    uint32_t operation = 0;
    Status status;
  };

  Relay() : thread_([this] { Run(); }) {}
  ~Relay() { Stop(Status(StatusCode::kAborted, "the relay has ended"), /*limit_ns=*/0); }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // To be submitted when words->ready has come to `sequence`; words->done will then. Source,
  // result and the arrays of a ragged exchange are in host memory. `operation` is the
  // caller's name for it, `sequence` is no other part's.
  void Add(uint32_t operation, OperationWords* words, uint64_t sequence,
           const Submission& submission, const RaggedArrays* ragged);

  // Ends it with an error. False: it has ended. Not to be called with a lock held that is
  // taken by what calls Add or TakeEnds.
  bool Cancel(uint64_t sequence, const Status& status);

  // Whether it has been submitted, and so is in the runtime's report.
  bool IsSubmitted(uint64_t sequence);

  // Parts that have ended since the last call.
  std::vector<End> TakeEnds();

  // Cancels everything. False: the runtime still has some of it after `limit_ns`.
  bool Stop(const Status& status, int64_t limit_ns);

 private:
  struct Part;

  void Run();
  void Submit(const std::shared_ptr<Part>& part, bool linger, std::unique_lock<std::mutex>& lock);
  void Finish(Part* part);
  void EndPart(Part* part, const Status& status);

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::map<uint64_t, std::shared_ptr<Part>> parts_;  // that have not ended, by sequence
  std::vector<std::shared_ptr<Part>> awaiting_;      // of these, whose operand is not there
  std::vector<End> ends_;
  std::thread thread_;
};

}  // namespace gpu
}  // namespace dfccl

#endif  // DFCCL_CUDA_RELAY_H_
