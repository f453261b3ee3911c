// SPDX-License-Identifier: Apache-2.0
// The place of a daemon's running context. A task's dynamic context stays here
// when the task is preempted, and is saved only when another task needs the
// place, and only if it has changed since it was loaded.
#ifndef DFCCL_CORE_DAEMON_CONTEXT_SLOT_H_
#define DFCCL_CORE_DAEMON_CONTEXT_SLOT_H_

#include <cstdint>

#include "core/daemon/counter.h"
#include "core/daemon/operation.h"
#include "core/daemon/record.h"
#include "core/protocol/context.h"

namespace dfccl {

// Used by whoever drives the daemon; reports read the counters.
class ContextSlot {
 public:
  // Whose context is here: the task that ran last, if it has not finished.
  Operation* resident() const { return resident_; }
  DynamicContext& context() { return context_; }
  // To be set when the context changes.
  bool* changed() { return &changed_; }

  // Makes `operation` the resident. A task that has to go is thereby preempted.
  void Load(Operation* operation) {
    if (resident_ == operation) return;
    if (resident_ != nullptr) {
      preemptions_.Add(1);
      resident_->slot->preemptions.Add(1);
      if (changed_) {
        resident_->saved = context_;
        saves_.Add(1);
      }
    }
    if (operation->started) loads_.Add(1);
    operation->started = true;
    context_ = operation->saved;
    changed_ = false;
    resident_ = operation;
  }

  // The resident has finished.
  void Clear() { resident_ = nullptr; }

  uint64_t preemptions() const { return preemptions_.Load(); }
  uint64_t saves() const { return saves_.Load(); }
  uint64_t loads() const { return loads_.Load(); }

 private:
  Operation* resident_ = nullptr;
  DynamicContext context_ = {};
  bool changed_ = false;
  Counter preemptions_;
  Counter saves_;
  Counter loads_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_CONTEXT_SLOT_H_
