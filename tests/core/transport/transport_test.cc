// SPDX-License-Identifier: Apache-2.0
// The transport, two or more of them in one process.
#include "core/transport/transport.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <random>

#include "tests/core/protocol/stress.h"
#include "tests/core/transport/harness.h"

namespace dfccl {
namespace {

constexpr int64_t kSmallRings = 128 << 10;

class TransportTest : public testing::TestWithParam<Over> {
 protected:
  Node a{0, OptionsFor(GetParam())}, b{1, OptionsFor(GetParam())};
};

INSTANTIATE_TEST_SUITE_P(Over, TransportTest, kOverAll,
                         [](const auto& info) { return OverName(info.param); });

TEST_P(TransportTest, MessagesArriveInOrder) {
  Join(&a, &b, Connect(GetParam()));
  std::vector<std::string> payloads;
  for (int i = 0; i < 1000; ++i) payloads.push_back(Bytes(i, i % 50));
  for (int i = 0; i < 1000; ++i) {
    ASSERT_TRUE(a.Post(1, "h" + std::to_string(i), payloads[i], 0, &a));
  }
  ASSERT_TRUE(b.recorder.WaitArrivals(1000));
  const std::vector<Arrival> arrivals = b.recorder.TakeArrivals();
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(arrivals[i].process, 0);
    EXPECT_EQ(arrivals[i].header, "h" + std::to_string(i));
    EXPECT_TRUE(arrivals[i].payload == payloads[i]) << i;
  }
  EXPECT_TRUE(a.recorder.WaitSent(&a, 1000));
}

TEST_P(TransportTest, LargeMessagesComeInSlices) {
  const std::string from_a = Bytes(1, 9'000'001), from_b = Bytes(2, 7'654'321);
  ASSERT_TRUE(a.Post(1, "a", from_a, 0, &a));  // before the link
  Join(&a, &b, Connect(GetParam(), kSmallRings));
  ASSERT_TRUE(b.Post(0, "b", from_b, 0, &b));
  ASSERT_TRUE(b.recorder.WaitArrivals(1));
  ASSERT_TRUE(a.recorder.WaitArrivals(1));
  EXPECT_TRUE(b.recorder.TakeArrivals()[0].payload == from_a);
  EXPECT_TRUE(a.recorder.TakeArrivals()[0].payload == from_b);
  EXPECT_GE(a.recorder.slices, 7'654'321 / TransportOptions().slice_bytes);
  EXPECT_TRUE(a.recorder.WaitSent(&a, 1));
  EXPECT_TRUE(b.recorder.WaitSent(&b, 1));
}

TEST_P(TransportTest, HeadersOfAnySizeAndNoPayload) {
  Join(&a, &b, Connect(GetParam(), kSmallRings));
  const std::string payload = Bytes(3, 10);
  std::vector<std::string> headers;
  for (const size_t size : {1, 2, 255, 256, 257, 4095, 4096}) headers.push_back(Bytes(size, size));
  for (const std::string& header : headers) {
    ASSERT_TRUE(a.Post(1, header));
    ASSERT_TRUE(a.Post(1, header, payload, 0, &a));
  }
  ASSERT_TRUE(b.recorder.WaitArrivals(2 * headers.size()));
  const std::vector<Arrival> arrivals = b.recorder.TakeArrivals();
  for (size_t i = 0; i < arrivals.size(); ++i) {
    EXPECT_TRUE(arrivals[i].header == headers[i / 2]) << i;
    EXPECT_TRUE(arrivals[i].payload == (i % 2 ? payload : "")) << i;
  }
  EXPECT_TRUE(a.recorder.WaitSent(&a, static_cast<int>(headers.size())));
}

TEST_P(TransportTest, WhatHasLeftAtOnceIsNotReportedAgain) {
  Join(&a, &b, Connect(GetParam()));
  const std::string payload = Bytes(4, 100);
  ASSERT_TRUE(a.Post(1, "first", payload, 0, &b));
  ASSERT_TRUE(a.recorder.WaitSent(&b, 1));
  bool left = false;
  while (!left) {  // the transport's thread may be at the link for a moment
    ASSERT_TRUE(a.transport->Post(1, MessageOf("second", payload, 0, &a), &left));
    if (!left) {
      ASSERT_TRUE(a.recorder.WaitSent(&a, 1));
      a.recorder.ForgetSent();
    }
  }
  ASSERT_TRUE(a.Post(1, "third", payload, 0, &b));
  ASSERT_TRUE(a.recorder.WaitSent(&b, 1));
  EXPECT_EQ(a.recorder.sent(&a), 0);
}

TEST_P(TransportTest, LargerPriorityFirstAndEqualInOrder) {
  std::mt19937 random(5);
  std::vector<std::pair<int, std::string>> expected;
  for (int i = 0; i < 500; ++i) {
    const int priority = static_cast<int>(random() % 7) - 3;
    expected.push_back({priority, "m" + std::to_string(i)});
    ASSERT_TRUE(a.Post(1, expected.back().second, {}, priority));
  }
  std::stable_sort(expected.begin(), expected.end(),
                   [](const auto& x, const auto& y) { return x.first > y.first; });
  Join(&a, &b, Connect(GetParam()));
  ASSERT_TRUE(b.recorder.WaitArrivals(expected.size()));
  const std::vector<Arrival> arrivals = b.recorder.TakeArrivals();
  for (size_t i = 0; i < arrivals.size(); ++i) EXPECT_EQ(arrivals[i].header, expected[i].second);
}

// The peer's end is not taken up yet, so the first message gets stuck in its middle.
TEST_P(TransportTest, UrgentOvertakesInTheMiddle) {
  const Ends ends = Connect(GetParam(), kSmallRings);
  const std::string bulk = Bytes(6, 32 << 20), urgent = Bytes(7, 300'000);
  ASSERT_TRUE(a.transport->AddLink(1, ends.sockets[0], ends.memory[0]).ok());
  ASSERT_TRUE(a.Post(1, "bulk", bulk, 0, &a));
  ASSERT_TRUE(a.Post(1, "urgent", urgent, 1, &b));
  ASSERT_TRUE(a.Post(1, "more urgent", {}, 2));
  int64_t slices_before = -1;
  b.recorder.on_message = [&](int) {
    if (slices_before < 0) slices_before = b.recorder.slices;
  };
  ASSERT_TRUE(b.transport->AddLink(0, ends.sockets[1], ends.memory[1]).ok());
  ASSERT_TRUE(b.recorder.WaitArrivals(3));
  const std::vector<Arrival> arrivals = b.recorder.TakeArrivals();
  EXPECT_EQ(arrivals[0].header, "more urgent");
  EXPECT_EQ(arrivals[1].header, "urgent");
  EXPECT_EQ(arrivals[2].header, "bulk");
  EXPECT_TRUE(arrivals[1].payload == urgent);
  EXPECT_TRUE(arrivals[2].payload == bulk);
  EXPECT_GT(slices_before, 1);  // the bulk was in its middle
}

// More messages in the middle than there are streams.
TEST_P(TransportTest, ManyLevelsOfUrgency) {
  constexpr int kMessages = 100;
  const Ends ends = Connect(GetParam(), kSmallRings);
  ASSERT_TRUE(a.transport->AddLink(1, ends.sockets[0], ends.memory[0]).ok());
  std::vector<std::string> payloads;
  for (int i = 0; i < kMessages; ++i) payloads.push_back(Bytes(i, 300'000));
  for (int i = 0; i < kMessages; ++i) {
    ASSERT_TRUE(a.Post(1, "m" + std::to_string(i), payloads[i], i, &a));
  }
  ASSERT_TRUE(b.transport->AddLink(0, ends.sockets[1], ends.memory[1]).ok());
  ASSERT_TRUE(b.recorder.WaitArrivals(kMessages));
  for (const Arrival& arrival : b.recorder.TakeArrivals()) {
    EXPECT_TRUE(arrival.payload == payloads[std::stoi(arrival.header.substr(1))]);
  }
  EXPECT_TRUE(a.recorder.WaitSent(&a, kMessages));
}

TEST_P(TransportTest, CancelTakesBackWhatHasNotLeft) {
  const Ends ends = Connect(GetParam(), kSmallRings);
  auto waiting = std::make_unique<std::string>(Bytes(8, 1000));
  ASSERT_TRUE(a.Post(1, "waiting", *waiting, 3, &a));
  a.transport->Cancel(1, &a);
  waiting.reset();
  ASSERT_TRUE(a.transport->AddLink(1, ends.sockets[0], ends.memory[0]).ok());
  auto middle = std::make_unique<std::string>(Bytes(9, 32 << 20));
  auto behind = std::make_unique<std::string>(Bytes(10, 1000));
  ASSERT_TRUE(a.Post(1, "in the middle", *middle, 0, &a));
  ASSERT_TRUE(a.Post(1, "behind", *behind, 0, &a));
  const std::string stays = Bytes(11, 500'000);
  ASSERT_TRUE(a.Post(1, "stays", stays, 0, &b));
  a.transport->Cancel(1, &a);
  middle.reset();
  behind.reset();
  ASSERT_TRUE(b.transport->AddLink(0, ends.sockets[1], ends.memory[1]).ok());
  ASSERT_TRUE(b.recorder.WaitArrivals(1));
  ASSERT_TRUE(a.recorder.WaitSent(&b, 1));
  const std::vector<Arrival> arrivals = b.recorder.TakeArrivals();
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_EQ(arrivals[0].header, "stays");
  EXPECT_TRUE(arrivals[0].payload == stays);
  EXPECT_EQ(a.recorder.sent(&a), 3);
}

// Payloads are given back, and so may be changed, right after Cancel.
TEST_P(TransportTest, CancelWhileItIsMoving) {
  constexpr int kMessages = 400;
  const uint32_t seed = StressSeed();
  std::mt19937 random(seed);
  Join(&a, &b, Connect(GetParam(), kSmallRings));
  std::atomic<bool> stop{false};
  std::thread poller([&] {
    while (!stop) {
      a.transport->Poll();
      b.transport->Poll();
      std::this_thread::yield();
    }
  });
  struct Posted {
    std::string payload;
  };
  std::deque<Posted> posted(4);
  std::vector<uint64_t> sizes;
  for (int i = 0; i < kMessages; ++i) {
    Posted& slot = posted[i % 4];
    a.transport->Cancel(1, &slot);
    const size_t size = random() % (random() % 8 == 0 ? 1'000'000 : 30'000);
    std::fill(slot.payload.begin(), slot.payload.end(), '?');
    slot.payload = Bytes(i, size);
    sizes.push_back(size);
    ASSERT_TRUE(a.Post(1, std::to_string(i), slot.payload, static_cast<int>(random() % 3), &slot));
    if (random() % 4 == 0) std::this_thread::yield();
  }
  ASSERT_TRUE(a.Post(1, "end", {}, -1));
  for (Posted& slot : posted) a.transport->Cancel(1, &slot);
  ASSERT_TRUE(b.recorder.Wait([&, this] { return b.recorder.Has("end"); }));
  stop = true;
  poller.join();
  for (const Arrival& arrival : b.recorder.TakeArrivals()) {
    if (arrival.header == "end") continue;
    const int i = std::stoi(arrival.header);
    EXPECT_TRUE(arrival.payload == Bytes(i, sizes[i])) << i;
  }
}

TEST_P(TransportTest, RandomSizesBothWaysFromManyThreads) {
  constexpr int kThreads = 2, kMessages = 60;
  const uint32_t seed = StressSeed();
  Join(&a, &b, Connect(GetParam(), kSmallRings));
  std::vector<std::string> payloads[2][kThreads];
  std::mt19937 random(seed);
  for (int from = 0; from < 2; ++from) {
    for (int thread = 0; thread < kThreads; ++thread) {
      for (int i = 0; i < kMessages; ++i) {
        const size_t most = i % 30 == 7 ? 8 << 20 : i % 3 == 0 ? 100'000 : 1000;
        payloads[from][thread].push_back(Bytes(random(), random() % most));
      }
    }
  }
  std::vector<std::thread> threads;
  for (Node* node : {&a, &b}) {
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, node, thread] {
        std::minstd_rand order(seed + static_cast<uint32_t>(thread));
        for (int i = 0; i < kMessages; ++i) {
          const std::string header = std::to_string(thread) + " " + std::to_string(i);
          EXPECT_TRUE(node->Post(1 - node->process, header, payloads[node->process][thread][i],
                                 thread, node));
          switch (order() % 3) {
            case 0:
              node->transport->Poll();
              break;
            case 1:
              node->transport->BeginPolling();
              for (int polls = 0; polls < 20; ++polls) node->transport->Poll();
              node->transport->EndPolling();
              break;
            default:
              break;
          }
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (Node* node : {&a, &b}) {
    EXPECT_TRUE(node->recorder.WaitArrivals(kThreads * kMessages));
    EXPECT_TRUE(node->recorder.WaitSent(node, kThreads * kMessages));
    int next[kThreads] = {};
    for (const Arrival& arrival : node->recorder.TakeArrivals()) {
      const int thread = std::stoi(arrival.header);
      const int i = std::stoi(arrival.header.substr(arrival.header.find(' ')));
      EXPECT_EQ(i, next[thread]++);
      EXPECT_TRUE(arrival.payload == payloads[1 - node->process][thread][i]);
    }
  }
}

// Nobody polls but the transports' threads, which sleep whenever they can.
TEST_P(TransportTest, NoDoorbellIsLost) {
  constexpr int kRounds = 3000;
  TransportOptions sleepy;
  sleepy.spin_ns = 0;
  Node c(0, sleepy), d(1, sleepy);
  std::atomic<int> rounds{0};
  for (Node* node : {&c, &d}) {
    node->recorder.on_message = [&, node](int from) {
      if (++rounds < kRounds) node->Post(from, "to and fro");
    };
  }
  Join(&c, &d, Connect(GetParam(), kSmallRings));
  ASSERT_TRUE(c.Post(1, "to and fro"));
  EXPECT_TRUE(d.recorder.WaitArrivals(kRounds / 2));
  EXPECT_TRUE(c.recorder.WaitArrivals(kRounds / 2));
}

// The same with threads that poll now and then, and a ring that is often full.
TEST_P(TransportTest, NoDoorbellIsLostBesidePollers) {
  constexpr int kBursts = 150, kBurst = 8;
  const uint32_t seed = StressSeed();
  TransportOptions sleepy;
  sleepy.spin_ns = 0;
  sleepy.slice_bytes = 8 << 10;
  Node c(0, sleepy), d(1, sleepy);
  Join(&c, &d, Connect(GetParam(), kSmallRings));
  std::atomic<bool> stop{false};
  std::vector<std::thread> pollers;
  for (Node* node : {&c, &d}) {
    pollers.emplace_back([&, node] {
      std::minstd_rand random(seed + static_cast<uint32_t>(node->process));
      while (!stop) {
        node->transport->BeginPolling();
        for (uint32_t polls = random() % 5; polls > 0; --polls) node->transport->Poll();
        node->transport->EndPolling();
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
      }
    });
  }
  const std::string payload = Bytes(12, 20'000);
  for (int burst = 1; burst <= kBursts; ++burst) {
    for (int i = 0; i < kBurst; ++i) {
      ASSERT_TRUE(c.Post(1, "c" + std::to_string(i), payload, 0, &c));
      ASSERT_TRUE(d.Post(0, "d" + std::to_string(i), payload, 0, &d));
    }
    ASSERT_TRUE(c.recorder.WaitArrivals(burst * kBurst)) << burst;
    ASSERT_TRUE(d.recorder.WaitArrivals(burst * kBurst)) << burst;
  }
  EXPECT_TRUE(c.recorder.WaitSent(&c, kBursts * kBurst));
  EXPECT_TRUE(d.recorder.WaitSent(&d, kBursts * kBurst));
  stop = true;
  for (std::thread& poller : pollers) poller.join();
}

TEST_P(TransportTest, CallbacksMayPostAndCancel) {
  const std::string payload = Bytes(13, 200'000);
  a.recorder.on_sent = [&](void* owner) {
    a.transport->Cancel(1, owner);
    a.transport->Cancel(1, &b);
    if (owner == &a) a.Post(1, "sent");
  };
  b.recorder.on_message = [&](int) { b.transport->Cancel(0, &b); };
  Join(&a, &b, Connect(GetParam(), kSmallRings));
  ASSERT_TRUE(a.Post(1, "first", payload, 0, &a));
  ASSERT_TRUE(b.recorder.WaitArrivals(2));
  EXPECT_EQ(b.recorder.TakeArrivals()[1].header, "sent");
}

TEST_P(TransportTest, SlicesMayBeThrownAway) {
  Join(&a, &b, Connect(GetParam(), kSmallRings));
  const std::string payload = Bytes(14, 3'000'000);
  b.recorder.OnBegin([](char*) { return nullptr; });
  ASSERT_TRUE(a.Post(1, "thrown away", payload, 0, &a));
  ASSERT_TRUE(b.recorder.WaitArrivals(1));
  EXPECT_TRUE(b.recorder.TakeArrivals()[0].payload == std::string(payload.size(), 0));
  b.recorder.OnBegin(nullptr);
  ASSERT_TRUE(a.Post(1, "kept", payload, 0, &a));
  ASSERT_TRUE(b.recorder.WaitArrivals(1));
  EXPECT_TRUE(b.recorder.TakeArrivals()[0].payload == payload);
}

// What is lent is copied when its receiver takes it, not before, and not after Cancel.
TEST(LentTest, ThePayloadStaysWhereItIs) {
  Node a{0, OptionsFor(Over::kLent)}, b{1, OptionsFor(Over::kLent)};
  Join(&a, &b, Connect(Over::kRing));
  ASSERT_TRUE(a.Post(1, "small"));  // b finds out that it can read the memory of a
  ASSERT_TRUE(b.recorder.WaitArrivals(1));
  std::string payload = Bytes(14, 50'000);
  const std::string later = Bytes(15, 50'000);
  b.recorder.OnBegin([&](char* to) {
    payload = later;
    return to;
  });
  ASSERT_TRUE(a.Post(1, "lent", payload, 0, &a));
  ASSERT_TRUE(b.recorder.WaitArrivals(2));
  EXPECT_TRUE(b.recorder.TakeArrivals()[1].payload == later);
  EXPECT_TRUE(a.recorder.WaitSent(&a, 1));
}

TEST(LentTest, WhatIsTakenBackIsNotUsed) {
  Node a{0, OptionsFor(Over::kLent)}, b{1, OptionsFor(Over::kLent)};
  Join(&a, &b, Connect(Over::kRing));
  ASSERT_TRUE(a.Post(1, "small"));
  ASSERT_TRUE(b.recorder.WaitArrivals(1));
  // One slice, and several of which the second is taken back.
  for (const size_t size : {size_t{50'000}, size_t{300'000}}) {
    std::string payload = Bytes(16, size);
    int slices = 0;
    b.recorder.OnBegin([&](char* to) {
      if (++slices == (size < 64'000 ? 1 : 2)) {
        a.transport->Cancel(1, &payload);
        std::fill(payload.begin(), payload.end(), '?');
      }
      return to;
    });
    ASSERT_TRUE(a.Post(1, "taken back", payload, 0, &payload));
    const std::string next = Bytes(17, size);
    ASSERT_TRUE(a.recorder.WaitSent(&payload, 1));
    b.recorder.OnBegin([](char* to) { return to; });
    ASSERT_TRUE(a.Post(1, "next", next, 0, &a));
    ASSERT_TRUE(a.Post(1, "end"));
    ASSERT_TRUE(b.recorder.Wait([&] { return b.recorder.Has("end"); }));
    const std::vector<Arrival> arrivals = b.recorder.TakeArrivals();
    const auto has = [&](const char* header) {
      return std::count_if(arrivals.begin(), arrivals.end(),
                           [&](const Arrival& arrival) { return arrival.header == header; });
    };
    EXPECT_EQ(has("taken back"), 0);
    EXPECT_EQ(has("next"), 1);
    for (const Arrival& arrival : arrivals) {
      EXPECT_TRUE(arrival.header != "next" || arrival.payload == next);
    }
    EXPECT_EQ(a.recorder.sent(&payload), 1);
    a.recorder.ForgetSent();
  }
}

TEST_P(TransportTest, GoodbyeIsNoDeath) {
  Join(&a, &b, Connect(GetParam()));
  const std::string payload = Bytes(15, 5'000'000);
  ASSERT_TRUE(a.Post(1, "last words", payload));
  a.transport->Close();
  EXPECT_EQ(b.recorder.WaitDown(0).message(), "has left the job");
  const std::vector<Arrival> arrivals = b.recorder.TakeArrivals();
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_TRUE(arrivals[0].payload == payload);
  EXPECT_FALSE(b.Post(0, "too late"));
  EXPECT_FALSE(a.Post(1, "too late"));
  Status status;
  EXPECT_TRUE(b.transport->IsDown(0, &status));
  EXPECT_EQ(status.message(), "has left the job");
}

TEST_P(TransportTest, AnEndWithoutGoodbyeIsADeath) {
  const Ends ends = Connect(GetParam(), kSmallRings);
  ASSERT_TRUE(a.transport->AddLink(1, ends.sockets[0], ends.memory[0]).ok());
  const std::string payload = Bytes(16, 32 << 20);
  ASSERT_TRUE(a.Post(1, "stuck", payload, 0, &a));
  ASSERT_TRUE(a.Post(1, "behind", payload, 0, &a));
  CloseEnd(ends, 1);
  const Status status = a.recorder.WaitDown(1);
  EXPECT_EQ(status.code(), StatusCode::kAborted);
  EXPECT_EQ(status.message().find("connection lost: "), 0u) << status.message();
  EXPECT_EQ(a.recorder.sent(&a), 2);
  EXPECT_FALSE(a.Post(1, "too late"));
}

TEST(LinkTest, TheEndOfOneOfSeveralSocketsIsTheEnd) {
  const std::string payload = Bytes(18, 1 << 20);
  TransportOptions options;
  options.silence_ns = 0;
  for (size_t ended = 0; ended < 3; ++ended) {
    Node a(0, options);
    Ends ends = Connect(Over::kTcps);
    ASSERT_TRUE(a.transport->AddLink(1, ends.sockets[0], -1).ok());
    close(ends.sockets[1][ended]);
    ends.sockets[1].erase(ends.sockets[1].begin() + static_cast<std::ptrdiff_t>(ended));
    int posted = 0;
    while (posted < 8 && a.Post(1, std::to_string(posted), payload, 0, &a)) ++posted;
    const Status status = a.recorder.WaitDown(1);
    EXPECT_EQ(status.message().find("connection lost: "), 0u) << ended << ": " << status.message();
    EXPECT_EQ(a.recorder.sent(&a), posted);
    for (int socket : ends.sockets[1]) {  // the peer finds it at the others, too
      const timeval limit = {60, 0};
      setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
      std::string sink(1 << 20, 0);
      ssize_t read;
      while ((read = recv(socket, &sink[0], sink.size(), 0)) > 0) continue;
      EXPECT_TRUE(read == 0 || errno == ECONNRESET) << std::strerror(errno);
    }
    CloseEnd(ends, 1);
  }
}

TEST_P(TransportTest, DeclaredDown) {
  Join(&a, &b, Connect(GetParam()));
  a.transport->SetDown(1, {StatusCode::kDeadlineExceeded, "too slow"});
  EXPECT_EQ(a.recorder.WaitDown(1).message(), "too slow");
  EXPECT_EQ(b.recorder.WaitDown(0).message().find("connection lost: "), 0u);
  EXPECT_FALSE(a.Post(1, "too late"));
  a.transport->SetDown(1, {StatusCode::kInternal, "again"});
  Status status;
  EXPECT_TRUE(a.transport->IsDown(1, &status));
  EXPECT_EQ(status.message(), "too slow");
}

TEST(LinkTest, DownBeforeThereIsALink) {
  Node a(0);
  const std::string payload = Bytes(17, 10);
  ASSERT_TRUE(a.Post(7, "waits", payload, 0, &a));
  Status status;
  EXPECT_FALSE(a.transport->IsDown(7, &status));
  a.transport->SetDown(7, {StatusCode::kAborted, "never came"});
  EXPECT_EQ(a.recorder.WaitDown(7).message(), "never came");
  EXPECT_EQ(a.recorder.sent(&a), 1);
  const Ends ends = Connect(Over::kRing);
  EXPECT_FALSE(a.transport->AddLink(7, ends.sockets[0], ends.memory[0]).ok());
  char byte;
  EXPECT_EQ(recv(ends.sockets[1][0], &byte, 1, 0), 0);  // it was closed
  CloseEnd(ends, 1);
}

TEST(LinkTest, LinksThatAreRefused) {
  Node a(0), b(1);
  for (const int process : {-1, 0, Transport::kMostProcesses}) {
    const Ends ends = Connect(Over::kTcp);
    EXPECT_FALSE(a.transport->AddLink(process, ends.sockets[0], -1).ok());
    CloseEnd(ends, 1);
  }
  Ends ends = Connect(Over::kRing, 1000);
  EXPECT_FALSE(a.transport->AddLink(1, ends.sockets[0], ends.memory[0]).ok());
  EXPECT_FALSE(b.transport->AddLink(0, ends.sockets[1], ends.memory[1]).ok());
  Join(&a, &b, Connect(Over::kRing));
  ends = Connect(Over::kTcp);
  EXPECT_FALSE(a.transport->AddLink(1, ends.sockets[0], -1).ok());
  EXPECT_FALSE(b.transport->AddLink(0, ends.sockets[1], -1).ok());
  ASSERT_TRUE(a.Post(1, "goes over the first"));
  EXPECT_TRUE(b.recorder.WaitArrivals(1));
}

TEST(LinkTest, ManyLinks) {
  constexpr int kPeers = 40, kRounds = 20;
  Node hub(0);
  std::vector<std::unique_ptr<Node>> peers;
  for (int i = 1; i <= kPeers; ++i) {
    peers.push_back(std::make_unique<Node>(i));
    Node* const peer = peers.back().get();
    peer->recorder.on_message = [peer](int from) {
      peer->Post(from, std::to_string(peer->recorder.arrivals()));
    };
    Join(&hub, peer, Connect(static_cast<Over>(i % 3), kSmallRings));
  }
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 1; i <= kPeers; ++i) ASSERT_TRUE(hub.Post(i, "round " + std::to_string(round)));
  }
  ASSERT_TRUE(hub.recorder.WaitArrivals(kPeers * kRounds));
  std::vector<int> next(kPeers + 1, 1);
  for (const Arrival& arrival : hub.recorder.TakeArrivals()) {
    EXPECT_EQ(arrival.header, std::to_string(next[arrival.process]++));
  }
}

int64_t ProcessCpuNs() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

TEST(LinkTest, IdleTransportsSleep) {
  Node a(0), b(1), c(2);
  Join(&a, &b, Connect(Over::kRing));
  Join(&a, &c, Connect(Over::kTcp));
  ASSERT_TRUE(a.Post(1, "x"));
  ASSERT_TRUE(a.Post(2, "y"));
  ASSERT_TRUE(b.recorder.WaitArrivals(1));
  ASSERT_TRUE(c.recorder.WaitArrivals(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const int64_t before = ProcessCpuNs();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_LT(ProcessCpuNs() - before, 50'000'000);  // processor time: any spinning is 500
}

TEST(SilenceTest, HeartbeatsKeepAnIdleLinkUp) {
  TransportOptions options;
  options.silence_ns = 500'000'000;
  Node a(0, options), b(1, options);
  Join(&a, &b, Connect(Over::kTcp));
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  EXPECT_FALSE(a.recorder.is_down(1));
  EXPECT_FALSE(b.recorder.is_down(0));
  ASSERT_TRUE(a.Post(1, "still there"));
  EXPECT_TRUE(b.recorder.WaitArrivals(1));
}

TEST(SilenceTest, ASilentPeerIsDown) {
  TransportOptions options;
  options.silence_ns = 200'000'000;
  Node a(0, options);
  const Ends ends = Connect(Over::kTcp);
  ASSERT_TRUE(a.transport->AddLink(1, ends.sockets[0], -1).ok());
  EXPECT_EQ(a.recorder.WaitDown(1).message(), "connection lost: nothing heard any more");
  CloseEnd(ends, 1);
}

}  // namespace
}  // namespace dfccl
