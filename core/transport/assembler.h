// SPDX-License-Identifier: Apache-2.0
// Puts the frames that come from one process together into messages for the
// Receiver. It trusts nothing that it is told: whoever feeds it takes a frame only
// after Begin has found it in order.
#ifndef DFCCL_CORE_TRANSPORT_ASSEMBLER_H_
#define DFCCL_CORE_TRANSPORT_ASSEMBLER_H_

#include <cstdint>
#include <memory>

#include "core/transport/frame.h"
#include "core/transport/transport.h"

namespace dfccl {

class Assembler {
 public:
  Assembler(int process, Receiver* receiver) : process_(process), receiver_(receiver) {}

  // The Frame::kSize bytes that begin a frame. nullptr, or what is wrong with it.
  // Then header_wanted() bytes go to header(), and then payload_wanted() bytes
  // through slices.
  const char* Begin(const char* bytes);

  uint32_t header_wanted() const { return header_wanted_; }
  char* header();
  void HeaderThere();

  int64_t payload_wanted() const { return payload_wanted_; }
  // The payload is not in the frame, only its place in the sender's memory.
  bool lent() const { return lent_; }
  // Where the next `bytes` (at most payload_wanted()) go; nullptr: nowhere.
  void* BeginSlice(int64_t bytes);
  void EndSlice(int64_t bytes);
  // In place of EndSlice: what was lent was taken back, and the message with it.
  void SliceTakenBack();

  bool goodbye() const { return goodbye_; }

 private:
  struct Stream {
    bool open = false;
    bool taken_back = false;  // the rest does not come either
    uint32_t header_bytes = 0;
    int64_t payload_bytes = 0;
    int64_t offset = 0;
    std::unique_ptr<char[]> header;  // kMaxHeader, once it was needed
  };

  const char* BeginMessage(const Frame& frame);

  const int process_;
  Receiver* const receiver_;
  uint64_t frames_ = 0;
  bool goodbye_ = false;
  bool lent_ = false;
  Stream* current_ = nullptr;
  uint32_t header_wanted_ = 0;
  int64_t payload_wanted_ = 0;
  Stream streams_[Frame::kStreams];
};

}  // namespace dfccl

#endif  // DFCCL_CORE_TRANSPORT_ASSEMBLER_H_
