// SPDX-License-Identifier: Apache-2.0
// Which ready task a daemon runs next: larger priority first, first-in
// first-out within a priority, and never more than kStarvationBound turns in a
// row past the task that has waited longest. A pure, intrusive data structure
// for one thread at a time; it needs no memory of its own.
//
//   classes_ -> [priority 5] <-> [priority 0] <-> [priority -1]
//                  | behind          | behind
//                  v                 v
//                [task]            [task] ...     first-in first-out
//
// The first task of each class is its head. All tasks are also in one list by
// age; its front is always the head of its class.
#ifndef DFCCL_CORE_PROTOCOL_ORDER_H_
#define DFCCL_CORE_PROTOCOL_ORDER_H_

#include <stdint.h>

#include "core/protocol/atomics.h"

namespace dfccl {

struct OrderNode {
  int32_t priority = 0;

 private:
  friend class Order;
  OrderNode* older = nullptr;  // by age
  OrderNode* younger = nullptr;
  OrderNode* behind = nullptr;       // next task of the class
  OrderNode* last = nullptr;         // head only: last task of the class
  OrderNode* upper_class = nullptr;  // head only
  OrderNode* lower_class = nullptr;  // head only
};

class Order {
 public:
  static constexpr uint32_t kStarvationBound = 8;

  DFCCL_HOST_DEVICE bool empty() const { return classes_ == nullptr; }
  DFCCL_HOST_DEVICE uint64_t size() const { return size_; }

  // A task that has become ready: behind its class.
  DFCCL_HOST_DEVICE void Push(OrderNode* node) {
    node->older = youngest_;
    node->younger = nullptr;
    (youngest_ != nullptr ? youngest_->younger : oldest_) = node;
    youngest_ = node;
    OrderNode* upper;
    OrderNode* head = FindClass(node->priority, &upper);
    node->behind = nullptr;
    if (head == nullptr) {
      InsertClass(node, upper);
    } else {
      head->last->behind = node;
      head->last = node;
    }
    ++size_;
  }

  // A task that was interrupted: in front of its class, and the oldest.
  DFCCL_HOST_DEVICE void PushFront(OrderNode* node) {
    node->younger = oldest_;
    node->older = nullptr;
    (oldest_ != nullptr ? oldest_->older : youngest_) = node;
    oldest_ = node;
    OrderNode* upper;
    OrderNode* head = FindClass(node->priority, &upper);
    node->behind = head;
    if (head == nullptr) {
      InsertClass(node, upper);
    } else {
      node->last = head->last;
      ReplaceHead(head, node);
    }
    ++size_;
  }

  // The next task to run, taken out; nullptr when there is none.
  DFCCL_HOST_DEVICE OrderNode* Pop() {
    OrderNode* node = classes_;
    if (node == nullptr) return nullptr;
    if (node->priority != oldest_->priority && ++passed_over_ > kStarvationBound) node = oldest_;
    if (node == oldest_) passed_over_ = 0;
    Remove(node);
    return node;
  }

  // True if a task of a larger priority is ready.
  DFCCL_HOST_DEVICE bool HasAbove(int32_t priority) const {
    return classes_ != nullptr && classes_->priority > priority;
  }

 private:
  // The head of the class, or nullptr and the head of the class above it.
  DFCCL_HOST_DEVICE OrderNode* FindClass(int32_t priority, OrderNode** upper) {
    *upper = nullptr;
    OrderNode* head = classes_;
    while (head != nullptr && head->priority > priority) {
      *upper = head;
      head = head->lower_class;
    }
    return head != nullptr && head->priority == priority ? head : nullptr;
  }

  DFCCL_HOST_DEVICE void InsertClass(OrderNode* node, OrderNode* upper) {
    node->last = node;
    node->upper_class = upper;
    OrderNode*& link = upper != nullptr ? upper->lower_class : classes_;
    node->lower_class = link;
    if (link != nullptr) link->upper_class = node;
    link = node;
  }

  // Puts `node` in place of `head` into the list of classes.
  DFCCL_HOST_DEVICE void ReplaceHead(OrderNode* head, OrderNode* node) {
    node->upper_class = head->upper_class;
    node->lower_class = head->lower_class;
    (node->upper_class != nullptr ? node->upper_class->lower_class : classes_) = node;
    if (node->lower_class != nullptr) node->lower_class->upper_class = node;
  }

  // `node` is the head of its class.
  DFCCL_HOST_DEVICE void Remove(OrderNode* node) {
    (node->older != nullptr ? node->older->younger : oldest_) = node->younger;
    (node->younger != nullptr ? node->younger->older : youngest_) = node->older;
    if (node->behind != nullptr) {
      node->behind->last = node->last;
      ReplaceHead(node, node->behind);
    } else {
      (node->upper_class != nullptr ? node->upper_class->lower_class : classes_) =
          node->lower_class;
      if (node->lower_class != nullptr) node->lower_class->upper_class = node->upper_class;
    }
    --size_;
  }

  OrderNode* classes_ = nullptr;  // head of the class of the largest priority
  OrderNode* oldest_ = nullptr;
  OrderNode* youngest_ = nullptr;
  uint32_t passed_over_ = 0;  // turns in a row past the oldest task
  uint64_t size_ = 0;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_PROTOCOL_ORDER_H_
