// SPDX-License-Identifier: Apache-2.0
// The ticket table: every ticket is taken once, and what is never taken is reaped.
#include "xla_ffi/tickets.h"

#include <gtest/gtest.h>

#include <set>
#include <thread>
#include <vector>

namespace dfccl {
namespace {

StartedOperation Started(int64_t device, uint64_t launch, int64_t mark, uint64_t program = 1) {
  StartedOperation started;
  started.device = device;
  started.program = program;
  started.launch = launch;
  started.source_bytes = mark;
  return started;
}

struct Reaped {
  std::multiset<int64_t> marks;
  TicketTable::Reaper Reaper() {
    return [this](const StartedOperation& started) { marks.insert(started.source_bytes); };
  }
};

TEST(TicketTableTest, GivesBackWhatWasPut) {
  Reaped reaped;
  TicketTable table(reaped.Reaper());
  const uint64_t a = table.Put(Started(0, 0, 10)), b = table.Put(Started(1, 0, 20));
  EXPECT_EQ(table.size(), 2);
  StartedOperation started;
  ASSERT_TRUE(table.Take(b, &started));
  EXPECT_EQ(started.source_bytes, 20);
  ASSERT_TRUE(table.Take(a, &started));
  EXPECT_EQ(started.source_bytes, 10);
  EXPECT_EQ(table.size(), 0);
}

TEST(TicketTableTest, RecognisesUsedForgedAndOldTickets) {
  Reaped reaped;
  TicketTable table(reaped.Reaper());
  StartedOperation started;
  EXPECT_FALSE(table.Take(0, &started));
  EXPECT_FALSE(table.Take(~uint64_t{0}, &started));
  const uint64_t old = table.Put(Started(3, 0, 1));
  EXPECT_NE(old, 0u);
  EXPECT_FALSE(table.Take(old + (uint64_t{1} << 32), &started));
  EXPECT_TRUE(table.Take(old, &started));
  EXPECT_FALSE(table.Take(old, &started));
  const uint64_t recent = table.Put(Started(3, 0, 2));  // in the same slot
  EXPECT_FALSE(table.Take(old, &started));
  EXPECT_NE(table.WhyGone(old).message().find(std::to_string(old)), std::string::npos);
  ASSERT_TRUE(table.Take(recent, &started));
  EXPECT_EQ(started.source_bytes, 2);
}

TEST(TicketTableTest, DropsOneLaunchOfOneDevice) {
  Reaped reaped;
  TicketTable table(reaped.Reaper());
  const uint64_t dropped = table.Put(Started(2, 7, 1));
  const uint64_t kept[] = {table.Put(Started(2, 8, 2)), table.Put(Started(18, 7, 3)),
                           table.Put(Started(2, 7, 4, /*program=*/9))};
  table.Drop(2, 1, 7, Status(StatusCode::kAborted, "the reason"));
  EXPECT_EQ(reaped.marks, (std::multiset<int64_t>{1}));
  StartedOperation started;
  EXPECT_FALSE(table.Take(dropped, &started));
  EXPECT_EQ(table.WhyGone(dropped).message(), "the reason");
  EXPECT_NE(table.WhyGone(kept[0] + (uint64_t{2} << 32)).message(), "the reason");
  for (uint64_t ticket : kept) EXPECT_TRUE(table.Take(ticket, &started));
}

TEST(TicketTableTest, ReapsWhatIsManyLaunchesOld) {
  Reaped reaped;
  TicketTable table(reaped.Reaper());
  constexpr int kLaunches = 10000;
  for (int launch = 0; launch < kLaunches; ++launch) table.Put(Started(0, launch, launch));
  EXPECT_LE(table.size(), 600);
  EXPECT_EQ(table.size() + reaped.marks.size(), size_t{kLaunches});
  EXPECT_EQ(*reaped.marks.begin(), 0);
  EXPECT_LT(*reaped.marks.rbegin(), kLaunches - 64);  // the last launches are never touched
}

TEST(TicketTableTest, NeverReapsWhatAHandleKeeps) {
  Reaped reaped;
  TicketTable table(reaped.Reaper());
  std::vector<uint64_t> tickets;
  for (int launch = 0; launch < 1000; ++launch) {
    StartedOperation started = Started(0, launch, launch);
    started.kept = true;
    tickets.push_back(table.Put(started));
  }
  EXPECT_TRUE(reaped.marks.empty());
  StartedOperation taken;
  for (int launch = 0; launch < 1000; ++launch) {
    int64_t mark = -1;
    const auto look = [&](const StartedOperation& started) { mark = started.source_bytes; };
    EXPECT_TRUE(table.Look(tickets[launch], look));
    EXPECT_EQ(mark, launch);
    EXPECT_TRUE(table.Take(tickets[launch], &taken));  // it was still there
    EXPECT_FALSE(table.Look(tickets[launch], look));
  }
}

TEST(TicketTableTest, HoldsAHundredThousandOfOneLaunch) {
  Reaped reaped;
  TicketTable table(reaped.Reaper());
  std::vector<uint64_t> tickets;
  for (int i = 0; i < 100000; ++i) tickets.push_back(table.Put(Started(5, 1, i)));
  StartedOperation started;
  for (int i = 0; i < 100000; ++i) {
    ASSERT_TRUE(table.Take(tickets[i], &started));
    ASSERT_EQ(started.source_bytes, i);
  }
  EXPECT_TRUE(reaped.marks.empty());
}

TEST(TicketTableTest, ThreadsTakeEachTicketOnce) {
  Reaped reaped;
  TicketTable table(reaped.Reaper());
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&table, thread] {
      StartedOperation started;
      for (int i = 0; i < 5000; ++i) {
        const int64_t mark = 10000 * thread + i;
        const uint64_t ticket = table.Put(Started(i % 3, 0, mark));  // lanes are shared
        ASSERT_TRUE(table.Take(ticket, &started));
        ASSERT_EQ(started.source_bytes, mark);
        ASSERT_FALSE(table.Take(ticket, &started));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(table.size(), 0);
}

}  // namespace
}  // namespace dfccl
