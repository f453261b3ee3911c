// SPDX-License-Identifier: Apache-2.0
// Outcome of an operation: a code and a message for people.
#ifndef DFCCL_CORE_STATUS_H_
#define DFCCL_CORE_STATUS_H_

#include <cstdint>
#include <string>
#include <utility>

namespace dfccl {

enum class StatusCode : uint8_t {
  kOk = 0,
  kInvalidArgument,   // the call itself is wrong
  kMismatch,          // members disagree about the collective
  kDeadlineExceeded,  // a member did not come in time
  kCycle,             // members wait for each other
  kAborted,           // ended because something else failed
  kInternal,
};

class Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}
  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

const char* StatusCodeName(StatusCode code);

}  // namespace dfccl

#endif  // DFCCL_CORE_STATUS_H_
