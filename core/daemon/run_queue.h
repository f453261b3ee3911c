// SPDX-License-Identifier: Apache-2.0
// The daemons that any thread may run, in lanes: a daemon goes where it last moved
// much data, so that its next share is found in the cache of that core. A thread
// looks into the lane of its own core first, then into the others.
#ifndef DFCCL_CORE_DAEMON_RUN_QUEUE_H_
#define DFCCL_CORE_DAEMON_RUN_QUEUE_H_

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "core/daemon/daemon.h"
#include "core/protocol/bounded_queue.h"

namespace dfccl {

class RunQueue {
 public:
  // Room for `capacity` daemons (a power of two), for threads on `cores` cores.
  RunQueue(uint64_t capacity, int cores) {
    int lanes = 1;
    while (lanes < cores && lanes < kMostLanes) lanes *= 2;
    for (int i = 0; i < lanes; ++i) {
      lanes_.push_back(std::make_unique<BoundedQueue<Daemon*>>(capacity / lanes));
    }
  }

  // Never full for long: a daemon is in the queue at most once.
  void Push(Daemon* daemon) {
    for (size_t lane = daemon->core.LoadRelaxed(); !Lane(lane).TryPush(daemon); ++lane) {
      std::this_thread::yield();
    }
  }

  // False when empty; see bounded_queue.h.
  bool TryPop(Daemon** daemon) {
    const size_t own = static_cast<size_t>(std::max(0, sched_getcpu()));
    for (size_t i = 0; i < lanes_.size(); ++i) {
      if (Lane(own + i).TryPop(daemon)) return true;
    }
    return false;
  }

  uint64_t ApproxSize() const {
    uint64_t size = 0;
    for (const auto& lane : lanes_) size += lane->ApproxSize();
    return size;
  }

 private:
  static constexpr int kMostLanes = 16;

  BoundedQueue<Daemon*>& Lane(size_t index) { return *lanes_[index & (lanes_.size() - 1)]; }

  std::vector<std::unique_ptr<BoundedQueue<Daemon*>>> lanes_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_RUN_QUEUE_H_
