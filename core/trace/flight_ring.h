// SPDX-License-Identifier: Apache-2.0
// The always-on part of the flight record: a fixed ring of the operations a
// device finished last. Entries are plain data; text is made when a report is.
#ifndef DFCCL_CORE_TRACE_FLIGHT_RING_H_
#define DFCCL_CORE_TRACE_FLIGHT_RING_H_

#include <cstdint>
#include <memory>
#include <vector>

namespace dfccl {

// One writer at a time and any number of readers; Lock is what keeps them apart.
template <typename Entry, typename Lock>
class FlightRing {
 public:
  static constexpr uint64_t kEntries = 256;

  void Add(const Entry& entry) {
    lock_.lock();
    entries_[count_++ % kEntries] = entry;
    lock_.unlock();
  }

  // Newest first.
  std::vector<Entry> Newest() {
    std::vector<Entry> newest;
    newest.reserve(kEntries);
    lock_.lock();
    for (uint64_t i = count_; i > 0 && count_ - i < kEntries; --i) {
      newest.push_back(entries_[(i - 1) % kEntries]);
    }
    lock_.unlock();
    return newest;
  }

 private:
  Lock lock_;
  uint64_t count_ = 0;
  std::unique_ptr<Entry[]> entries_{new Entry[kEntries]};
};

}  // namespace dfccl

#endif  // DFCCL_CORE_TRACE_FLIGHT_RING_H_
