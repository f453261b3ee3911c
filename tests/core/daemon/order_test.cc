// SPDX-License-Identifier: Apache-2.0
// Order: first-in first-out, priority, starvation bound; against a plain model.
#include "core/protocol/order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <random>
#include <vector>

namespace dfccl {
namespace {

struct Task : OrderNode {
  explicit Task(int32_t p) { priority = p; }
};

TEST(OrderTest, IsFirstInFirstOutWithinAPriority) {
  Order order;
  EXPECT_TRUE(order.empty());
  EXPECT_EQ(order.Pop(), nullptr);
  std::vector<Task> tasks(5, Task(3));
  for (Task& task : tasks) order.Push(&task);
  EXPECT_EQ(order.size(), 5u);
  for (Task& task : tasks) EXPECT_EQ(order.Pop(), &task);
  EXPECT_TRUE(order.empty());
}

TEST(OrderTest, LargerPriorityComesFirst) {
  Order order;
  Task low(-1), normal(0), high(7), higher(8);
  for (Task* task : {&normal, &high, &low, &higher}) order.Push(task);
  EXPECT_TRUE(order.HasAbove(7));
  EXPECT_FALSE(order.HasAbove(8));
  for (Task* task : {&higher, &high, &normal, &low}) EXPECT_EQ(order.Pop(), task);
}

TEST(OrderTest, AnInterruptedTaskIsInFrontOfItsClass) {
  Order order;
  Task first(0), second(0), urgent(1);
  order.Push(&second);
  order.PushFront(&first);
  order.Push(&urgent);
  for (Task* task : {&urgent, &first, &second}) EXPECT_EQ(order.Pop(), task);
}

TEST(OrderTest, TheOldestTaskStarvesForABoundedNumberOfTurns) {
  Order order;
  Task bulk(0);
  order.Push(&bulk);
  std::vector<Task> urgent(100, Task(1));
  for (Task& task : urgent) order.Push(&task);
  int turns = 0;
  while (order.Pop() != &bulk) ++turns;
  EXPECT_EQ(turns, static_cast<int>(Order::kStarvationBound));
  // Interrupted again and again, it still gets every ninth turn.
  order.PushFront(&bulk);
  for (turns = 0; order.Pop() != &bulk; ++turns) {
  }
  EXPECT_EQ(turns, static_cast<int>(Order::kStarvationBound));
}

// Any sequence of pushes and pops gives what a plain list gives.
TEST(OrderTest, AgreesWithAModel) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    Order order;
    std::list<Task*> model;  // by age
    std::vector<Task> tasks;
    for (int i = 0; i < 40; ++i) tasks.emplace_back(static_cast<int32_t>(random() % 5) - 2);
    std::vector<Task*> outside;
    for (Task& task : tasks) outside.push_back(&task);
    uint32_t passed_over = 0;
    for (int i = 0; i < 400; ++i) {
      if (!outside.empty() && random() % 2 == 0) {
        Task* task = outside.back();
        outside.pop_back();
        if (random() % 4 == 0) {
          order.PushFront(task);
          model.push_front(task);
        } else {
          order.Push(task);
          model.push_back(task);
        }
      } else {
        Task* expected = nullptr;
        if (!model.empty()) {
          auto best = std::max_element(model.begin(), model.end(), [](Task* a, Task* b) {
            return a->priority < b->priority;  // the first of the largest
          });
          if ((*best)->priority != model.front()->priority &&
              ++passed_over > Order::kStarvationBound) {
            best = model.begin();
          }
          if (best == model.begin()) passed_over = 0;
          expected = *best;
          model.erase(best);
        }
        ASSERT_EQ(order.Pop(), expected);
        if (expected != nullptr) outside.insert(outside.begin(), expected);
      }
      ASSERT_EQ(order.size(), model.size());
      ASSERT_EQ(order.empty(), model.empty());
    }
  }
}

}  // namespace
}  // namespace dfccl
