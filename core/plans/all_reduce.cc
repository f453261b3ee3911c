// SPDX-License-Identifier: Apache-2.0
// The all-reduce planners. Every plan is for shared memory: a member reads its
// peers' buffers where they lie, once their progress words say what is there,
// and stays until no peer reads or writes its own buffers any more.
#include <cassert>
#include <vector>

#include "core/plans/planners.h"
#include "core/plans/program.h"

namespace dfccl {
namespace {

// A group of one: the same for every algorithm.
void PlanAlone(Plan* plan) {
  plan->in_place = true;
  const RefRange source = AddRefs(plan, {Source(0)});
  const RefRange result = AddRefs(plan, {Result(0)});
  Program(plan, 0).Reduce(source, result, {0, 1}, /*finalize=*/true);
}

// One-shot: every member folds all sources into its own result.
// Two-shot: member r folds chunk r of all sources into everyone's result.
// Both end when everyone has signalled: then no source is read any more, and
// (two-shot) every chunk of the result is there.
void PlanDirect(Plan* plan, bool two_shot) {
  const auto n = static_cast<uint32_t>(plan->members);
  plan->chunk_count = two_shot ? n : 1;
  plan->in_place = two_shot;  // whoever writes a chunk is the one who reads it
  plan->refs.reserve(2 * n);
  for (uint32_t i = 0; i < n; ++i) plan->refs.push_back(Source(i));
  for (uint32_t i = 0; i < n; ++i) plan->refs.push_back(Result(i));
  for (uint32_t r = 0; r < n; ++r) {
    const RefRange results = two_shot ? RefRange{n, 2 * n} : RefRange{n + r, n + r + 1};
    const ChunkRange chunks = two_shot ? ChunkRange{r, r + 1} : ChunkRange{0, 1};
    Program program(plan, r);
    program.Wait(kEveryMember, kArrived);
    program.Reduce({0, n}, results, chunks, /*finalize=*/true);
    program.Signal();
    program.Wait(kEveryMember, kArrived + 1);
  }
}

// Flat: member 0 folds all sources into everyone's result; the others only wait
// for that. The fewest waits and signals, so the least latency where one thread
// runs all members anyway; for small messages.
void PlanFlat(Plan* plan) {
  const auto n = static_cast<uint32_t>(plan->members);
  plan->in_place = true;
  for (uint32_t i = 0; i < n; ++i) plan->refs.push_back(Source(i));
  for (uint32_t i = 0; i < n; ++i) plan->refs.push_back(Result(i));
  Program root(plan, 0);
  root.Wait(kEveryMember, kArrived);
  root.Reduce({0, n}, {n, 2 * n}, {0, 1}, /*finalize=*/true);
  root.Signal();
  for (uint32_t r = 1; r < n; ++r) Program(plan, r).Wait(0, kArrived + 1);
}

// A ring of n members in 2n-2 rounds, each pulling one share from the left
// neighbour. In rounds 1..n-1 (reduce-scatter) a member adds its own source to
// the left's partial fold of share r-k; in round n-1 that completes share r+1.
// In rounds n..2n-2 (all-gather) it copies the share the left got last. Each
// share is written once per buffer, so nothing waits for room.
//
// A share is `pieces` chunks. Round k of a piece needs round k-1 of that piece
// on the left, so up to `pieces` members work on one share at a time.
void PlanRing(Plan* plan, int pieces) {
  const int n = plan->members;
  const int rounds = 2 * n - 2;
  plan->chunk_count = static_cast<uint32_t>(n) * pieces;
  plan->scratch_slots = n > 2 ? 1 : 0;
  for (int r = 0; r < n; ++r) {
    const int left = (r + n - 1) % n;
    const int right = (r + 1) % n;
    const RefRange sources = AddRefs(plan, {Source(left), Source(r)});
    const RefRange left_result = AddRefs(plan, {Result(left)});
    const RefRange result = AddRefs(plan, {Result(r)});
    RefRange partial{};  // two members need no scratch
    RefRange scratch{};
    if (n > 2) {
      partial = AddRefs(plan, {Scratch(left, 0), Source(r)});
      scratch = AddRefs(plan, {Scratch(r, 0)});
    }
    Program program(plan, r);
    for (int round = 1; round <= rounds; ++round) {
      const int share = (r + 2 * n - round) % n;
      for (int piece = 0; piece < pieces; ++piece) {
        // The left's word after `piece` of the round before; sources are there
        // from the start.
        const int done = (round - 2) * pieces + piece + 1;
        if (round > 1) {
          program.Wait(left, kArrived + done);
        } else if (piece == 0) {
          program.Wait(left, kArrived);
        }
        const uint32_t chunk = static_cast<uint32_t>(share) * pieces + piece;
        const ChunkRange chunks{chunk, chunk + 1};
        if (round < n) {
          const bool last = round == n - 1;
          program.Reduce(round == 1 ? sources : partial, last ? result : scratch, chunks, last);
        } else {
          program.Reduce(left_result, result, chunks, /*finalize=*/false);
        }
        // After the last round only "all read" is news, and only to the left.
        if (round < rounds || piece == pieces - 1) program.Signal();
      }
    }
    program.Wait(right, kArrived + (rounds - 1) * pieces + 1);
  }
}

// Recursive doubling over p = 2^rounds blocks of one or two neighbouring
// members. The first member of a block (its head) takes part; a second member
// only lends its source and gets its result. In round k the heads of blocks b
// and b^2^k both fold the same two operands, the lower block's first, so all
// members get the same bits, in member order. Round 0 reads sources, round k
// the scratch slot k-1, which is written once.
void PlanRecursiveDoubling(Plan* plan) {
  const int n = plan->members;
  int rounds = 0;
  while (2 << rounds <= n) ++rounds;
  const int blocks = 1 << rounds;
  const int pairs = n - blocks;  // blocks of two members: the first ones
  const auto head = [=](int block) { return block < pairs ? 2 * block : block + pairs; };
  plan->scratch_slots = static_cast<uint32_t>(rounds) - 1;

  for (int block = 0; block < blocks; ++block) {
    const int r = head(block);
    const bool paired = block < pairs;
    Program program(plan, r);
    for (int round = 0; round < rounds; ++round) {
      const int partner = block ^ (1 << round);
      const int lower = block < partner ? block : partner;
      const int upper = block < partner ? partner : block;
      std::vector<BufferRef> sources;
      if (round == 0) {
        for (int member = head(lower); member < head(upper + 1); ++member) {
          sources.push_back(Source(member));
          if (member != r) program.Wait(member, kArrived);
        }
      } else {
        sources = {Scratch(head(lower), round - 1), Scratch(head(upper), round - 1)};
        program.Wait(head(partner), kArrived + round);
      }
      const bool last = round == rounds - 1;
      std::vector<BufferRef> destinations{last ? Result(r) : Scratch(r, round)};
      if (last && paired) destinations.push_back(Result(r + 1));
      program.Reduce(AddRefs(plan, sources), AddRefs(plan, destinations), {0, 1}, last);
      program.Signal();
    }
    // The partner of each round has read what this member lent it.
    for (int round = 0; round < rounds; ++round) {
      program.Wait(head(block ^ (1 << round)), kArrived + round + 1);
    }
    if (paired) {
      Program second(plan, r + 1);
      second.Wait(r, kArrived + rounds);           // the result is there
      second.Wait(head(block ^ 1), kArrived + 1);  // the source is read
    }
  }
}

}  // namespace

void PlanAllReduce(Plan* plan) {
  if (plan->members == 1) return PlanAlone(plan);
  switch (plan->key.algorithm) {
    case Algorithm::kDirectFlat:
      return PlanFlat(plan);
    case Algorithm::kDirectOneShot:
      return PlanDirect(plan, /*two_shot=*/false);
    case Algorithm::kDirectTwoShot:
      return PlanDirect(plan, /*two_shot=*/true);
    case Algorithm::kRing:
      return PlanRing(plan, plan->key.chunks_per_member);
    case Algorithm::kRecursiveDoubling:
      return PlanRecursiveDoubling(plan);
    default:
      assert(false);
  }
}

}  // namespace dfccl
