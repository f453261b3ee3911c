// SPDX-License-Identifier: Apache-2.0
// Quit and restart of one daemon with its submission queue, its wake list and
// the run queue: when all threads are done, driving what is on the run queue
// must have handled every submission and wake-up; only one thread drives at a
// time and sees what the driver before it wrote; and the run queue, which has
// room for one entry, is never full.
#include "core/protocol/bounded_queue.h"
#include "core/protocol/lifecycle.h"
#include "core/protocol/wake_list.h"
#include "tests/core/protocol/model.h"

namespace dfccl {
namespace {

struct Daemon {
  Lifecycle lifecycle;
  BoundedQueue<int> submissions{4};
  WakeList wake_list;
  BoundedQueue<Daemon*> run_queue{1};
  Plain<int> handled;  // the driver's own state

  Daemon() { handled.Store(0); }

  void PutOnRunQueue() { RL_ASSERT(run_queue.TryPush(this)); }

  void RunQueued() {
    Daemon* daemon;
    if (run_queue.TryPop(&daemon) && daemon->lifecycle.TryBeginRun()) daemon->Drive();
  }

  // Handles at most two things, then leaves the rest to the run queue.
  void Drive() {
    for (int budget = 2;;) {
      int work = 0;
      int submission;
      if (submissions.TryPop(&submission)) ++work;
      for (WakeNode* node = wake_list.TakeAll(); node != nullptr; node = node->next.Load()) ++work;
      handled.Store(handled.Load() + work);
      budget -= work;
      if (budget <= 0) {
        if (lifecycle.Reschedule()) PutOnRunQueue();
        return;
      }
      if (work == 0 && lifecycle.TryPark()) return;
    }
  }

  void Submit(bool willing_to_drive) {
    RL_ASSERT(submissions.TryPush(1));
    Tell(willing_to_drive);
  }

  void Wake(WakeNode* node, bool willing_to_drive) {
    wake_list.Push(node);
    Tell(willing_to_drive);
  }

  void Tell(bool willing_to_drive) {
    if (willing_to_drive) {
      if (lifecycle.TryClaim()) Drive();
    } else {
      if (lifecycle.Schedule()) PutOnRunQueue();
    }
  }

  // When all threads are done.
  void ExpectHandled(int count) {
    Daemon* daemon;
    while (run_queue.TryPop(&daemon)) {
      if (lifecycle.TryBeginRun()) Drive();
    }
    RL_ASSERT(lifecycle.state() == Lifecycle::State::kParked);
    RL_ASSERT(handled.Load() == count);
  }
};

// Submitters leave the daemon to a worker.
struct ScheduleModel : rl::test_suite<ScheduleModel, 3> {
  Daemon daemon;
  WakeNode node;
  void thread(unsigned index) {
    if (index == 0) {
      daemon.Submit(false);
      daemon.Submit(false);
    } else if (index == 1) {
      daemon.Wake(&node, false);
      daemon.RunQueued();
    } else {
      for (int i = 0; i < 3; ++i) daemon.RunQueued();
    }
  }
  void after() { daemon.ExpectHandled(3); }
};

// Submitters drive when they can, also while the daemon is on the run queue.
struct ClaimModel : rl::test_suite<ClaimModel, 3> {
  Daemon daemon;
  WakeNode node;
  void thread(unsigned index) {
    if (index == 0) {
      daemon.Submit(true);
      daemon.Submit(false);
    } else if (index == 1) {
      daemon.Wake(&node, false);
      daemon.Submit(true);
    } else {
      for (int i = 0; i < 2; ++i) daemon.RunQueued();
    }
  }
  void after() { daemon.ExpectHandled(4); }
};

}  // namespace
}  // namespace dfccl

int main(int argc, char** argv) {
  using namespace dfccl;
  const bool no_fault = ExploreRandom<ScheduleModel>(30000) && ExploreRandom<ClaimModel>(30000) &&
                        ExploreBounded<ClaimModel>(1);
  return ModelExit(argc, argv, no_fault);
}
