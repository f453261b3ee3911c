// SPDX-License-Identifier: Apache-2.0
// How long a task polls at a wait step before its daemon turns to another task
// (two-phase blocking). A pure policy, one object per daemon.
//
// Members drift to the same collective without talking to each other: the front
// of a daemon's queue polls longest, a wait that was passed by polling makes
// the daemon patient, a wait in vain makes it impatient. Polling pays only if
// the awaited member can run meanwhile, so the patience is capped by the share
// of the daemons that can run at the same time.
#ifndef DFCCL_CORE_PROTOCOL_STICKINESS_H_
#define DFCCL_CORE_PROTOCOL_STICKINESS_H_

#include <stdint.h>

#include "core/protocol/atomics.h"

namespace dfccl {

class Stickiness {
 public:
  // `runners` threads run `daemons` daemons.
  DFCCL_HOST_DEVICE void Resize(uint32_t runners, uint32_t daemons) {
    cap_ = daemons <= runners ? kMostPolls : kMostPolls * runners / daemons;
    if (cap_ == 0) cap_ = 1;
    if (patience_ > cap_) patience_ = cap_;
  }

  // Polls that a task may spend with `position` unfinished tasks before it.
  // When patience is gone, one task in kProbePeriod still polls a little, so
  // that the daemon notices when polling pays again.
  DFCCL_HOST_DEVICE uint32_t Budget(uint32_t position) {
    const uint32_t budget = position < 32 ? patience_ >> position : 0;
    if (budget > 0 || ++probe_ % kProbePeriod != 0) return budget;
    return cap_ < kProbePolls ? cap_ : kProbePolls;
  }

  // A wait was passed after `polls` > 0 polls.
  DFCCL_HOST_DEVICE void Succeeded(uint32_t polls) {
    const uint32_t wish = polls < kMostPolls ? kSuccessFactor * polls : kMostPolls;
    if (wish > patience_) patience_ = wish < cap_ ? wish : cap_;
  }

  // A wait spent its budget.
  DFCCL_HOST_DEVICE void Failed() { patience_ -= (patience_ + 3) / 4; }

  DFCCL_HOST_DEVICE uint32_t patience() const { return patience_; }

 private:
  // About 3 us on current CPUs, what it costs to stop a thread and wake it.
  static constexpr uint32_t kMostPolls = 64;
  static constexpr uint32_t kSuccessFactor = 4;
  static constexpr uint32_t kProbePolls = 4;
  static constexpr uint32_t kProbePeriod = 32;

  uint32_t cap_ = kMostPolls;
  uint32_t patience_ = 8;
  uint32_t probe_ = 0;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_PROTOCOL_STICKINESS_H_
