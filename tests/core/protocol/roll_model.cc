// SPDX-License-Identifier: Apache-2.0
// Roll and ProgressWord::Publish, as members that poll use them. Each member publishes
// its buffer, reads its peer's, and leaves. Then its buffer is its own again: after a
// success, by the plan, when the peer has said that it has read; after a failure, when
// the roll is quiet. A buffer that is written while a peer may still read it is a race.
#include "core/protocol/progress.h"
#include "core/protocol/roll.h"
#include "tests/core/protocol/model.h"

namespace dfccl {
namespace {

constexpr uint32_t kHere = 1;
constexpr uint32_t kRead = 2;

struct Members {
  Roll roll;
  ProgressWord progress[2];
  Plain<int> buffer[2];
  Plain<int> shared;  // what who is the last gives back
  int ended[2] = {};
  int last = 0;

  void Run(int member) {
    const int peer = 1 - member;
    buffer[member].Store(member + 10);
    const bool takes_part = roll.Arrive();
    if (takes_part) {
      progress[member].Publish(kHere);
      if (Await(peer, kHere)) {
        RL_ASSERT(buffer[peer].Load() == peer + 10);
        RL_ASSERT(shared.Load() == 5);
        progress[member].Publish(kRead);
        if (Await(peer, kRead)) {
          ++ended[member];
          const Roll::Left left = roll.Leave(2);
          if (left == Roll::Left::kLast) {
            shared.Store(0);
            ++last;
          }
          buffer[member].Store(0);
          return;
        }
      }
    }
    RL_ASSERT(roll.Leave(2) == Roll::Left::kFailed);
    while (!roll.Quiet()) SpinPause();
    buffer[member].Store(0);
    ++ended[member];
  }

  bool Await(int peer, uint32_t value) {
    while (!progress[peer].Reached(value)) {
      if (roll.Failed()) return false;
      SpinPause();
    }
    return !roll.Failed();
  }
};

template <bool kFails>
struct RollModel : rl::test_suite<RollModel<kFails>, kFails ? 3 : 2> {
  Members members;

  void before() { members.shared.Store(5); }

  void thread(unsigned index) {
    if (index < 2) {
      members.Run(static_cast<int>(index));
    } else {
      members.roll.Fail();
    }
  }

  void after() {
    RL_ASSERT(members.ended[0] == 1 && members.ended[1] == 1);
    RL_ASSERT(kFails || members.last == 1);
    RL_ASSERT(members.last <= 1);
  }
};

}  // namespace
}  // namespace dfccl

int main(int argc, char** argv) {
  using namespace dfccl;
  const bool no_fault = ExploreRandom<RollModel<false>>(20000) &&
                        ExploreRandom<RollModel<true>>(40000) &&
                        ExploreBounded<RollModel<false>>(2);
  return ModelExit(argc, argv, no_fault);
}
