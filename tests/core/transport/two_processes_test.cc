// SPDX-License-Identifier: Apache-2.0
// Two processes: traffic between them, and the ends of one as the other sees them.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <random>

#include "tests/core/transport/harness.h"

namespace dfccl {
namespace {

// A child that runs as process 1. It must be made before this process has threads.
class Child {
 public:
  // `body` returns whether all is well.
  Child(Over over, int64_t memory_bytes, TransportOptions options,
        const std::function<bool(Node*)>& body)
      : ends_(Connect(over, memory_bytes)) {
    pid_ = fork();
    if (pid_ == 0) {
      alarm(120);
      CloseEnd(ends_, 0);
      Node node(1, options);
      const bool linked = node.transport->AddLink(0, ends_.sockets[1], ends_.memory[1]).ok();
      _exit(linked && body(&node) && !testing::Test::HasFailure() ? 0 : 1);
    }
    CloseEnd(ends_, 1);  // the child's death is the end of all its sockets
  }
  ~Child() {
    if (pid_ > 0) {
      Kill(SIGKILL);
      Status();
    }
  }
  void Link(Node* node) {
    ASSERT_TRUE(node->transport->AddLink(1, ends_.sockets[0], ends_.memory[0]).ok());
  }
  void Kill(int signal) { kill(pid_, signal); }
  int Status() {
    int status = -1;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return status;
  }

 private:
  const Ends ends_;
  pid_t pid_ = -1;
};

bool SleepForever(Node*) {
  for (;;) pause();
}

class TwoProcessesTest : public testing::TestWithParam<Over> {};

INSTANTIATE_TEST_SUITE_P(Over, TwoProcessesTest, kOverAll,
                         [](const auto& info) { return OverName(info.param); });

// Both send and check the same kind of messages, from the same seeds.
bool Exchange(Node* node) {
  constexpr int kMessages = 60;
  const int peer = 1 - node->process;
  const auto message = [](int process, int i) {
    std::minstd_rand random(static_cast<uint32_t>(1000 * process + i + 1));
    const size_t most = i % 20 == 3 ? 8 << 20 : i % 3 == 0 ? 200'000 : 500;
    return Bytes(random(), random() % most);
  };
  std::vector<std::string> payloads;
  for (int i = 0; i < kMessages; ++i) {
    payloads.push_back(message(node->process, i));
  }
  for (int i = 0; i < kMessages; ++i) {
    if (!node->Post(peer, std::to_string(i), payloads[i], i % 2, node)) return false;
  }
  node->transport->BeginPolling();
  while (node->recorder.arrivals() < kMessages || node->recorder.sent(node) < kMessages) {
    if (!node->transport->Poll()) std::this_thread::yield();
    if (node->recorder.is_down(peer) && node->recorder.arrivals() < kMessages) return false;
  }
  node->transport->EndPolling();
  for (const Arrival& arrival : node->recorder.TakeArrivals()) {
    if (arrival.payload != message(peer, std::stoi(arrival.header))) return false;
  }
  return true;
}

TEST_P(TwoProcessesTest, RandomSizesBothWays) {
  Child child(GetParam(), 256 << 10, OptionsFor(GetParam()), [](Node* node) {
    const bool right = Exchange(node);
    node->transport->Close();
    return right;
  });
  Node node(0, OptionsFor(GetParam()));
  child.Link(&node);
  EXPECT_TRUE(Exchange(&node));
  EXPECT_EQ(child.Status(), 0);
  EXPECT_EQ(node.recorder.WaitDown(1).message(), "has left the job");
}

TEST_P(TwoProcessesTest, ExitWithoutGoodbyeIsADeath) {
  Child child(GetParam(), 256 << 10, OptionsFor(GetParam()), [](Node* node) {
    node->Post(0, "last words");
    return node->recorder.WaitArrivals(1);
  });
  Node node(0, OptionsFor(GetParam()));
  child.Link(&node);
  ASSERT_TRUE(node.Post(1, "exit"));
  EXPECT_EQ(child.Status(), 0);
  EXPECT_EQ(node.recorder.WaitDown(1).message().find("connection lost: "), 0u);
  EXPECT_EQ(node.recorder.arrivals(), 1u);  // what it sent before still counts
}

TEST_P(TwoProcessesTest, KilledInTheMiddle) {
  const std::string payload = Bytes(1, 1 << 20);
  Child child(GetParam(), 256 << 10, OptionsFor(GetParam()), [&](Node* node) {
    for (int i = 0; node->Post(0, std::to_string(i), payload, 0, node); ++i) {
      if (!node->recorder.WaitSent(node, i)) return false;
    }
    return true;
  });
  Node node(0, OptionsFor(GetParam()));
  child.Link(&node);
  int posted = 0;
  while (node.recorder.arrivals() < 20 && posted < 100'000) {
    ASSERT_TRUE(node.Post(1, std::to_string(posted), payload, 0, &node));
    ASSERT_TRUE(node.recorder.WaitSent(&node, ++posted));
  }
  child.Kill(SIGKILL);
  child.Status();
  while (node.Post(1, std::to_string(posted), payload, 0, &node)) ++posted;
  EXPECT_EQ(node.recorder.WaitDown(1).message().find("connection lost: "), 0u);
  EXPECT_EQ(node.recorder.sent(&node), posted);
  for (const Arrival& arrival : node.recorder.TakeArrivals()) {
    EXPECT_TRUE(arrival.payload == payload);
  }
}

// A stopped process of this host is late, not dead, and its ring fills up.
TEST(StoppedTest, OnThisHostIsNotDown) {
  constexpr int kMessages = 100;
  TransportOptions options;
  options.silence_ns = 100'000'000;
  Child child(Over::kRing, 128 << 10, options, [](Node* node) {
    if (!node->recorder.WaitArrivals(kMessages)) return false;
    node->Post(0, "all there");
    return node->recorder.WaitDown(0).message() == "has left the job";
  });
  Node node(0, options);
  child.Link(&node);
  child.Kill(SIGSTOP);
  const std::string payload = Bytes(2, 10'000);
  for (int i = 0; i < kMessages; ++i) {
    ASSERT_TRUE(node.Post(1, std::to_string(i), payload, 0, &node));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  EXPECT_FALSE(node.recorder.is_down(1));
  EXPECT_LT(node.recorder.sent(&node), kMessages);
  child.Kill(SIGCONT);
  EXPECT_TRUE(node.recorder.WaitArrivals(1));
  EXPECT_TRUE(node.recorder.WaitSent(&node, kMessages));
  node.transport->Close();
  EXPECT_EQ(child.Status(), 0);
}

TEST(StoppedTest, OverTheNetworkIsDownAfterSilence) {
  TransportOptions options;
  options.silence_ns = 200'000'000;
  Child child(Over::kTcp, 0, {}, SleepForever);
  Node node(0, options);
  child.Link(&node);
  child.Kill(SIGSTOP);
  EXPECT_EQ(node.recorder.WaitDown(1).message(), "connection lost: nothing heard any more");
}

}  // namespace
}  // namespace dfccl
