// SPDX-License-Identifier: Apache-2.0
#include "core/transport/assembler.h"

namespace dfccl {

const char* Assembler::Begin(const char* bytes) {
  Frame frame;
  if (!frame.Decode(frames_++, bytes)) return "wrong check word";
  if (frame.stream >= Frame::kStreams) return "stream number out of range";
  current_ = &streams_[frame.stream];
  lent_ = frame.kind == FrameKind::kLent;
  if (lent_ && frame.bytes == 0) return "empty slice";
  if (lent_ || frame.kind == FrameKind::kMessage) return BeginMessage(frame);
  if (frame.header_bytes != 0 || frame.bytes != 0 || frame.payload_bytes != 0) {
    return "control frame with data";
  }
  switch (frame.kind) {
    case FrameKind::kAbort:
      if (!current_->open) return "end of a stream that is not open";
      current_->open = false;
      return nullptr;
    case FrameKind::kHeartbeat:
      return nullptr;
    case FrameKind::kGoodbye:
      goodbye_ = true;
      return nullptr;
    default:
      return "unknown kind of frame";
  }
}

const char* Assembler::BeginMessage(const Frame& frame) {
  Stream* stream = current_;
  if (frame.header_bytes > 0) {
    if (stream->open) return "second beginning of a stream";
    if (frame.header_bytes > OutgoingMessage::kMaxHeader) return "header too large";
    if (frame.payload_bytes > Frame::kMostPayload) return "payload too large";
    stream->open = true;
    stream->taken_back = false;
    stream->header_bytes = frame.header_bytes;
    stream->payload_bytes = static_cast<int64_t>(frame.payload_bytes);
    stream->offset = 0;
    if (!stream->header) stream->header.reset(new char[OutgoingMessage::kMaxHeader]);
  } else {
    if (!stream->open) return "slice of a stream that is not open";
    if (stream->taken_back) return "slice of a message that was taken back";
    if (frame.payload_bytes != static_cast<uint64_t>(stream->payload_bytes)) {
      return "payload size has changed";
    }
  }
  if (frame.bytes > stream->payload_bytes - stream->offset) return "slice beyond the payload";
  if (frame.bytes == 0 && stream->payload_bytes != 0) return "empty slice";
  header_wanted_ = frame.header_bytes;
  payload_wanted_ = frame.bytes;
  return nullptr;
}

char* Assembler::header() { return current_->header.get(); }

void Assembler::HeaderThere() {
  header_wanted_ = 0;
  if (payload_wanted_ == 0) EndSlice(0);
}

void* Assembler::BeginSlice(int64_t bytes) {
  const Stream& stream = *current_;
  return receiver_->BeginSlice(process_, stream.header.get(), stream.header_bytes,
                               stream.payload_bytes, stream.offset, bytes);
}

void Assembler::EndSlice(int64_t bytes) {
  Stream* stream = current_;
  const int64_t offset = stream->offset;
  stream->offset += bytes;
  payload_wanted_ -= bytes;
  const bool last = stream->offset == stream->payload_bytes;
  if (last) stream->open = false;
  receiver_->EndSlice(process_, stream->header.get(), stream->header_bytes, stream->payload_bytes,
                      offset, bytes, last);
}

void Assembler::SliceTakenBack() {
  Stream* stream = current_;
  const int64_t offset = stream->offset;
  stream->offset += payload_wanted_;
  payload_wanted_ = 0;
  stream->taken_back = true;
  stream->open = stream->offset < stream->payload_bytes;
  receiver_->EndSlice(process_, stream->header.get(), stream->header_bytes, stream->payload_bytes,
                      offset, 0, /*last=*/false);
}

}  // namespace dfccl
