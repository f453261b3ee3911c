// SPDX-License-Identifier: Apache-2.0
// A peer that does not keep to the rules brings its link down, says why, and does no
// other harm. The peer's end is played by hand.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "core/protocol/byte_ring.h"
#include "core/transport/frame.h"
#include "core/transport/ring_wire.h"
#include "tests/core/transport/harness.h"

namespace dfccl {
namespace {

constexpr uint64_t kMemory = 128 << 10;

// The end of process 1.
class RawEnd {
 public:
  RawEnd(Over over, const Ends& ends) : socket_(ends.sockets[1][0]) {
    if (over != Over::kRing) return;
    memory_ = static_cast<char*>(
        mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_SHARED, ends.memory[1], 0));
    close(ends.memory[1]);
    in_ = reinterpret_cast<RingWords*>(memory_);
    out_ = reinterpret_cast<RingWords*>(memory_ + kMemory / 2);
    writer_.reset(new RingWriter(out_, RingWire::Capacity(kMemory)));
  }
  ~RawEnd() {
    if (memory_ != nullptr) munmap(memory_, kMemory);
    close(socket_);
  }

  void Put(const std::string& bytes) {
    if (memory_ == nullptr) {
      send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      return;
    }
    std::memcpy(reinterpret_cast<char*>(out_ + 1) + written_, bytes.data(), bytes.size());
    written_ += bytes.size();
    if (writer_->Publish(bytes.size())) Ring('b');
  }
  void Ring(char bell) { send(socket_, &bell, 1, MSG_NOSIGNAL); }
  RingWords* in() { return in_; }
  RingWords* out() { return out_; }

