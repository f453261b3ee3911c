// SPDX-License-Identifier: Apache-2.0
// Planners of kinds in which a member needs some of the others only. It waits
// for those whose buffers it touches and for those that touch its own, and for
// nobody else, whatever the size of the message.
#include <vector>

#include "core/plans/planners.h"
#include "core/plans/program.h"

namespace dfccl {
namespace {

// The root does its own part and stays until all others have done theirs; they
// wait for the root to arrive.
template <typename Part>
void PlanAroundRoot(Plan* plan, const Part& part) {
  for (int r = 0; r < plan->members; ++r) {
    Program program(plan, r);
    if (r != plan->key.root) program.Wait(plan->key.root, kArrived);
    part(r, &program);
    if (plan->members == 1) continue;
    program.Signal();
    if (r == plan->key.root) program.Wait(kEveryMember, kArrived + 1);
  }
}

void PlanGather(Plan* plan) {
  PlanAroundRoot(plan, [plan](int r, Program* program) {
    program->Copy(Source(r), {Result(plan->key.root, r)});
    if (r == plan->key.root) return;
    std::vector<BufferRef> blocks;
    for (int p = 0; p < plan->members; ++p) blocks.push_back(Result(r, p));
    program->FillWithZeros(blocks);
  });
}

// A member reads from its source and stays until its target has read.
void PlanPermute(Plan* plan) {
  constexpr int kNone = -1;
  std::vector<int> source(plan->members, kNone), target(plan->members, kNone);
  for (const auto& [from, to] : plan->key.pairs->list) {
    target[from] = to;
    source[to] = from;
  }
  for (int r = 0; r < plan->members; ++r) {
    Program program(plan, r);
    if (source[r] == kNone) {
      program.FillWithZeros({Result(r)});
    } else if (source[r] == r) {
      program.Copy(Source(r), {Result(r)});
      continue;
    } else {
      program.Wait(source[r], kArrived);
      program.Copy(Source(source[r]), {Result(r)});
      program.Signal();
    }
    if (target[r] != kNone) program.Wait(target[r], kArrived + 1);
  }
}

// Member r folds its source with the fold of all before it, which its left
// neighbour leaves in scratch (so it is never rounded), for its right one. The
// second member finds that of the first in its source. In pieces, so that
// neighbours work at the same time.
void PlanScan(Plan* plan, bool exclusive) {
  const int n = plan->members;
  const int pieces = plan->key.chunks_per_member;
  const int last = n - 1;
  plan->chunk_count = static_cast<uint32_t>(pieces);
  plan->scratch_slots = n > 2 ? 1 : 0;
  for (int r = 0; r < n; ++r) {
    Program program(plan, r);
    const RefRange result = AddRefs(plan, {Result(r)});
    if (r == 0) {
      if (exclusive) {
        program.FillWithZeros({Result(0)});
      } else {
        program.Copy(Source(0), {Result(0)});
      }
    } else {
      const BufferRef before = r == 1 ? Source(0) : Scratch(r - 1, 0);
      const RefRange left = AddRefs(plan, {before});
      const RefRange both = AddRefs(plan, {before, Source(r)});
      RefRange both_to = result;
      if (r != last) {
        both_to =
            exclusive ? AddRefs(plan, {Scratch(r, 0)}) : AddRefs(plan, {Result(r), Scratch(r, 0)});
      }
      for (int piece = 0; piece < pieces; ++piece) {
        const auto chunk = static_cast<uint32_t>(piece);
        if (r > 1) {
          program.Wait(r - 1, kArrived + piece + 1);
        } else if (piece == 0) {
          program.Wait(0, kArrived);
        }
        if (exclusive) program.Reduce(left, result, {chunk, chunk + 1}, /*finalize=*/false);
        if (!exclusive || r != last) {
          program.Reduce(both, both_to, {chunk, chunk + 1}, /*finalize=*/false);
        }
        // What the last member signals is only that it has read all.
        if (r != last || piece == pieces - 1) program.Signal();
      }
    }
    if (r != last) program.Wait(r + 1, kArrived + (r + 1 == last ? 1 : pieces));
  }
}

}  // namespace

void PlanAmongPeers(Plan* plan) {
  const int root = plan->key.root;
  switch (plan->key.kind) {
    case Kind::kBroadcast:
      return PlanAroundRoot(
          plan, [=](int r, Program* program) { program->Copy(Source(root), {Result(r)}); });
    case Kind::kScatter:
      return PlanAroundRoot(
          plan, [=](int r, Program* program) { program->Copy(Source(root, r), {Result(r)}); });
    case Kind::kGather:
      return PlanGather(plan);
    case Kind::kPermute:
      return PlanPermute(plan);
    default:
      return PlanScan(plan, plan->key.kind == Kind::kExscan);
  }
}

}  // namespace dfccl
