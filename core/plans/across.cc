// SPDX-License-Identifier: Apache-2.0
// Planners for groups that are spread over processes. Members of one process
// read each other's sources where they lie, as in the other plans; for members of
// other processes, the owner sends what they need of its source, once to each
// process. Every member folds what it needs in rank order, so results have the
// same bits as those of one process.
//
// Words. In its own process a member's word is kArrived, then kRead (it has read
// its peers' buffers, and left what it wrote in theirs). What other processes see
// is what its sends tell: kArrived, then kDelivered, where there is data that does
// not come along with the arrival.
#include <algorithm>
#include <utility>
#include <vector>

#include "core/plans/planners.h"
#include "core/plans/program.h"

namespace dfccl {
namespace {

constexpr uint32_t kRead = kArrived + 1;
constexpr uint32_t kDelivered = kArrived + 1;

// A block of a member's result: the fold of these blocks of sources; zeros if
// there are none.
struct Output {
  int block = 0;
  std::vector<BufferRef> terms;
};

std::vector<BufferRef> AllSources(int members, int block = 0) {
  std::vector<BufferRef> terms;
  for (int p = 0; p < members; ++p) terms.push_back(Source(p, block));
  return terms;
}

// What member r gets (core/collective.h Kind).
std::vector<Output> OutputsOf(const PlanKey& key, int r) {
  const int n = key.members;
  const bool is_root = r == key.root;
  std::vector<Output> outputs;
  switch (key.kind) {
    case Kind::kAllReduce:
      return {{0, AllSources(n)}};
    case Kind::kReduceScatter:
      return {{0, AllSources(n, r)}};
    case Kind::kReduce:
      return {{0, is_root ? AllSources(n) : std::vector<BufferRef>{}}};
    case Kind::kScan:
      return {{0, AllSources(r + 1)}};
    case Kind::kExscan:
      return {{0, AllSources(r)}};
    case Kind::kBarrier:
      return {{0, {Source(r)}}};
    case Kind::kBroadcast:
      return {{0, {Source(key.root)}}};
    case Kind::kScatter:
      return {{0, {Source(key.root, r)}}};
    case Kind::kAllGather:
    case Kind::kGather:
      for (int p = 0; p < n; ++p) {
        outputs.push_back({p, {}});
        if (is_root || key.kind == Kind::kAllGather) outputs.back().terms = {Source(p)};
      }
      return outputs;
    case Kind::kAllToAll:
      for (int p = 0; p < n; ++p) outputs.push_back({p, {Source(p, r)}});
      return outputs;
    case Kind::kPermute:
      outputs.push_back({0, {}});
      for (const auto& [from, to] : key.pairs->list) {
        if (to == r) outputs.back().terms = {Source(from)};
      }
      return outputs;
    case Kind::kRaggedAllToAll:
      break;  // PlanRagged
  }
  return outputs;
}

// Who needs what of whom.
class Demand {
 public:
  explicit Demand(const PlanKey& key) : placement_(*key.placement) {
    for (int r = 0; r < key.members; ++r) outputs_.push_back(OutputsOf(key, r));
  }

  const std::vector<Output>& Outputs(int r) const { return outputs_[r]; }

  // The blocks of member s that members of another process need, each with the
  // first of them and the block of its result that it belongs to.
  struct Piece {
    int block;
    int reader;
    int reader_block;
  };
  std::vector<Piece> Pieces(int s, int process) const {
    std::vector<Piece> pieces;
    for (int r = 0; r < static_cast<int>(outputs_.size()); ++r) {
      if (placement_.process[r] != process) continue;
      for (const Output& output : outputs_[r]) {
        for (const BufferRef& term : output.terms) {
          if (term.member != s) continue;
          const auto same = [&](const Piece& piece) { return piece.block == term.block; };
          if (std::none_of(pieces.begin(), pieces.end(), same)) {
            pieces.push_back({term.block, r, output.block});
          }
        }
      }
    }
    return pieces;
  }

  bool Reads(int r, int s) const {
    for (const Output& output : outputs_[r]) {
      for (const BufferRef& term : output.terms) {
        if (term.member == s) return true;
      }
    }
    return false;
  }

 private:
  const Placement& placement_;
  std::vector<std::vector<Output>> outputs_;
};

// One member's part of kEager and kRendezvous.
class ByNeed {
 public:
  ByNeed(Plan* plan, const Demand& needs, int r)
      : plan_(*plan),
        key_(plan->key),
        process_(key_.placement->process),
        needs_(needs),
        r_(r),
        eager_(key_.algorithm == Algorithm::kEager),
        together_(IsTogether(key_.kind, /*across=*/true)),
        lands_(!eager_ && together_ && !Folds(key_.kind)),
        brings_(Brings(r, key_.root)),
        program_(plan, r) {}

