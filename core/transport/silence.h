// SPDX-License-Identifier: Apache-2.0
// Says when to send a heartbeat to a peer over a network, and when that has been silent for
// too long. One thread's.
#ifndef DFCCL_CORE_TRANSPORT_SILENCE_H_
#define DFCCL_CORE_TRANSPORT_SILENCE_H_

#include <cstdint>

namespace dfccl {

class Silence {
 public:
  // In the time that is allowed there must be so many ticks.
  static constexpr int kTicks = 5;

  explicit Silence(bool counts) : counts_(counts) {}

  // With how much has been sent and received ever. False: too long. `*heartbeat`: nothing
  // has been sent since the last time.
  bool Tick(uint64_t sent, uint64_t received, bool* heartbeat) {
    *heartbeat = counts_ && sent == sent_before_;
    sent_before_ = sent;
    silent_ticks_ = received == received_before_ ? silent_ticks_ + 1 : 0;
    received_before_ = received;
    return !counts_ || silent_ticks_ <= kTicks;
  }

 private:
  bool counts_;
  uint64_t sent_before_ = 0;
  uint64_t received_before_ = 0;
  int silent_ticks_ = 0;
};

}  // namespace dfccl

#endif  // DFCCL_CORE_TRANSPORT_SILENCE_H_