 private:
  const int socket_;
  char* memory_ = nullptr;
  RingWords* in_ = nullptr;
  RingWords* out_ = nullptr;
  std::unique_ptr<RingWriter> writer_;
  uint64_t written_ = 0;
};

std::string Encoded(const Frame& frame, uint64_t number, size_t bytes_behind = 0) {
  std::string bytes(Frame::kSize, 0);
  frame.Encode(number, &bytes[0]);
  return bytes + std::string(bytes_behind, 'x');
}

// The first frame of a message of 10 bytes, with 5 of them and a header of 3.
Frame First() {
  Frame frame;
  frame.header_bytes = 3;
  frame.bytes = 5;
  frame.payload_bytes = 10;
  return frame;
}
Frame Next() {
  Frame frame = First();
  frame.header_bytes = 0;
  return frame;
}
Frame Control(FrameKind kind) {
  Frame frame;
  frame.kind = kind;
  return frame;
}

class WireTest : public testing::TestWithParam<Over> {
 protected:
  // What the node says when it gets these bytes, each piece as a frame.
  std::string Fate(const std::vector<std::string>& pieces) {
    Node node(0);
    const Ends ends = Connect(GetParam(), kMemory);
    RawEnd peer(GetParam(), ends);
    EXPECT_TRUE(node.transport->AddLink(1, ends.sockets[0], ends.memory[0]).ok());
    for (const std::string& piece : pieces) peer.Put(piece);
    const std::string message = node.recorder.WaitDown(1).message();
    const std::string prefix = "connection lost: corrupt frame: ";
    EXPECT_EQ(message.find(prefix), 0u) << message;
    EXPECT_EQ(node.recorder.arrivals(), 0u);
    return message.substr(std::min(message.size(), prefix.size()));
  }
};

INSTANTIATE_TEST_SUITE_P(Over, WireTest, testing::Values(Over::kRing, Over::kUnix, Over::kTcp),
                         [](const auto& info) { return OverName(info.param); });

TEST_P(WireTest, AnyDamagedByteIsNoticed) {
  for (size_t i = 0; i < Frame::kSize; ++i) {
    std::string bytes = Encoded(First(), 0, 8);
    bytes[i] ^= 4;
    EXPECT_EQ(Fate({bytes}), "wrong check word") << i;
  }
}

TEST_P(WireTest, FramesCannotBeLostOrDoubled) {
  EXPECT_EQ(Fate({Encoded(First(), 1, 8)}), "wrong check word");
  EXPECT_EQ(Fate({Encoded(First(), 0, 8), Encoded(Next(), 2, 5)}), "wrong check word");
  const std::string heartbeat = Encoded(Control(FrameKind::kHeartbeat), 0);
  EXPECT_EQ(Fate({heartbeat, heartbeat}), "wrong check word");
}

TEST_P(WireTest, FieldsOutOfRange) {
  Frame frame = First();
  frame.kind = static_cast<FrameKind>(9);
  frame.header_bytes = 0;
  frame.bytes = 0;
  frame.payload_bytes = 0;
  EXPECT_EQ(Fate({Encoded(frame, 0)}), "unknown kind of frame");
  frame = First();
  frame.stream = Frame::kStreams;
  EXPECT_EQ(Fate({Encoded(frame, 0, 8)}), "stream number out of range");
  frame = First();
  frame.header_bytes = OutgoingMessage::kMaxHeader + 1;
  EXPECT_EQ(Fate({Encoded(frame, 0, 5000)}), "header too large");
  frame = First();
  frame.payload_bytes = Frame::kMostPayload + 1;
  EXPECT_EQ(Fate({Encoded(frame, 0, 8)}), "payload too large");
  frame = First();
  frame.payload_bytes = ~uint64_t{0};
  EXPECT_EQ(Fate({Encoded(frame, 0, 8)}), "payload too large");
  frame = First();
  frame.bytes = 11;
  EXPECT_EQ(Fate({Encoded(frame, 0, 14)}), "slice beyond the payload");
  frame.bytes = ~uint32_t{0};
  EXPECT_EQ(Fate({Encoded(frame, 0, 14)}), "slice beyond the payload");
  frame.bytes = 0;
  EXPECT_EQ(Fate({Encoded(frame, 0, 3)}), "empty slice");
}

TEST_P(WireTest, LentPayloadOfAPeerThatLendsNothing) {
  Frame frame = First();
  frame.kind = FrameKind::kLent;
  EXPECT_EQ(Fate({Encoded(frame, 0, 3 + sizeof(uint64_t))}),
            GetParam() == Over::kRing ? "lent payload that cannot be read"
                                      : "lent payload over a socket");
  frame.bytes = 0;
  EXPECT_EQ(Fate({Encoded(frame, 0, 3)}), "empty slice");
}

TEST_P(WireTest, FramesOutOfOrder) {
  EXPECT_EQ(Fate({Encoded(First(), 0, 8), Encoded(First(), 1, 8)}), "second beginning of a stream");
  EXPECT_EQ(Fate({Encoded(Next(), 0, 5)}), "slice of a stream that is not open");
  Frame frame = Next();
  frame.payload_bytes = 11;
  EXPECT_EQ(Fate({Encoded(First(), 0, 8), Encoded(frame, 1, 5)}), "payload size has changed");
  frame = Next();
  frame.bytes = 6;
  EXPECT_EQ(Fate({Encoded(First(), 0, 8), Encoded(frame, 1, 6)}), "slice beyond the payload");
  EXPECT_EQ(Fate({Encoded(Control(FrameKind::kAbort), 0)}), "end of a stream that is not open");
  frame = Control(FrameKind::kHeartbeat);
  frame.bytes = 1;
  EXPECT_EQ(Fate({Encoded(frame, 0, 1)}), "control frame with data");
}

TEST_P(WireTest, WhatIsInOrderArrives) {
  Node node(0);
  const Ends ends = Connect(GetParam(), kMemory);
  RawEnd peer(GetParam(), ends);
  ASSERT_TRUE(node.transport->AddLink(1, ends.sockets[0], ends.memory[0]).ok());
  peer.Put(Encoded(First(), 0, 8));
  peer.Put(Encoded(Control(FrameKind::kHeartbeat), 1));
  peer.Put(Encoded(Control(FrameKind::kAbort), 2));
  peer.Put(Encoded(First(), 3, 8));
  peer.Put(Encoded(Next(), 4, 5));
  ASSERT_TRUE(node.recorder.WaitArrivals(1));
  EXPECT_EQ(node.recorder.TakeArrivals()[0].payload, "xxxxxxxxxx");
  peer.Put(Encoded(Control(FrameKind::kGoodbye), 5));
  EXPECT_EQ(node.recorder.WaitDown(1).message(), "has left the job");
}

class RingEndTest : public testing::Test {
 protected:
  RingEndTest() {
    EXPECT_TRUE(node_.transport->AddLink(1, ends_.sockets[0], ends_.memory[0]).ok());
  }
  std::string Fate() { return node_.recorder.WaitDown(1).message(); }

