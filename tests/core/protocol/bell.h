// SPDX-License-Identifier: Apache-2.0
// For models: the socket that a doorbell is rung over.
#ifndef DFCCL_TESTS_CORE_PROTOCOL_BELL_H_
#define DFCCL_TESTS_CORE_PROTOCOL_BELL_H_

#include "core/protocol/atomics.h"

namespace dfccl {

class ModelBell {
 public:
  void Ring() {
    mutex_.lock(RL_INFO);
    rung_ = true;
    condition_.notify_one(RL_INFO);
    mutex_.unlock(RL_INFO);
  }
  void Wait() {
    mutex_.lock(RL_INFO);
    while (!rung_) condition_.wait(mutex_, RL_INFO);
    rung_ = false;
    mutex_.unlock(RL_INFO);
  }

 private:
  rl::mutex mutex_;
  rl::condition_variable condition_;
  bool rung_ = false;
};

}  // namespace dfccl

#endif  // DFCCL_TESTS_CORE_PROTOCOL_BELL_H_
