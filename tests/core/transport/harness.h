// SPDX-License-Identifier: Apache-2.0
// Connected ends for transports in one process or two, and a receiver that keeps
// what arrives and checks that slices come as they must.
#ifndef DFCCL_TESTS_CORE_TRANSPORT_HARNESS_H_
#define DFCCL_TESTS_CORE_TRANSPORT_HARNESS_H_

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/transport/transport.h"

namespace dfccl {

// What a link may go over. kLent: as kRing, with payloads of any size that is not small
// left in their sender's memory. kTcps: three sockets.
enum class Over { kRing, kLent, kUnix, kTcp, kTcps };
const auto kOverAll =
    testing::Values(Over::kRing, Over::kLent, Over::kUnix, Over::kTcp, Over::kTcps);

inline const char* OverName(Over over) {
  static const char* const kNames[] = {"Ring", "Lent", "Unix", "Tcp", "Tcps"};
  return kNames[static_cast<int>(over)];
}

inline TransportOptions OptionsFor(Over over) {
  TransportOptions options;
  options.lent_bytes = over == Over::kLent ? 2000 : 0;
  options.lent_slice_bytes = options.slice_bytes;
  return options;
}

struct Ends {
  std::vector<int> sockets[2];
  int memory[2] = {-1, -1};
};

// Closes one of the two, which nobody has taken over.
inline void CloseEnd(const Ends& ends, int which) {
  for (int socket : ends.sockets[which]) close(socket);
  if (ends.memory[which] >= 0) close(ends.memory[which]);
}

inline void ConnectTcp(Ends* ends) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
  ends->sockets[0].push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(connect(ends->sockets[0].back(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ends->sockets[1].push_back(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  ASSERT_GE(ends->sockets[1].back(), 0);
  close(listener);
}

inline Ends Connect(Over over, int64_t memory_bytes = 1 << 20) {
  Ends ends;
  if (over == Over::kTcp || over == Over::kTcps) {
    for (int i = 0; i < (over == Over::kTcps ? 3 : 1); ++i) ConnectTcp(&ends);
    return ends;
  }
  int pair[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
  for (int i = 0; i < 2; ++i) ends.sockets[i] = {pair[i]};
  if (over == Over::kRing || over == Over::kLent) {
    ends.memory[0] = memfd_create("ring", MFD_CLOEXEC);
    EXPECT_EQ(ftruncate(ends.memory[0], memory_bytes), 0);
    ends.memory[1] = dup(ends.memory[0]);
  }
  return ends;
}

struct Arrival {
  int process;
  std::string header;
  std::string payload;
};

// Keeps messages in the order of their last slices. Messages in the middle at the same
// time must differ in their headers.
class Recorder : public Receiver {
 public:
  void* BeginSlice(int process, const void* header, uint32_t header_bytes, int64_t payload_bytes,
                   int64_t offset, int64_t bytes) override {
    std::lock_guard<std::mutex> lock(mutex_);
    EXPECT_GT(bytes, 0);
    const auto key = Key(process, header, header_bytes);
    std::string& payload = open_[key];
    int64_t& begun = begun_[key];
    if (offset == 0) begun = 0;  // an earlier one with this header was cancelled
    EXPECT_EQ(begun, offset);
    payload.resize(static_cast<size_t>(payload_bytes));
    return on_begin_ ? on_begin_(&payload[static_cast<size_t>(offset)])
                     : &payload[static_cast<size_t>(offset)];
  }
  void EndSlice(int process, const void* header, uint32_t header_bytes, int64_t payload_bytes,
                int64_t offset, int64_t bytes, bool last) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto key = Key(process, header, header_bytes);
      begun_[key] = offset + bytes;
      ++slices;
      EXPECT_EQ(last, offset + bytes == payload_bytes);
      if (!last) return;
      arrivals_.push_back({process, key.second, std::move(open_[key])});
      open_.erase(key);
      begun_.erase(key);
      condition_.notify_all();
    }
    if (on_message) on_message(process);
  }
  void Sent(void* owner) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++sent_[owner];
      condition_.notify_all();
    }
    if (on_sent) on_sent(owner);
  }
  void Down(int process, const Status& status) override {
    std::lock_guard<std::mutex> lock(mutex_);
    EXPECT_EQ(down_.count(process), 0u);
    down_[process] = status;
    condition_.notify_all();
  }

  // Waits; the limit is for tests that would hang.
  template <typename Ready>
  bool Wait(Ready ready) {
    std::unique_lock<std::mutex> lock(mutex_);
    return condition_.wait_for(lock, std::chrono::seconds(60), ready);
  }
  bool WaitArrivals(size_t count) {
    return Wait([&] { return arrivals_.size() >= count; });
  }
  bool WaitSent(void* owner, int count) {
    return Wait([&] { return sent_[owner] >= count; });
  }
  Status WaitDown(int process) {
    EXPECT_TRUE(Wait([&] { return down_.count(process) != 0; }));
    std::lock_guard<std::mutex> lock(mutex_);
    return down_[process];
  }
  std::vector<Arrival> TakeArrivals() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(arrivals_, {});
  }
  size_t arrivals() {
    std::lock_guard<std::mutex> lock(mutex_);
    return arrivals_.size();
  }
  // Where slices go instead.
  void OnBegin(std::function<void*(char*)> on_begin) {
    std::lock_guard<std::mutex> lock(mutex_);
    on_begin_ = std::move(on_begin);
  }
  // Within Wait only.
  bool Has(const std::string& header) const {
    for (const Arrival& arrival : arrivals_) {
      if (arrival.header == header) return true;
    }
    return false;
  }
  void ForgetSent() {
    std::lock_guard<std::mutex> lock(mutex_);
    sent_.clear();
  }
  int sent(void* owner) {
    std::lock_guard<std::mutex> lock(mutex_);
    return sent_[owner];
  }
  bool is_down(int process) {
    std::lock_guard<std::mutex> lock(mutex_);
    return down_.count(process) != 0;
  }

