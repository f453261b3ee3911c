// SPDX-License-Identifier: Apache-2.0
// Feeds the in side of a wire with whatever a peer might send. An entry point for
// libFuzzer; fuzz_corpus_test.cc runs it over the kept inputs.
//
// The first byte of an input says over what, and whether check words are made right, so
// that the fields behind them are reached. The rest is pieces: which socket, if there
// are several, a length, and so many bytes, that the peer sends at once.
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/protocol/byte_ring.h"
#include "core/transport/assembler.h"
#include "core/transport/ring_wire.h"
#include "core/transport/socket_wire.h"

namespace dfccl {
namespace {

constexpr uint64_t kMemory = RingWire::kLeastMemory;
constexpr int64_t kSlice = 8 << 10;
constexpr int kMostSockets = 3;

void Require(bool holds) {
  if (!holds) std::abort();
}

// Insists on what Receiver promises; gives every slice exactly the memory it needs.
class Checker : public Receiver {
 public:
  void* BeginSlice(int, const void* header, uint32_t header_bytes, int64_t payload_bytes,
                   int64_t offset, int64_t bytes) override {
    Check(header, header_bytes, payload_bytes, offset, bytes);
    Require(bytes > 0 && slice_ == nullptr);
    if (bytes % 7 == 0) return nullptr;
    slice_.reset(new char[static_cast<size_t>(bytes)]);
    return slice_.get();
  }
  void EndSlice(int, const void* header, uint32_t header_bytes, int64_t payload_bytes,
                int64_t offset, int64_t bytes, bool last) override {
    Check(header, header_bytes, payload_bytes, offset, bytes);
    Require(last == (offset + bytes == payload_bytes));
    slice_.reset();
  }
  void Sent(void*) override { std::abort(); }
  void Down(int, const Status&) override { std::abort(); }

 private:
  void Check(const void* header, uint32_t header_bytes, int64_t payload_bytes, int64_t offset,
             int64_t bytes) {
    Require(header_bytes > 0 && header_bytes <= OutgoingMessage::kMaxHeader);
    Require(offset >= 0 && bytes >= 0 && offset + bytes <= payload_bytes);
    for (uint32_t i = 0; i < header_bytes; ++i) sum_ += static_cast<const char*>(header)[i];
  }

  std::unique_ptr<char[]> slice_;
  int sum_ = 0;
};

void Drain(Wire* wire, Assembler* assembler) {
  Wire::Moved moved;
  do {
    moved = wire->Read(assembler);
  } while (moved == Wire::Moved::kSome);
  Require((moved == Wire::Moved::kEnded) == !wire->end().ok());
}

// The next piece of the input.
std::string Piece(const uint8_t** at, const uint8_t* end, bool right, uint64_t number) {
  size_t bytes = *(*at)++;
  bytes = std::min<size_t>(bytes * (bytes < 128 ? 1 : 37), static_cast<size_t>(end - *at));
  std::string piece(reinterpret_cast<const char*>(*at), bytes);
  *at += bytes;
  if (right && bytes >= Frame::kSize) {
    Frame frame;
    frame.Decode(number, piece.data());
    frame.Encode(number, &piece[0]);
  }
  return piece;
}

}  // namespace
}  // namespace dfccl

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace dfccl;
  if (size == 0) return 0;
  const bool ring = data[0] & 1, right = data[0] & 2;
  const int count = !ring && data[0] & 4 ? kMostSockets : 1;
  const uint8_t* const end = data + size;
  const uint8_t* at = data + 1;
  std::vector<int> ours, theirs;
  for (int i = 0; i < count; ++i) {
    int pair[2];
    Require(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    ours.push_back(pair[0]);
    theirs.push_back(pair[1]);
  }
  Checker checker;
  Assembler assembler(1, &checker);
  std::unique_ptr<Wire> wire;
  char* memory = nullptr;
  std::unique_ptr<RingWriter> writer;
  if (ring) {
    const int file = memfd_create("ring", MFD_CLOEXEC);
    Require(file >= 0 && ftruncate(file, kMemory) == 0);
    Status status;
    TransportOptions options;
    options.slice_bytes = kSlice;
    wire = RingWire::New(ours[0], file, true, options, &status);
    void* const mapped = mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    Require(wire != nullptr && mapped != MAP_FAILED);
    memory = static_cast<char*>(mapped);
    close(file);
    writer.reset(new RingWriter(reinterpret_cast<RingWords*>(memory + kMemory / 2),
                                RingWire::Capacity(kMemory)));
  } else {
    wire.reset(new SocketWire(ours, kSlice, 0));
  }
  char* const bytes = memory + kMemory / 2 + sizeof(RingWords);
  uint64_t offset = 0;
  for (uint64_t number = 0; at < end && wire->end().ok(); ++number) {
    const int socket = theirs[count > 1 ? *at++ % count : 0];
    if (at == end) break;
    const std::string piece = Piece(&at, end, right, number);
    if (!ring) {
      send(socket, piece.data(), piece.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    } else {
      for (const char byte : piece) {
        bytes[offset] = byte;
        offset = (offset + 1) % RingWire::Capacity(kMemory);
      }
      writer->Publish(piece.size());
      writer->Look();
    }
    if (wire->MayRead()) Drain(wire.get(), &assembler);
  }
  for (int each : theirs) close(each);
  wire->OnEvent();
  if (wire->end().ok() && wire->MayRead()) Drain(wire.get(), &assembler);
  Require(!wire->end().ok());
  wire.reset();
  if (memory != nullptr) munmap(memory, kMemory);
  return 0;
}