  void Write() {
    Send();
    waited_.resize(plan_.members);
    for (const Output& output : needs_.Outputs(r_)) {
      if (Brings(output.block, r_)) continue;
      for (const BufferRef& term : output.terms) WaitForData(term.member);
      Compute(r_, output);
    }
    if (brings_) {
      program_.Wait(key_.root, kArrived);
      Compute(key_.root, needs_.Outputs(key_.root)[r_]);
    }
    if (together_) {
      for (int s = 0; s < plan_.members; ++s) WaitForData(s);
    }
    if (brings_ || HasPeer([this](int peer) { return Uses(r_, peer); })) program_.Signal();
    for (int peer = 0; peer < plan_.members; ++peer) {
      if (peer != r_ && Here(peer) && (Uses(peer, r_) || Brings(peer, r_))) {
        program_.Wait(peer, kRead);
      }
    }
    if (!eager_ && !together_) WaitForReaders();
    program_.WaitForSends();
  }

 private:
  bool Here(int member) const { return process_[member] == process_[r_]; }

  void Send() {
    const ChunkRange all = {0, plan_.chunk_count};
    for (int process = 0; process < key_.placement->processes; ++process) {
      if (process == process_[r_]) continue;
      const std::vector<Demand::Piece> pieces = needs_.Pieces(r_, process);
      if (pieces.empty() || !eager_) program_.Tell(process, kArrived, pieces.empty());
    }
    for (int process = 0; process < key_.placement->processes; ++process) {
      if (process == process_[r_]) continue;
      const std::vector<Demand::Piece> pieces = needs_.Pieces(r_, process);
      for (const Demand::Piece& piece : pieces) {
        const bool last = &piece == &pieces.back();
        const BufferRef source = Source(r_, piece.block);
        if (!eager_ && together_) program_.Wait(piece.reader, kArrived);
        program_.Send(process, source, lands_ ? Result(piece.reader, piece.reader_block) : source,
                      all,
                      !last    ? 0
                      : eager_ ? kArrived
                               : kDelivered,
                      last);
      }
    }
  }

  void WaitForData(int s) {
    if (s == r_ || waited_[s]) return;
    waited_[s] = true;
    const bool later = !eager_ && !Here(s) && needs_.Reads(r_, s);
    program_.Wait(s, later ? kDelivered : kArrived);
  }

  // Readers elsewhere, so that what is sent them does not heap up there.
  void WaitForReaders() {
    for (int peer = 0; peer < plan_.members; ++peer) {
      if (!Here(peer) && needs_.Reads(peer, r_)) program_.Wait(peer, kArrived);
    }
  }

  // Where a block of a source that was sent here lies: in the result of its first
  // reader, or where the process keeps such sources.
  BufferRef Landed(const BufferRef& term) const {
    if (!lands_ || Here(term.member)) return term;
    for (const Demand::Piece& piece : needs_.Pieces(term.member, process_[r_])) {
      if (piece.block == term.block) return Result(piece.reader, piece.reader_block);
    }
    return term;
  }

  // In a gather the root's peers bring their blocks: they would wait for all others
  // if it read them and then said so.
  bool Brings(int member, int to) const {
    return key_.kind == Kind::kGather && to == key_.root && member != to &&
           process_[member] == process_[to];
  }

  void Compute(int owner, const Output& output) {
    const BufferRef to = Result(owner, output.block);
    if (output.terms.empty()) return program_.FillWithZeros({to});
    std::vector<BufferRef> terms;
    for (const BufferRef& term : output.terms) terms.push_back(Landed(term));
    const BufferRef& first = terms.front();
    if (first.kind == BufferKind::kResult && first.member == r_ && first.block == output.block) {
      return;  // it is there
    }
    const RefRange sources = AddRefs(&plan_, terms);
    const bool finalize = key_.kind == Kind::kAllReduce || key_.kind == Kind::kReduceScatter ||
                          key_.kind == Kind::kReduce;
    program_.Reduce(sources, AddRefs(&plan_, {to}), {0, plan_.chunk_count}, finalize);
  }

  // Whether a member of this process reads the source of another, or what has
  // landed in its result.
  bool Uses(int reader, int owner) const {
    if (Brings(owner, reader)) return false;
    for (const Output& output : needs_.Outputs(reader)) {
      for (const BufferRef& term : output.terms) {
        if (Landed(term).member == owner) return true;
      }
    }
    return false;
  }

  template <typename Condition>
  bool HasPeer(const Condition& condition) const {
    for (int peer = 0; peer < plan_.members; ++peer) {
      if (peer != r_ && Here(peer) && condition(peer)) return true;
    }
    return false;
  }

