// SPDX-License-Identifier: Apache-2.0
// An intrusive list that any thread pushes to and one thread empties at once:
// the tasks that peers woke, waiting for their daemon. It needs no memory, so a
// push cannot fail.
#ifndef DFCCL_CORE_PROTOCOL_WAKE_LIST_H_
#define DFCCL_CORE_PROTOCOL_WAKE_LIST_H_

#include "core/protocol/atomics.h"

namespace dfccl {

struct WakeNode {
  Plain<WakeNode*> next;  // owned by the list from Push until TakeAll returns it
};

class WakeList {
 public:
  // True if the list was empty. A node is in at most one list, at most once.
  DFCCL_HOST_DEVICE bool Push(WakeNode* node) {
    WakeNode* newest = newest_.LoadRelaxed();
    do {
      node->next.Store(newest);
      // Release: partner is the exchange in TakeAll.
    } while (!newest_.CompareExchangeRelease(newest, node));
    return newest == nullptr;
  }

  // All nodes in the order of their pushes, linked by `next`; nullptr if there
  // are none. One thread at a time. Read a node's `next` before waking its
  // owner: it may be pushed again from then on.
  DFCCL_HOST_DEVICE WakeNode* TakeAll() {
    // The caller has been told of what it must see (lifecycle.h), so a relaxed
    // look cannot miss it, and spares the exchange when there is nothing.
    if (newest_.LoadRelaxed() == nullptr) return nullptr;
    // Acquire: partners are the compare-exchanges of all taken Pushes.
    WakeNode* node = newest_.ExchangeAcquire(nullptr);
    WakeNode* first = nullptr;
    while (node != nullptr) {
      WakeNode* older = node->next.Load();
      node->next.Store(first);
      first = node;
      node = older;
    }
    return first;
  }

 private:
  Atomic<WakeNode*> newest_;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_PROTOCOL_WAKE_LIST_H_