  Node node_{0};
  const Ends ends_ = Connect(Over::kRing, kMemory);
  RawEnd peer_{Over::kRing, ends_};
};

TEST_F(RingEndTest, HalfAFrameHeader) {
  peer_.Put(Encoded(First(), 0).substr(0, 23));
  EXPECT_EQ(Fate(), "connection lost: corrupt frame: half a frame");
}

TEST_F(RingEndTest, HalfAFrame) {
  peer_.Put(Encoded(First(), 0, 7));
  EXPECT_EQ(Fate(), "connection lost: corrupt frame: half a frame");
}

TEST_F(RingEndTest, MoreThanTheRingHolds) {
  peer_.out()->written.StoreSeqCst(RingWire::Capacity(kMemory) + 1);
  peer_.Ring('b');
  EXPECT_EQ(Fate(), "connection lost: corrupt frame: position out of range");
}

// The peer says that it lends, but what is at the place of its proof is not that.
TEST_F(RingEndTest, LenderWithAWrongProof) {
  const uint64_t number = 12345;
  peer_.out()->proof.StoreRelaxed(number + 1);
  peer_.out()->proof_address.StoreRelaxed(reinterpret_cast<uintptr_t>(&number));
  peer_.out()->lender.StoreRelease(static_cast<uint64_t>(getpid()));
  Frame frame = First();
  frame.kind = FrameKind::kLent;
  peer_.Put(Encoded(frame, 0, 3 + sizeof(uint64_t)));
  EXPECT_EQ(Fate(), "connection lost: corrupt frame: lent payload that cannot be read");
  EXPECT_EQ(peer_.out()->borrows.LoadRelaxed(), 0u);
}

// The proof holds, but a payload does not lie where the peer says.
TEST_F(RingEndTest, LentPayloadThatIsNowhere) {
  const uint64_t number = 12345;
  peer_.out()->proof.StoreRelaxed(number);
  peer_.out()->proof_address.StoreRelaxed(reinterpret_cast<uintptr_t>(&number));
  peer_.out()->lender.StoreRelease(static_cast<uint64_t>(getpid()));
  Frame frame = First();
  frame.kind = FrameKind::kLent;
  std::string bytes = Encoded(frame, 0, 3);
  bytes.append(sizeof(uint64_t), '\0');
  peer_.Put(bytes);
  EXPECT_EQ(Fate(), "connection lost: its memory cannot be read");
  EXPECT_EQ(peer_.out()->borrows.LoadRelaxed(), 1u);
}

TEST_F(RingEndTest, PositionThatGoesBack) {
  peer_.Put(Encoded(Control(FrameKind::kHeartbeat), 0));
  while (peer_.out()->read.LoadAcquire() != Frame::kSize) std::this_thread::yield();
  peer_.out()->written.StoreSeqCst(Frame::kSize - 1);
  peer_.Ring('b');
  EXPECT_EQ(Fate(), "connection lost: corrupt frame: position out of range");
}

TEST_F(RingEndTest, MoreReadThanWritten) {
  peer_.in()->read.StoreSeqCst(uint64_t{1} << 40);
  const std::string payload(kMemory, 'x');
  node_.Post(1, "does not fit", payload, 0, &node_);
  EXPECT_EQ(Fate(), "connection lost: corrupt frame: position out of range");
  EXPECT_EQ(node_.recorder.sent(&node_), 1);
}

TEST_F(RingEndTest, WrongDoorbell) {
  peer_.Ring('?');
  EXPECT_EQ(Fate(), std::string("connection lost: ") + std::strerror(EPROTO));
}

TEST_F(RingEndTest, BellsForNothing) {
  for (int i = 0; i < 1000; ++i) peer_.Ring('b');
  Status status;
  peer_.Put(Encoded(Control(FrameKind::kHeartbeat), 0));
  while (peer_.out()->read.LoadAcquire() != Frame::kSize) std::this_thread::yield();
  EXPECT_FALSE(node_.transport->IsDown(1, &status));
}

}  // namespace
}  // namespace dfccl