  Plan& plan_;
  const PlanKey& key_;
  const std::vector<uint16_t>& process_;
  const Demand& needs_;
  const int r_;
  const bool eager_;
  // Everyone needs everyone, so sends may wait for their readers. Elsewhere, what
  // comes after such a wait would be late for those who need something else.
  const bool together_;
  const bool lands_;          // what is sent goes straight into results
  const bool brings_;         // see Brings
  std::vector<bool> waited_;  // for what members send
  Program program_;
};

// Every member folds a chunk of all sources for all: its process's results it
// writes itself, to other processes it sends the chunk, into the result of their
// first member, from which that one's peers copy it.
void PlanTwoShot(Plan* plan) {
  constexpr uint32_t kFolded = kArrived + 1;  // in its own process
  constexpr uint32_t kCopied = kArrived + 2;  // in its own process
  constexpr uint32_t kResults = kDelivered + 1;
  const Placement& placement = *plan->key.placement;
  const int n = plan->members;
  plan->chunk_count = static_cast<uint32_t>(n);
  plan->in_place = true;  // whoever writes a chunk has read it, or got what others folded of it
  const RefRange sources = AddRefs(plan, AllSources(n));

  // Chunks in the order of processes, so that those of one are in one range.
  std::vector<uint32_t> chunk(n);
  std::vector<ChunkRange> chunks(placement.processes);
  std::vector<int> first(placement.processes, -1);
  std::vector<RefRange> results(placement.processes);
  uint32_t next = 0;
  for (int process = 0; process < placement.processes; ++process) {
    const uint32_t begin = next;
    std::vector<BufferRef> here;
    for (int r = 0; r < n; ++r) {
      if (placement.process[r] != process) continue;
      if (first[process] < 0) first[process] = r;
      chunk[r] = next++;
      here.push_back(Result(r));
    }
    chunks[process] = {begin, next};
    results[process] = AddRefs(plan, here);
  }

  for (int r = 0; r < n; ++r) {
    const int own = placement.process[r];
    const auto here = [&](int member) { return placement.process[member] == own; };
    const auto each_other_process = [&](const auto& function) {
      // Each begins with its neighbour, so that not all send to the same one.
      for (int i = 1; i < placement.processes; ++i) function((own + i) % placement.processes);
    };
    const ChunkRange mine = {chunk[r], chunk[r] + 1};
    Program program(plan, r);
    each_other_process([&](int process) { program.Tell(process, kArrived, /*last=*/false); });
    each_other_process([&](int process) {
      program.Wait(first[process], kArrived);
      program.Send(process, Source(r), Source(r), chunks[process], kDelivered, /*last=*/false);
    });
    for (int s = 0; s < n; ++s) {
      if (s != r) program.Wait(s, here(s) ? kArrived : kDelivered);
    }
    program.Reduce(sources, results[own], mine, /*finalize=*/true);
    const bool has_peers = results[own].end - results[own].begin > 1;
    if (has_peers) program.Signal();
    each_other_process([&](int process) {
      program.Send(process, Result(r), Result(first[process]), mine, kResults, /*last=*/true);
    });
    for (int s = 0; s < n; ++s) {
      if (s != r) program.Wait(s, here(s) ? kFolded : kResults);
    }
    if (has_peers) {
      if (r != first[own]) {
        const RefRange from = AddRefs(plan, {Result(first[own])});
        const RefRange to = AddRefs(plan, {Result(r)});
        const auto copy = [&](ChunkRange range) {
          if (range.begin < range.end) program.Reduce(from, to, range, /*finalize=*/false);
        };
        copy({0, chunks[own].begin});
        copy({chunks[own].end, static_cast<uint32_t>(n)});
        program.Signal();
      } else {
        for (int t = 0; t < n; ++t) {
          if (t != r && here(t)) program.Wait(t, kCopied);
        }
      }
    }
    program.WaitForSends();
  }
}

// Index arrays go ahead. When all are there, every member checks those that concern
// it, and rows go straight to where they say.
void PlanRagged(Plan* plan) {
  const Placement& placement = *plan->key.placement;
  const int n = plan->members;
  for (int r = 0; r < n; ++r) {
    const int own = placement.process[r];
    const auto here = [&](int member) { return placement.process[member] == own; };
    const auto each_other_process = [&](const auto& function) {
      for (int i = 1; i < placement.processes; ++i) function((own + i) % placement.processes);
    };
    Program program(plan, r);
    each_other_process([&](int process) {
      const BufferRef indices = Source(r, n);
      program.Send(process, indices, indices, {0, 1}, kArrived, /*last=*/false);
    });
    for (int s = 0; s < n; ++s) {
      if (s != r) program.Wait(s, kArrived);
    }
    program.Check();
    each_other_process([&](int process) {
      std::vector<int> readers;
      for (int s = 0; s < n; ++s) {
        if (placement.process[s] == process) readers.push_back(s);
      }
      for (const int s : readers) {
        const bool last = s == readers.back();
        program.Send(process, Source(r, s), Result(s, r), {0, 1}, last ? kDelivered : 0, last);
      }
    });
    bool has_peers = false;
    for (int s = 0; s < n; ++s) {
      if (!here(s)) continue;
      program.Copy(Source(s, r), {Result(r, s)});
      has_peers |= s != r;
    }
    if (has_peers) program.Signal();
    for (int s = 0; s < n; ++s) {
      if (s != r) program.Wait(s, here(s) ? kRead : kDelivered);
    }
    program.WaitForSends();
  }
}

}  // namespace

void PlanAcross(Plan* plan) {
  if (plan->key.kind == Kind::kRaggedAllToAll) return PlanRagged(plan);
  if (plan->key.algorithm == Algorithm::kRendezvousTwoShot) return PlanTwoShot(plan);
  const Demand needs(plan->key);
  for (int r = 0; r < plan->members; ++r) ByNeed(plan, needs, r).Write();
}

}  // namespace dfccl
