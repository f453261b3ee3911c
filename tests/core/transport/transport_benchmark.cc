// SPDX-License-Identifier: Apache-2.0
// Latency and bandwidth between two processes of this machine, over rings and over
// TCP, each with one thread that polls.
// Usage: transport_benchmark [ring|tcp [bytes [sockets]]]
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/transport/transport.h"

namespace {

using dfccl::OutgoingMessage;
using dfccl::Transport;

constexpr int64_t kRingBytes = int64_t{2} << 20;
constexpr int64_t kLargest = int64_t{64} << 20;

// Counts messages; payloads go to one place.
class Sink : public dfccl::Receiver {
 public:
  Sink() : place(new char[kLargest]) { std::memset(place.get(), 0, kLargest); }
  void* BeginSlice(int, const void*, uint32_t, int64_t, int64_t offset, int64_t) override {
    return place.get() + offset;
  }
  void EndSlice(int, const void*, uint32_t, int64_t, int64_t, int64_t, bool last) override {
    if (last) ++arrived;
  }
  void Sent(void*) override { ++sent; }
  void Down(int, const dfccl::Status&) override {}

  std::unique_ptr<char[]> place;
  std::atomic<int64_t> arrived{0};
  std::atomic<int64_t> sent{0};
};

class Side {
 public:
  Side(int process, const std::vector<int>& sockets, int memory)
      : peer_(1 - process), transport_(Transport::New(process, &sink_, {})) {
    if (!transport_->AddLink(peer_, sockets, memory).ok()) std::exit(1);
  }
  void Send(int64_t bytes) {
    OutgoingMessage message;
    const uint64_t header = 0;
    message.header = &header;
    message.header_bytes = sizeof(header);
    message.payload = source_.get();
    message.payload_bytes = bytes;
    message.owner = this;
    bool left;
    if (!transport_->Post(peer_, message, &left)) std::exit(1);
    sink_.sent += left;
    ++posted_;
  }
  void Receive() {
    for (++awaited_; sink_.arrived < awaited_;) transport_->Poll();
  }
  void Settle() {
    while (sink_.sent < posted_) transport_->Poll();
  }
  Transport& transport() { return *transport_; }

 private:
  const int peer_;
  Sink sink_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<char[]> source_{new char[kLargest]()};
  int64_t posted_ = 0;
  int64_t awaited_ = 0;
};

double SecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// One message to and fro, again and again.
void PingPong(Side* side, bool first, int64_t bytes, int64_t rounds) {
  for (int64_t i = 0; i < rounds; ++i) {
    if (first) side->Send(bytes);
    side->Receive();
    if (!first) side->Send(bytes);
  }
  side->Settle();
}

// `window` messages on the way from the first to the second.
void Stream(Side* side, bool first, int64_t bytes, int64_t rounds) {
  constexpr int64_t kWindow = 16;
  for (int64_t i = 0; i < rounds; ++i) {
    if (first) {
      side->Send(bytes);
      if (i % kWindow == kWindow - 1) side->Receive();
    } else {
      side->Receive();
      if (i % kWindow == kWindow - 1) side->Send(0);
    }
  }
  side->Settle();
}

void Run(Side* side, bool first, bool stream, int64_t bytes) {
  const int64_t rounds =
      std::clamp<int64_t>((int64_t{256} << 20) / (bytes + 4096), 16, 20'000) / 16 * 16;
  std::vector<double> seconds;
  for (int i = 0; i < 7; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    stream ? Stream(side, first, bytes, rounds) : PingPong(side, first, bytes, rounds);
    seconds.push_back(SecondsSince(begin) / static_cast<double>(rounds) / (stream ? 1 : 2));
  }
  if (!first) return;
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  std::printf("%-9s %10lld B %10.3f us (best %8.3f) %8.2f GB/s\n", stream ? "stream" : "ping-pong",
              static_cast<long long>(bytes), 1e6 * median, 1e6 * seconds[0],
              static_cast<double>(bytes) / median / 1e9);
  std::fflush(stdout);
}

void Connect(bool ring, int count, std::vector<int> sockets[2], int* memory) {
  *memory = -1;
  if (ring) {
    int pair[2];
    *memory = memfd_create("ring", MFD_CLOEXEC);
    if (*memory < 0 || ftruncate(*memory, kRingBytes) != 0) std::exit(1);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) std::exit(1);
    for (int i = 0; i < 2; ++i) sockets[i] = {pair[i]};
    return;
  }
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener, count) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    std::exit(1);
  }
  for (int i = 0; i < count; ++i) {
    sockets[0].push_back(socket(AF_INET, SOCK_STREAM, 0));
    if (connect(sockets[0][i], reinterpret_cast<sockaddr*>(&address), size) != 0) std::exit(1);
    sockets[1].push_back(accept(listener, nullptr, nullptr));
  }
  close(listener);
}

void Measure(bool ring, int count, const std::vector<int64_t>& sizes) {
  std::vector<int> sockets[2];
  int memory;
  Connect(ring, count, sockets, &memory);
  const pid_t child = fork();
  const bool first = child != 0;
  for (int socket : sockets[first ? 1 : 0]) close(socket);
  {
    Side side(first ? 0 : 1, sockets[first ? 0 : 1], memory);
    if (first) std::printf("%s, %d socket(s)\n", ring ? "rings" : "TCP", count);
    side.transport().BeginPolling();
    PingPong(&side, first, 8, 1000);
    for (int64_t bytes : sizes) Run(&side, first, false, bytes);
    for (int64_t bytes : sizes) Run(&side, first, true, bytes);
    side.transport().EndPolling();
  }
  if (!first) _exit(0);
  waitpid(child, nullptr, 0);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string over = argc > 1 ? argv[1] : "";
  std::vector<int64_t> sizes = {8, 1 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20};
  if (argc > 2) sizes = {std::atoll(argv[2])};
  if (over != "tcp") Measure(true, 1, sizes);
  if (over != "ring") Measure(false, argc > 3 ? std::atoi(argv[3]) : 1, sizes);
  return 0;
}
