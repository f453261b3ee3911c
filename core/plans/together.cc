// SPDX-License-Identifier: Apache-2.0
// Planners of kinds in which everyone needs everyone: all begin when all have
// arrived, and end when all have signalled that their share of the work is done.
#include <vector>

#include "core/plans/planners.h"
#include "core/plans/program.h"

namespace dfccl {
namespace {

// Direct: every member does its share. Flat: member 0 does all shares, and the
// others only wait for that: the fewest waits and signals.
template <typename Share>
void Divide(Plan* plan, const Share& share) {
  const int n = plan->members;
  if (n == 1) {
    Program alone(plan, 0);
    share(0, &alone);
  } else if (plan->key.algorithm == Algorithm::kDirectFlat) {
    Program worker(plan, 0);
    worker.Wait(kEveryMember, kArrived);
    for (int r = 0; r < n; ++r) share(r, &worker);
    worker.Signal();
    for (int r = 1; r < n; ++r) Program(plan, r).Wait(0, kArrived + 1);
  } else {
    for (int r = 0; r < n; ++r) {
      Program program(plan, r);
      program.Wait(kEveryMember, kArrived);
      share(r, &program);
      program.Signal();
      program.Wait(kEveryMember, kArrived + 1);
    }
  }
}

// A member reads its source once, for all results.
void PlanAllGather(Plan* plan) {
  Divide(plan, [plan](int r, Program* program) {
    std::vector<BufferRef> blocks;
    for (int p = 0; p < plan->members; ++p) blocks.push_back(Result(p, r));
    program->Copy(Source(r), blocks);
  });
}

void PlanReduceScatter(Plan* plan) {
  Divide(plan, [plan](int r, Program* program) {
    std::vector<BufferRef> blocks;
    for (int p = 0; p < plan->members; ++p) blocks.push_back(Source(p, r));
    const RefRange sources = AddRefs(plan, blocks);
    program->Reduce(sources, AddRefs(plan, {Result(r)}), {0, 1}, /*finalize=*/true);
  });
}

// A member collects its blocks from all sources. Where index arrays say where
// blocks lie and how large they are, they are checked before they are used.
void PlanAllToAll(Plan* plan) {
  Divide(plan, [plan](int r, Program* program) {
    if (plan->key.kind == Kind::kRaggedAllToAll) program->Check();
    for (int p = 0; p < plan->members; ++p) program->Copy(Source(p, r), {Result(r, p)});
  });
}

// A share is a chunk of the root's result; in a flat plan there is one.
void PlanReduce(Plan* plan) {
  const bool flat = plan->key.algorithm == Algorithm::kDirectFlat;
  const int root = plan->key.root;
  plan->chunk_count = flat ? 1 : plan->members;
  std::vector<BufferRef> all;
  for (int p = 0; p < plan->members; ++p) all.push_back(Source(p));
  const RefRange sources = AddRefs(plan, all);
  const RefRange result = AddRefs(plan, {Result(root)});
  Divide(plan, [=](int r, Program* program) {
    const auto chunk = static_cast<uint32_t>(flat ? 0 : r);
    if (!flat || r == root) {
      program->Reduce(sources, result, {chunk, chunk + 1}, /*finalize=*/true);
    }
    if (r != root) program->FillWithZeros({Result(r)});
  });
}

// No buffer is touched by a peer, so nobody waits for the end.
void PlanBarrier(Plan* plan) {
  for (int r = 0; r < plan->members; ++r) {
    Program program(plan, r);
    if (plan->members > 1) program.Wait(kEveryMember, kArrived);
    program.Copy(Source(r), {Result(r)});
  }
}

}  // namespace

void PlanTogether(Plan* plan) {
  switch (plan->key.kind) {
    case Kind::kAllGather:
      return PlanAllGather(plan);
    case Kind::kReduceScatter:
      return PlanReduceScatter(plan);
    case Kind::kAllToAll:
    case Kind::kRaggedAllToAll:
      return PlanAllToAll(plan);
    case Kind::kReduce:
      return PlanReduce(plan);
    default:
      return PlanBarrier(plan);
  }
}

}  // namespace dfccl
