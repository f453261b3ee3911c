// SPDX-License-Identifier: Apache-2.0
// WakeList: order, the answer of the first push, and pushes while the list is
// being taken.
#include "core/protocol/wake_list.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "tests/core/protocol/stress.h"

namespace dfccl {
namespace {

struct Task : WakeNode {
  int pusher = 0;
  int number = 0;
};

TEST(WakeListTest, EmptyGivesNothing) {
  WakeList list;
  EXPECT_EQ(list.TakeAll(), nullptr);
}

TEST(WakeListTest, KeepsTheOrderOfPushes) {
  WakeList list;
  std::vector<Task> tasks(5);
  for (int round = 0; round < 2; ++round) {
    for (size_t i = 0; i < tasks.size(); ++i) EXPECT_EQ(list.Push(&tasks[i]), i == 0);
    WakeNode* node = list.TakeAll();
    for (Task& task : tasks) {
      ASSERT_EQ(node, &task);
      node = node->next.Load();
    }
    EXPECT_EQ(node, nullptr);
    EXPECT_EQ(list.TakeAll(), nullptr);
  }
}

TEST(WakeListStress, TwoPushersAndTheirConsumer) {
  constexpr int kEach = 20000;
  const uint32_t seed = StressSeed();
  WakeList list;
  std::vector<Task> tasks[2] = {std::vector<Task>(kEach), std::vector<Task>(kEach)};
  std::atomic<int> first_pushes{0};
  std::vector<std::thread> threads;
  for (int pusher = 0; pusher < 2; ++pusher) {
    threads.emplace_back([&, pusher] {
      RandomPause pause(seed + static_cast<uint32_t>(pusher));
      for (int number = 0; number < kEach; ++number) {
        Task& task = tasks[pusher][number];
        task.pusher = pusher;
        task.number = number;
        if (list.Push(&task)) ++first_pushes;
        pause();
      }
    });
  }
  int next[2] = {};
  int batches = 0;
  bool in_order = true;
  while (next[0] + next[1] < 2 * kEach) {
    WakeNode* node = list.TakeAll();
    if (node == nullptr) std::this_thread::yield();
    if (node != nullptr) ++batches;
    for (; node != nullptr; node = node->next.Load()) {
      const Task* task = static_cast<Task*>(node);
      in_order = in_order && task->number == next[task->pusher];
      ++next[task->pusher];
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(in_order);
  EXPECT_EQ(first_pushes.load(), batches);
}

}  // namespace
}  // namespace dfccl
