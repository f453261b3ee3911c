// SPDX-License-Identifier: Apache-2.0
// FlaggedWord: in every use of the same words each member reads what its peer has posted in
// that use, all of it, also where uses are of different length and generations begin anew.
// Thread 2 is the host, which hands the words on.
#include "core/protocol/flagged_word.h"
#include "tests/core/protocol/model.h"

namespace dfccl {
namespace {

constexpr int kWords = 2;
constexpr int kUses = 4;

struct FlaggedWordModel : rl::test_suite<FlaggedWordModel, 3> {
  FlaggedWord posted[2][kWords];
  Plain<uint32_t> generation;  // of this use
  Atomic<uint32_t> begun;      // uses
  Atomic<uint32_t> over;       // members' uses

  // One use in two leaves the second word alone.
  static int Words(int use) { return use % 2 == 0 ? kWords : 1; }
  static uint32_t Data(int use, unsigned member, int word) {
    return static_cast<uint32_t>(use * 100 + static_cast<int>(member) * 10 + word + 1);
  }

  void thread(unsigned index) {
    if (index == 2) {
      Host();
    } else {
      for (int use = 0; use < kUses; ++use) Use(use, index);
    }
  }

  void Host() {
    uint32_t next = 0;
    for (int use = 0; use < kUses; ++use) {
      while (over.LoadAcquire() != 2 * static_cast<uint32_t>(use)) SpinPause();
      if (use == 1) next = ~uint32_t{0} - 1;  // almost all others have been by now
      if (FlaggedWord::NextGeneration(&next)) {
        for (auto& member : posted) {
          for (FlaggedWord& word : member) word.Clear();
        }
      }
      generation.Store(next);
      begun.StoreRelease(static_cast<uint32_t>(use) + 1);
    }
  }

  void Use(int use, unsigned member) {
    while (begun.LoadAcquire() != static_cast<uint32_t>(use) + 1) SpinPause();
    const uint32_t now = generation.Load();
    for (int i = 0; i < Words(use); ++i) posted[member][i].Post(Data(use, member, i), now);
    const unsigned peer = 1 - member;
    for (int i = 0; i < Words(use); ++i) {
      uint32_t data;
      while (!posted[peer][i].TryRead(now, &data)) SpinPause();
      RL_ASSERT(data == Data(use, peer, i));
    }
    over.FetchAddAcqRel(1);
  }
};

}  // namespace
}  // namespace dfccl

int main(int argc, char** argv) {
  using namespace dfccl;
  const bool no_fault = ExploreRandom<FlaggedWordModel>(20000);
  return ModelExit(argc, argv, no_fault);
}
