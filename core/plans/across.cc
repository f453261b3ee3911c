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

// For hosts that follow each other in rank order, with m members each. On every host
// one member has the same chunk: it folds that of its host's members onto the fold of
// the hosts before, and hands it on; so a buffer goes once from each host to the next,
// in pieces, and the results go the same way back. Within a host each member gets the
// chunks of the others as in PlanTwoShot.
class HostByHost {
 public:
  explicit HostByHost(Plan* plan)
      : plan_(*plan),
        placement_(*plan->key.placement),
        hosts_(placement_.even_hosts),
        each_(plan->members / hosts_),
        pieces_(static_cast<uint32_t>(plan->key.chunks_per_member)),
        chunks_(placement_.processes),
        first_(placement_.processes, -1) {
    plan_.chunk_count = static_cast<uint32_t>(each_) * pieces_;
    plan_.scratch_slots = 1;
    plan_.in_place = true;  // as in PlanTwoShot
    for (int host = 0; host < hosts_; ++host) {
      // Chunks in the order of processes, so that those of one are in one range.
      std::vector<int> order;
      for (int r = host * each_; r < (host + 1) * each_; ++r) order.push_back(r);
      std::stable_sort(order.begin(), order.end(),
                       [&](int a, int b) { return placement_.process[a] < placement_.process[b]; });
      for (int r : order) {
        const int process = placement_.process[r];
        const uint32_t begin = Index(order, r) * pieces_;
        if (first_[process] < 0) {
          first_[process] = r;
          chunks_[process].begin = begin;
        }
        chunks_[process].end = begin + pieces_;
      }
      place_.push_back(std::move(order));
    }
  }

  void Write() {
    for (int r = 0; r < plan_.members; ++r) Write(r);
  }

 private:
  static uint32_t Index(const std::vector<int>& order, int r) {
    return static_cast<uint32_t>(std::find(order.begin(), order.end(), r) - order.begin());
  }

  void Write(int r) {
    constexpr uint32_t kFolded = kArrived + 1;  // in its own process
    constexpr uint32_t kCopied = kArrived + 2;  // in its own process
    constexpr uint32_t kResults = kDelivered + 1;
    const int own = placement_.process[r];
    const int host = r / each_;
    const std::vector<int>& here = place_[host];
    const uint32_t index = Index(here, r);
    const bool last_host = host == hosts_ - 1;
    const int before = host > 0 ? place_[host - 1][index] : -1;
    const int after = last_host ? -1 : place_[host + 1][index];
    const auto is_own = [&](int member) { return placement_.process[member] == own; };
    const auto process_of = [&](int member) {
      return member < 0 ? -1 : static_cast<int>(placement_.process[member]);
    };
    const auto piece = [&](uint32_t i) {
      return ChunkRange{index * pieces_ + i, index * pieces_ + i + 1};
    };
    const ChunkRange mine = {index * pieces_, (index + 1) * pieces_};
    std::vector<BufferRef> terms, results;
    if (before >= 0) terms.push_back(Scratch(r, 0));
    for (int s = host * each_; s < (host + 1) * each_; ++s) {
      terms.push_back(Source(s));
      if (is_own(s)) results.push_back(Result(s));
    }
    const bool has_peers = results.size() > 1;
    const RefRange from = AddRefs(&plan_, terms);
    const RefRange to =
        AddRefs(&plan_, last_host ? results : std::vector<BufferRef>{Scratch(r, 0)});
    std::vector<int> neighbours;  // the other processes of this host
    for (int process = 0; process < placement_.processes; ++process) {
      if (process != own && placement_.host[process] == host) neighbours.push_back(process);
    }

    Program program(&plan_, r);
    for (int i = 1; i < placement_.processes; ++i) {
      const int process = (own + i) % placement_.processes;
      const bool more = placement_.host[process] == host || process == process_of(before) ||
                        process == process_of(after);
      program.Tell(process, kArrived, /*last=*/!more);
    }
    for (int process : neighbours) {
      program.Wait(first_[process], kArrived);
      program.Send(process, Source(r), Source(r), chunks_[process], kDelivered, /*last=*/false);
    }
    for (int s : here) {
      if (s != r) program.Wait(s, is_own(s) ? kArrived : kDelivered);
    }
    for (uint32_t i = 0; i < pieces_; ++i) {
      if (before >= 0) program.Wait(before, kDelivered + i);
      program.Reduce(from, to, piece(i), /*finalize=*/last_host);
      if (after >= 0) {
        if (i == 0) program.Wait(after, kArrived);
        program.Send(process_of(after), Scratch(r, 0), Scratch(after, 0), piece(i), kDelivered + i,
                     i + 1 == pieces_);
      } else {
        SendBack(&program, r, before, piece(i), i);
      }
    }
    if (after >= 0) {
      for (uint32_t i = 0; i < pieces_; ++i) {
        program.Wait(after, kDelivered + i);
        if (before >= 0) SendBack(&program, r, before, piece(i), i);
      }
    }
    if (has_peers) program.Signal();
    for (int process : neighbours) {
      program.Send(process, Result(r), Result(first_[process]), mine, kResults, /*last=*/true);
    }
    for (int s : here) {
      if (s != r) program.Wait(s, is_own(s) ? kFolded : kResults);
    }
    if (has_peers) {
      Copy(&program, r, here, last_host);
      if (!last_host || r != first_[own]) program.Signal();
      for (int s : here) {
        if (s != r && is_own(s) && (!last_host || r == first_[own])) program.Wait(s, kCopied);
      }
    }
    program.WaitForSends();
  }

  void SendBack(Program* program, int r, int before, ChunkRange piece, uint32_t i) {
    program->Send(placement_.process[before], Result(r), Result(before), piece, kDelivered + i,
                  i + 1 == pieces_);
  }

  // Into r's result what is in those of its process's members.
  void Copy(Program* program, int r, const std::vector<int>& here, bool last_host) {
    const int own = placement_.process[r];
    const RefRange to = AddRefs(&plan_, {Result(r)});
    const auto copy = [&](int s, ChunkRange range) {
      if (range.begin == range.end) return;
      program->Reduce(AddRefs(&plan_, {Result(s)}), to, range, /*finalize=*/false);
    };
    for (uint32_t i = 0; i < here.size() && !last_host; ++i) {
      const int s = here[i];
      if (s != r && placement_.process[s] == own) copy(s, {i * pieces_, (i + 1) * pieces_});
    }
    if (r == first_[own]) return;
    copy(first_[own], {0, chunks_[own].begin});
    copy(first_[own], {chunks_[own].end, plan_.chunk_count});
  }

  Plan& plan_;
  const Placement& placement_;
  const int hosts_;
  const int each_;  // members of a host
  const uint32_t pieces_;
  std::vector<std::vector<int>> place_;  // by host: whose is the chunk of an index
  std::vector<ChunkRange> chunks_;       // of a process's members
  std::vector<int> first_;               // member of a process
};

}  // namespace

void PlanAcross(Plan* plan) {
  if (plan->key.kind == Kind::kRaggedAllToAll) return PlanRagged(plan);
  if (plan->key.algorithm == Algorithm::kRendezvousTwoShot) return PlanTwoShot(plan);
  if (plan->key.algorithm == Algorithm::kHostByHost) return HostByHost(plan).Write();
  const Demand needs(plan->key);
  for (int r = 0; r < plan->members; ++r) ByNeed(plan, needs, r).Write();
}

}  // namespace dfccl