  // Without the recorder's lock; to be set before there is a link.
  std::function<void(int process)> on_message;
  std::function<void(void* owner)> on_sent;
  int64_t slices = 0;

 private:
  static std::pair<int, std::string> Key(int process, const void* header, uint32_t bytes) {
    return {process, std::string(static_cast<const char*>(header), bytes)};
  }

  std::mutex mutex_;
  std::function<void*(char*)> on_begin_;
  std::condition_variable condition_;
  std::map<std::pair<int, std::string>, std::string> open_;
  std::map<std::pair<int, std::string>, int64_t> begun_;
  std::vector<Arrival> arrivals_;
  std::map<void*, int> sent_;
  std::map<int, Status> down_;
};

inline OutgoingMessage MessageOf(const std::string& header, const std::string& payload = {},
                                 int32_t priority = 0, void* owner = nullptr) {
  OutgoingMessage message;
  message.header = header.data();
  message.header_bytes = static_cast<uint32_t>(header.size());
  message.payload = payload.data();
  message.payload_bytes = static_cast<int64_t>(payload.size());
  message.priority = priority;
  message.owner = owner;
  return message;
}

// Bytes that depend on the seed and on their place.
inline std::string Bytes(uint64_t seed, size_t count) {
  std::string bytes(count, 0);
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  for (size_t i = 0; i < count; ++i) {
    if (i % 8 == 0) state = state * 6364136223846793005u + 1442695040888963407u;
    bytes[i] = static_cast<char>(state >> (8 * (i % 8)));
  }
  return bytes;
}

// A transport with its recorder.
struct Node {
  explicit Node(int process, TransportOptions options = {})
      : process(process), transport(Transport::New(process, &recorder, options)) {}
  bool Post(int to, const std::string& header, const std::string& payload = {},
            int32_t priority = 0, void* owner = nullptr) {
    return transport->Post(to, MessageOf(header, payload, priority, owner));
  }

  const int process;
  Recorder recorder;
  std::unique_ptr<Transport> transport;
};

inline void Join(Node* a, Node* b, const Ends& ends) {
  EXPECT_TRUE(a->transport->AddLink(b->process, ends.sockets[0], ends.memory[0]).ok());
  EXPECT_TRUE(b->transport->AddLink(a->process, ends.sockets[1], ends.memory[1]).ok());
}

}  // namespace dfccl

#endif  // DFCCL_TESTS_CORE_TRANSPORT_HARNESS_H_
