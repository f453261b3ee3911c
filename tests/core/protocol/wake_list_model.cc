// SPDX-License-Identifier: Apache-2.0
// WakeList with two pushing threads and its consumer: every node comes out once
// per push, pushes of one thread in order, one push of each batch is told that
// it was the first, and a node may be pushed again as soon as its owner is woken.
#include "core/protocol/wake_list.h"
#include "tests/core/protocol/model.h"

namespace dfccl {
namespace {

struct WakeListModel : rl::test_suite<WakeListModel, 3> {
  struct Task : WakeNode {
    Plain<int> pushes;  // guarded by the list
    Atomic<int> taken;
  };
  static constexpr int kPushers = 2;
  static constexpr int kRounds = 2;

  WakeList list;
  Task tasks[kPushers][2];
  int first_pushes = 0;
  int batches = 0;

  void Push(Task* task, int round) {
    task->pushes.Store(round);
    if (list.Push(task)) ++first_pushes;
  }

  void thread(unsigned index) {
    if (index < kPushers) {
      Task* task = tasks[index];
      for (int round = 1; round <= kRounds; ++round) {
        Push(&task[0], round);
        Push(&task[1], round);
        // Acquire: partner is the release in Consume.
        while (round < kRounds && task[1].taken.LoadAcquire() != round) SpinPause();
        while (round < kRounds && task[0].taken.LoadAcquire() != round) SpinPause();
      }
    } else {
      Consume();
    }
  }

  void Consume() {
    int counts[kPushers][2] = {};
    for (int left = kPushers * 2 * kRounds; left > 0;) {
      WakeNode* node = list.TakeAll();
      if (node == nullptr) {
        SpinPause();
        continue;
      }
      ++batches;
      while (node != nullptr) {
        Task* task = static_cast<Task*>(node);
        node = node->next.Load();
        const int pusher = task < tasks[1] ? 0 : 1;
        const int which = static_cast<int>(task - tasks[pusher]);
        const int round = ++counts[pusher][which];
        RL_ASSERT(task->pushes.Load() == round);
        if (which == 1) RL_ASSERT(counts[pusher][0] == round);
        --left;
        task->taken.StoreRelease(round);
      }
    }
  }

  void after() {
    RL_ASSERT(first_pushes == batches);
    RL_ASSERT(list.TakeAll() == nullptr);
  }
};

}  // namespace
}  // namespace dfccl

int main(int argc, char** argv) {
  using namespace dfccl;
  const bool no_fault = ExploreRandom<WakeListModel>(30000);
  return ModelExit(argc, argv, no_fault);
}
