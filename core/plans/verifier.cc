// SPDX-License-Identifier: Apache-2.0
// The verifier: one symbolic run of a plan that stands for all its runs.
//
// Why one run is enough. A progress word has one writer and only grows, so a
// wait that can pass stays passable whatever the others do. Hence every order
// of running the members ends with the same steps done: a deadlock shows in any
// order, or in none. What a wait tells its member for certain is the history of
// the *first* signal that satisfies it, again in any order; that signal -> wait
// and program order are the only happens-before edges. If they order every two
// conflicting accesses, no run races, and each read sees the same write in all
// runs, so the values seen here are the values of every run. If they leave two
// conflicting accesses unordered, some run has them the other way round or at
// once, and the plan is wrong.
//
// Vector clocks carry that order. A member's clock counts, per member, the
// events known to be over: 0 nothing, 1 its arrival, s + 2 its step s. Because
// the run follows the edges, comparing a write with the last write and the
// reads since, and a read with the last write, finds a race if there is one.
//
// A send is an actor of its own, which begins with what its member knows and has
// one event, at any time after. Who learns of it: whoever sees the word that it,
// or a later send of that member to the same process, brings (messages between
// two processes stay in order); and the member, once all its sends have left.
#include "core/plans/verifier.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>

namespace dfccl {
namespace {

constexpr size_t kMaxFaults = 40;

// Values as expressions, each made once, so that equal ids are equal folds.
class Expressions {
 public:
  enum class Form { kNone, kZeros, kSource, kFold, kFinal, kRounded };
  using Id = int;
  static constexpr Id kUnwritten = 0;

  explicit Expressions(int members) : words_((members + 63) / 64) {
    Make(Form::kNone, 0, 0);  // kUnwritten
  }

  Id Zeros() { return Make(Form::kZeros, 0, 0); }
  Id Source(int member, int block) { return Make(Form::kSource, member, block); }
  Id Fold(Id left, Id right) { return Make(Form::kFold, left, right); }
  Id Finalize(Id value) { return Make(Form::kFinal, value, 0); }
  // What an element of the message's type holds: sources and zeros fit as they are.
  Id Round(Id value) {
    const Form form = nodes_[value].form;
    const bool fits = form == Form::kSource || form == Form::kRounded || form == Form::kZeros;
    return fits ? value : Make(Form::kRounded, value, 0);
  }

  // Fit to be folded or finalized: not rounded, not finalized.
  bool IsPartial(Id value) const {
    return nodes_[value].form == Form::kSource || nodes_[value].form == Form::kFold;
  }
  bool IsFinal(Id value) const {
    return nodes_[value].form == Form::kFinal ||
           (nodes_[value].form == Form::kRounded && IsFinal(nodes_[value].left));
  }
  bool Holds(Id value, int member) const {
    return nodes_[value].members[member / 64] >> (member % 64) & 1;
  }
  bool Overlap(Id left, Id right) const {
    for (size_t i = 0; i < words_; ++i) {
      if (nodes_[left].members[i] & nodes_[right].members[i]) return true;
    }
    return false;
  }

  std::string Text(Id value) const {
    std::string text;
    Append(value, &text);
    if (text.size() > kMaxText) text = text.substr(0, kMaxText) + "...";
    return text;
  }

 private:
  static constexpr size_t kMaxText = 160;

  struct Node {
    Form form;
    int left;                       // kSource: the member
    int right;                      // kSource: the block
    std::vector<uint64_t> members;  // bit set of the sources in it
  };

  Id Make(Form form, int left, int right) {
    const auto [found, made] =
        ids_.try_emplace(std::make_tuple(form, left, right), static_cast<Id>(nodes_.size()));
    if (made) {
      Node node{form, left, right, std::vector<uint64_t>(words_)};
      if (form == Form::kSource) {
        node.members[left / 64] |= uint64_t{1} << (left % 64);
      } else if (form != Form::kNone && form != Form::kZeros) {
        for (size_t i = 0; i < words_; ++i) {
          node.members[i] = nodes_[left].members[i] | nodes_[right].members[i];
        }
      }
      nodes_.push_back(std::move(node));
    }
    return found->second;
  }

  void Append(Id value, std::string* text) const {
    if (text->size() > kMaxText) return;
    const Node& node = nodes_[value];
    switch (node.form) {
      case Form::kNone:
        *text += "nothing";
        return;
      case Form::kZeros:
        *text += "zeros";
        return;
      case Form::kSource:
        *text += "s" + std::to_string(node.left);
        if (node.right > 0) *text += "." + std::to_string(node.right);
        return;
      case Form::kFold:
        *text += "(";
        Append(node.left, text);
        *text += " ";
        Append(node.right, text);
        *text += ")";
        return;
      case Form::kFinal:
      case Form::kRounded:
        *text += node.form == Form::kFinal ? "final" : "round";
        *text += "[";
        Append(node.left, text);
        *text += "]";
        return;
    }
  }

  size_t words_;
  std::vector<Node> nodes_;
  std::map<std::tuple<Form, int, int>, Id> ids_;
};

class Verifier {
 public:
  Verifier(const Plan& plan, bool in_place)
      : plan_(plan),
        posted_(plan.key.algorithm == Algorithm::kLowLatency),
        in_place_(in_place && !posted_),
        n_(plan.members),
        is_ragged_(plan.key.kind == Kind::kRaggedAllToAll),
        // A ragged exchange moves a part of each source to a part of each result, as
        // index arrays say, which are one more block.
        source_blocks_(
            Blocks(is_ragged_ ? plan.members + 1 : SourceBlocks(plan.key.kind, plan.members))),
        result_blocks_(
            Blocks(is_ragged_ ? plan.members : ResultBlocks(plan.key.kind, plan.members))),
        processes_(plan.key.placement == nullptr ? 1 : plan.key.placement->processes),
        expressions_(plan.members) {}

  VerifierReport Run() {
    if (CheckForm()) {
      Prepare();
      Execute();
      if (CheckAllDone()) {
        CheckResults();
        CheckWaste();
        CheckLifetimes();
        CheckMeetings();
      }
    }
    if (unlisted_ > 0) {
      report_.faults.push_back("and " + std::to_string(unlisted_) + " more faults");
    }
    return std::move(report_);
  }

 private:
  using Clock = std::vector<uint32_t>;

  static uint32_t Blocks(int64_t blocks) { return static_cast<uint32_t>(blocks); }

  struct Signalled {
    uint32_t value;
    Clock clock;  // what whoever sees the value knows
    int step;
    bool read = false;
  };
  struct MemberState {
    size_t next_step = 0;
    Clock clock;
    std::vector<std::vector<Signalled>> signals;  // by the process that sees them
    std::vector<int> sends;                       // actors, so far
    std::vector<uint32_t> touched;  // [peer]: this member's last event in the peer's buffers
    uint32_t checked = 0;           // the event of its check
  };
  struct Access {
    int member;
    uint32_t event;
  };
  struct Location {  // one chunk of one buffer
    Expressions::Id value = Expressions::kUnwritten;
    Access write{-1, 0};
    std::vector<Access> reads;  // since that write
  };

  static constexpr uint32_t kArrivalEvent = 1;
  static uint32_t EventOf(size_t step) { return static_cast<uint32_t>(step) + 2; }
  static size_t StepOf(uint32_t event) { return event - 2; }

  int ProcessOf(int member) const {
    return plan_.key.placement == nullptr ? 0 : plan_.key.placement->process[member];
  }
  // Actors come after the members; each has one event, of its send's step.
  int MemberOf(int actor) const { return actor < n_ ? actor : senders_[actor - n_]; }

  // ---- messages

  void Fault(std::string text) {
    if (report_.faults.size() < kMaxFaults) {
      report_.faults.push_back(std::move(text));
    } else {
      ++unlisted_;
    }
  }
  void FaultAt(int member, size_t step, const std::string& text) {
    Fault(Where(member, step) + ": " + text);
  }
  std::string Where(int actor, size_t index) const {
    const int member = MemberOf(actor);
    const Step& step = plan_.member[member].steps[index];
    std::string text =
        "member " + std::to_string(member) + ", step " + std::to_string(index) + " (";
    switch (step.kind) {
      case StepKind::kSignal:
        text += "signal " + std::to_string(step.value);
        break;
      case StepKind::kWait:
        if (step.member == kOwnSends) {
          text += "wait for " + std::to_string(step.value) + " sends to leave";
          break;
        }
        text += "wait for " +
                (step.member == kEveryMember ? "every member"
                                             : "member " + std::to_string(step.member)) +
                " to reach " + std::to_string(step.value);
        break;
      case StepKind::kReduce:
        text += "reduce chunks [" + std::to_string(step.chunk_begin) + ", " +
                std::to_string(step.chunk_end) + ")";
        break;
      case StepKind::kCheck:
        text += "check";
        break;
      case StepKind::kSend:
        text += "send to process " + std::to_string(step.member);
        break;
    }
    return text + ")";
  }
  std::string Name(BufferRef ref, uint32_t chunk) const {
    const std::string text =
        "chunk " + std::to_string(chunk) + " of member " + std::to_string(ref.member) + "'s ";
    const auto block = [&](uint32_t blocks) {
      return blocks > 1 ? " block " + std::to_string(ref.block) : "";
    };
    switch (ref.kind) {
      case BufferKind::kSource:
        return text + "source" + block(source_blocks_);
      case BufferKind::kResult:
        return text + "result" + block(result_blocks_);
      case BufferKind::kScratch:
        return text + "scratch " + std::to_string(ref.block);
    }
    return text;
  }

  // ---- form: what can be seen without running; false if it cannot be run

  bool CheckForm() {
    if (n_ < 1 || n_ >= kEveryMember || plan_.member.size() != static_cast<size_t>(n_)) {
      Fault("a plan for " + std::to_string(n_) + " members with " +
            std::to_string(plan_.member.size()) + " programs");
      return false;
    }
    if (plan_.chunk_count < 1) {
      Fault("no chunks");
      return false;
    }
    bool runnable = true;
    for (size_t i = 0; i < plan_.refs.size(); ++i) {
      const BufferRef& ref = plan_.refs[i];
      if (ref.member >= n_ || ref.block >= BlocksOf(ref.kind)) {
        Fault("ref " + std::to_string(i) + " names no buffer");
        runnable = false;
      }
    }
    for (int member = 0; member < n_; ++member) {
      const std::vector<Step>& steps = plan_.member[member].steps;
      for (size_t i = 0; i < steps.size(); ++i) {
        const Step& step = steps[i];
        if (step.kind > StepKind::kSend) {
          Fault("member " + std::to_string(member) + ", step " + std::to_string(i) +
                ": of no known kind");
          runnable = false;
        } else if (step.kind == StepKind::kSend) {
          runnable = CheckSend(member, i) && runnable;
        } else if (step.kind == StepKind::kWait && step.member != kEveryMember &&
                   step.member != kOwnSends && step.member >= n_) {
          FaultAt(member, i, "no such member");
          runnable = false;
        } else if (step.kind == StepKind::kReduce) {
          if (step.chunk_begin >= step.chunk_end || step.chunk_end > plan_.chunk_count) {
            FaultAt(member, i,
                    "not a range of the " + std::to_string(plan_.chunk_count) + " chunks");
            runnable = false;
          }
          if (step.source_begin > step.source_end || step.source_end > plan_.refs.size() ||
              step.destination_begin >= step.destination_end ||
              step.destination_end > plan_.refs.size()) {
            FaultAt(member, i, "has no destination, or refs that the plan lacks");
            runnable = false;
          }
        }
      }
    }
    for (int member = 0; member < n_ && runnable; ++member) {
      for (int process = 0; process < processes_; ++process) {
        if (process != ProcessOf(member)) CheckSends(member, process);
      }
    }
    return runnable;
  }

  bool CheckSend(int member, size_t index) {
    const Step& step = plan_.member[member].steps[index];
    if (step.member >= processes_ || step.member == ProcessOf(member)) {
      FaultAt(member, index, "not another process");
      return false;
    }
    const uint32_t data = step.source_end - step.source_begin;
    if (step.source_end > plan_.refs.size() || step.destination_end > plan_.refs.size() ||
        data > 1 || step.destination_end - step.destination_begin != data) {
      FaultAt(member, index, "not one buffer to one other");
      return false;
    }
    if (data == 0) {
      if (step.value < kArrived) FaultAt(member, index, "says nothing");
      return true;
    }
    const BufferRef& from = plan_.refs[step.source_begin];
    const BufferRef& to = plan_.refs[step.destination_begin];
    // What was not rounded goes where it need not be.
    const bool fits = (from.kind == BufferKind::kScratch) == (to.kind == BufferKind::kScratch);
    const bool reachable =
        to.kind == BufferKind::kSource ? to.member == member : ProcessOf(to.member) == step.member;
    if (from.member != member || !fits || !reachable || step.chunk_begin >= step.chunk_end ||
        step.chunk_end > plan_.chunk_count) {
      FaultAt(member, index, "not a piece of the member's own, or to no place that can get it");
      return false;
    }
    return true;
  }

  // The first send of a member to a process says so, and so does the last.
  void CheckSends(int member, int process) {
    const std::vector<Step>& steps = plan_.member[member].steps;
    bool open = false, closed = false;
    for (size_t i = 0; i < steps.size(); ++i) {
      if (steps[i].kind != StepKind::kSend || steps[i].member != process) continue;
      if (steps[i].first == open) FaultAt(member, i, "is it the first to that process or not?");
      if (closed) FaultAt(member, i, "follows the last one to that process");
      open = true;
      closed = steps[i].finalize;
    }
    if (!closed) {
      Fault("member " + std::to_string(member) + " never ends what it sends to process " +
            std::to_string(process));
    }
  }

  // ---- the run

  void Prepare() {
    for (int member = 0; member < n_; ++member) {
      for (const Step& step : plan_.member[member].steps) {
        if (step.kind == StepKind::kSend && step.source_begin < step.source_end) {
          senders_.push_back(member);
        }
      }
    }
    states_.resize(n_ + senders_.size());
    next_actor_ = n_;
    for (int member = 0; member < n_; ++member) {
      states_[member].clock.resize(states_.size());
      states_[member].clock[member] = kArrivalEvent;
      states_[member].touched.resize(n_);
      states_[member].signals.resize(processes_);
    }
    locations_.resize(n_ * BuffersPerMember() * plan_.chunk_count);
    for (int member = 0; member < n_; ++member) {
      for (uint32_t block = 0; block < source_blocks_; ++block) {
        for (uint32_t chunk = 0; chunk < plan_.chunk_count; ++chunk) {
          At({BufferKind::kSource, static_cast<uint16_t>(block), static_cast<uint16_t>(member)},
             chunk)
              .value = expressions_.Source(member, static_cast<int>(block));
        }
      }
    }
  }

  uint32_t BlocksOf(BufferKind kind) const {
    switch (kind) {
      case BufferKind::kSource:
        return source_blocks_;
      case BufferKind::kResult:
        return result_blocks_;
      case BufferKind::kScratch:
        return plan_.scratch_slots;
    }
    return 0;
  }
  // Beside its own, what every other process keeps of its source.
  size_t BuffersPerMember() const {
    return size_t{source_blocks_} * processes_ + result_blocks_ + plan_.scratch_slots;
  }
  bool IsKept(int process, BufferRef ref) const {
    return ref.kind == BufferKind::kSource && ProcessOf(ref.member) != process;
  }
  Location& At(int process, BufferRef ref, uint32_t chunk) {
    if (!IsKept(process, ref)) return At(ref, chunk);
    const int own = ProcessOf(ref.member);
    const size_t other = process < own ? process : process - 1;
    const size_t buffer =
        source_blocks_ * (1 + other) + result_blocks_ + plan_.scratch_slots + ref.block;
    return locations_[(ref.member * BuffersPerMember() + buffer) * plan_.chunk_count + chunk];
  }
  Location& At(BufferRef ref, uint32_t chunk) {
    size_t buffer = ref.block;
    if (ref.kind == BufferKind::kResult && !in_place_) buffer += source_blocks_;
    if (ref.kind == BufferKind::kScratch) buffer += source_blocks_ + result_blocks_;
    return locations_[(ref.member * BuffersPerMember() + buffer) * plan_.chunk_count + chunk];
  }

  void Execute() {
    bool progress = true;
    while (progress) {
      progress = false;
      for (int member = 0; member < n_; ++member) {
        MemberState& state = states_[member];
        const std::vector<Step>& steps = plan_.member[member].steps;
        while (state.next_step < steps.size() && Execute(member, steps[state.next_step])) {
          state.clock[member] = EventOf(state.next_step);
          ++state.next_step;
          progress = true;
        }
      }
    }
  }

  // False if the step has to wait.
  bool Execute(int member, const Step& step) {
    switch (step.kind) {
      case StepKind::kSignal:
        Signal(member, step);
        return true;
      case StepKind::kWait:
        return Wait(member, step);
      case StepKind::kReduce:
        Reduce(member, step);
        return true;
      case StepKind::kCheck:
        Check(member);
        return true;
      case StepKind::kSend:
        Send(member, step);
        return true;
    }
    return true;
  }

  // As a process sees it: another member's begins at 0.
  uint32_t Word(int process, int member) const {
    const std::vector<Signalled>& signals = states_[member].signals[process];
    if (!signals.empty()) return signals.back().value;
    return process == ProcessOf(member) ? kArrived : 0;
  }

  void Signal(int member, const Step& step) {
    Signal(ProcessOf(member), member, step.value, states_[member].clock);
  }

  void Signal(int process, int member, uint32_t value, const Clock& clock) {
    MemberState& state = states_[member];
    if (value <= Word(process, member)) {
      FaultAt(member, state.next_step,
              "does not grow: the word is " + std::to_string(Word(process, member)) + " already");
      return;
    }
    state.signals[process].push_back({value, clock, static_cast<int>(state.next_step)});
  }

  void Send(int member, const Step& step) {
    MemberState& sender = states_[member];
    const uint32_t event = EventOf(sender.next_step);
    if (step.source_begin < step.source_end) {
      const int actor = next_actor_++;
      MemberState& state = states_[actor];
      senders_[actor - n_] = member;
      state.next_step = sender.next_step;
      state.clock = sender.clock;
      state.clock[actor] = event;
      state.touched.resize(n_);
      const BufferRef from = plan_.refs[step.source_begin];
      const BufferRef to = plan_.refs[step.destination_begin];
      const bool indices = is_ragged_ && from.block == n_;
      if (plan_.key.algorithm != Algorithm::kEager && IsTogether(plan_.key.kind, true) &&
          !indices && !KnowsOf(member, step.member)) {
        FaultAt(member, sender.next_step, "may heap up where nobody has come yet");
      }
      Touch(actor, from);
      if (!IsKept(step.member, to)) Touch(actor, to);
      for (uint32_t chunk = step.chunk_begin; chunk < step.chunk_end; ++chunk) {
        const Expressions::Id value = Read(actor, At(from, chunk), from, chunk);
        Write(actor, At(step.member, to, chunk), to, chunk, value);
      }
      if (is_ragged_ && !indices && sender.checked == 0) {
        FaultAt(member, sender.next_step, "comes before the member's check");
      }
      sender.sends.push_back(actor);
      sent_[{member, step.member}].push_back(actor);
    }
    if (step.value == 0) return;
    Clock known = sender.clock;
    known[member] = event;
    for (int actor : sent_[{member, step.member}]) known[actor] = EventOf(states_[actor].next_step);
    Signal(step.member, member, step.value, known);
  }

  // Whether a member knows that one of that process has arrived.
  bool KnowsOf(int member, int process) const {
    for (int peer = 0; peer < n_; ++peer) {
      if (ProcessOf(peer) == process && states_[member].clock[peer] >= kArrivalEvent) return true;
    }
    return false;
  }

  bool WaitForSends(int member, const Step& step) {
    MemberState& state = states_[member];
    if (step.value > state.sends.size()) return false;
    if (step.value < state.sends.size()) {
      FaultAt(member, state.next_step,
              "does not tell which of the " + std::to_string(state.sends.size()) + " have left");
      return true;
    }
    for (int actor : state.sends) state.clock[actor] = EventOf(states_[actor].next_step);
    return true;
  }

  bool Wait(int member, const Step& step) {
    if (step.member == kOwnSends) return WaitForSends(member, step);
    const int process = ProcessOf(member);
    const bool every = step.member == kEveryMember;
    const int begin = every ? 0 : step.member;
    const int end = every ? n_ : begin + 1;
    for (int peer = begin; peer < end; ++peer) {
      if (Word(process, peer) < step.value) return false;
    }
    if (!every && begin == member) {
      FaultAt(member, states_[member].next_step, "waits for itself");
    }
    if (step.value < kArrived) {
      FaultAt(member, states_[member].next_step, "words begin at 1, so this waits for nothing");
      return true;
    }
    for (int peer = begin; peer < end; ++peer) {
      Learn(member, peer, step.value);
    }
    return true;
  }

  // `member` has seen `peer`'s word at `value` or above.
  void Learn(int member, int peer, uint32_t value) {
    MemberState& state = states_[member];
    const int process = ProcessOf(member);
    if (value == kArrived && process == ProcessOf(peer)) {
      state.clock[peer] = std::max(state.clock[peer], kArrivalEvent);
      return;
    }
    std::vector<Signalled>& signals = states_[peer].signals[process];
    Signalled& signal = *std::lower_bound(
        signals.begin(), signals.end(), value,
        [](const Signalled& signal, uint32_t value) { return signal.value < value; });
    signal.read = true;
    if (signal.value != value) {
      FaultAt(member, state.next_step,
              "member " + std::to_string(peer) + " never signals that value, only the later " +
                  std::to_string(signal.value));
    }
    for (size_t i = 0; i < state.clock.size(); ++i) {
      state.clock[i] = std::max(state.clock[i], signal.clock[i]);
    }
  }

  void Check(int member) {
    MemberState& state = states_[member];
    if (!is_ragged_) {
      FaultAt(member, state.next_step, "has nothing to check");
      return;
    }
    if (state.checked != 0) FaultAt(member, state.next_step, "checks again");
    for (int peer = 0; peer < n_; ++peer) {
      if (state.clock[peer] < kArrivalEvent) {
        FaultAt(member, state.next_step,
                "needs member " + std::to_string(peer) + ", which may not have arrived");
      }
      const BufferRef indices{BufferKind::kSource, static_cast<uint16_t>(n_),
                              static_cast<uint16_t>(peer)};
      const int process = ProcessOf(member);
      if (!IsKept(process, indices)) state.touched[peer] = EventOf(state.next_step);
      Read(member, At(process, indices, 0), indices, 0);
    }
    state.checked = EventOf(state.next_step);
  }

  void Reduce(int member, const Step& step) {
    if (is_ragged_ && states_[member].checked == 0) {
      FaultAt(member, states_[member].next_step, "comes before the member's check");
    }
    const int process = ProcessOf(member);
    for (uint32_t i = step.source_begin; i < step.source_end; ++i) {
      const BufferRef& ref = plan_.refs[i];
      if (posted_ && ref.kind == BufferKind::kSource) {
        Learn(member, ref.member, kArrived);  // the data itself is waited for
      } else if (!IsKept(process, ref)) {
        Touch(member, ref);
      }
    }
    for (uint32_t i = step.destination_begin; i < step.destination_end; ++i) {
      Touch(member, plan_.refs[i]);
    }
    for (uint32_t chunk = step.chunk_begin; chunk < step.chunk_end; ++chunk) {
      const Expressions::Id value = Compute(member, step, chunk);
      for (uint32_t i = step.destination_begin; i < step.destination_end; ++i) {
        Write(member, At(plan_.refs[i], chunk), plan_.refs[i], chunk, value);
      }
    }
  }

  void Touch(int member, BufferRef ref) {
    MemberState& state = states_[member];
    if (member < n_ && ProcessOf(ref.member) != ProcessOf(member)) {
      FaultAt(member, state.next_step,
              "touches a buffer of member " + std::to_string(ref.member) + " in another process");
    }
    if (state.clock[ref.member] < kArrivalEvent) {
      FaultAt(member, state.next_step,
              "touches a buffer of member " + std::to_string(ref.member) +
                  ", which may not have arrived");
    }
    state.touched[ref.member] = EventOf(state.next_step);
  }

  Expressions::Id Compute(int member, const Step& step, uint32_t chunk) {
    const size_t index = states_[member].next_step;
    if (step.source_begin == step.source_end) {
      if (step.finalize) FaultAt(member, index, "finalizes zeros");
      return expressions_.Zeros();
    }
    const bool copy = step.source_end - step.source_begin == 1;
    Expressions::Id fold = Expressions::kUnwritten;
    for (uint32_t i = step.source_begin; i < step.source_end; ++i) {
      const BufferRef& ref = plan_.refs[i];
      const Expressions::Id value = Read(member, At(ProcessOf(member), ref, chunk), ref, chunk);
      if (value == Expressions::kUnwritten) continue;
      const auto describe = [&] {
        return Name(plan_.refs[i], chunk) + ", which holds " + expressions_.Text(value);
      };
      if (!copy && !expressions_.IsPartial(value)) {
        FaultAt(member, index, "folds a rounded or finalized value: " + describe());
      }
      if (expressions_.Overlap(fold, value)) {
        FaultAt(member, index,
                "counts a contribution twice: folds " + expressions_.Text(fold) + " with " +
                    describe());
      }
      fold = fold == Expressions::kUnwritten ? value : expressions_.Fold(fold, value);
    }
    if (!step.finalize || fold == Expressions::kUnwritten) return fold;
    if (!expressions_.IsPartial(fold)) {
      FaultAt(member, index,
              std::string(expressions_.IsFinal(fold) ? "finalizes twice: "
                                                     : "finalizes what was rounded before: ") +
                  expressions_.Text(fold));
    }
    return expressions_.Finalize(fold);
  }

  // ---- accesses

  bool Ordered(int member, Access earlier) const {
    return earlier.member == member || earlier.member < 0 ||
           states_[member].clock[earlier.member] >= earlier.event;
  }

  Expressions::Id Read(int member, Location& location, BufferRef ref, uint32_t chunk) {
    const size_t index = states_[member].next_step;
    if (location.value == Expressions::kUnwritten) {
      FaultAt(member, index, "reads " + Name(ref, chunk) + ", which may not be written yet");
    } else if (!Ordered(member, location.write)) {
      FaultAt(member, index,
              "reads " + Name(ref, chunk) + " while it may be written by " +
                  Where(location.write.member, StepOf(location.write.event)));
    }
    location.reads.push_back({member, EventOf(index)});
    return location.value;
  }

  void Write(int member, Location& location, BufferRef ref, uint32_t chunk, Expressions::Id value) {
    const size_t index = states_[member].next_step;
    if (ref.kind == BufferKind::kSource && member < n_) {
      FaultAt(member, index, "writes a source: " + Name(ref, chunk));
      return;
    }
    if (!Ordered(member, location.write)) {
      FaultAt(member, index,
              "writes " + Name(ref, chunk) + " while it may be written by " +
                  Where(location.write.member, StepOf(location.write.event)));
    } else if (location.write.member >= 0 && location.reads.empty()) {
      FaultAt(member, index,
              "overwrites " + Name(ref, chunk) + ", which nobody has read since " +
                  Where(location.write.member, StepOf(location.write.event)));
    }
    for (const Access& read : location.reads) {
      if (!Ordered(member, read)) {
        FaultAt(member, index,
                "writes " + Name(ref, chunk) + " while it may be read by " +
                    Where(read.member, StepOf(read.event)));
      }
    }
    location.value = ref.kind == BufferKind::kScratch || value == Expressions::kUnwritten
                         ? value
                         : expressions_.Round(value);
    location.write = {member, EventOf(index)};
    location.reads.clear();
  }

  // ---- the end

  bool CheckAllDone() {
    bool done = true;
    for (int member = 0; member < n_; ++member) {
      const std::vector<Step>& steps = plan_.member[member].steps;
      const size_t index = states_[member].next_step;
      if (index == steps.size()) continue;
      done = false;
      const Step& step = steps[index];
      if (step.member == kOwnSends) FaultAt(member, index, "waits for ever: it sends less");
      const int process = ProcessOf(member);
      for (int peer = 0; peer < n_; ++peer) {
        if ((step.member == peer || step.member == kEveryMember) &&
            Word(process, peer) < step.value) {
          const bool ended = states_[peer].next_step == plan_.member[peer].steps.size();
          FaultAt(member, index,
                  "waits for ever: member " + std::to_string(peer) + " stays at " +
                      std::to_string(Word(process, peer)) +
                      (ended ? ", at its end"
                             : ", in its step " + std::to_string(states_[peer].next_step)));
        }
      }
    }
    return done;
  }

  void CheckResults() {
    if (plan_.key.kind == Kind::kAllReduce) {
      CheckAllReduce();
      return;
    }
    for (int member = 0; member < n_; ++member) {
      for (uint32_t block = 0; block < result_blocks_; ++block) {
        const Expressions::Id expected = Expected(member, static_cast<int>(block));
        const BufferRef ref{BufferKind::kResult, static_cast<uint16_t>(block),
                            static_cast<uint16_t>(member)};
        for (uint32_t chunk = 0; chunk < plan_.chunk_count; ++chunk) {
          const Expressions::Id value = At(ref, chunk).value;
          if (value == expected) continue;
          Fault(Name(ref, chunk) + " ends as " + expressions_.Text(value) + " instead of " +
                expressions_.Text(expected));
        }
      }
    }
  }

  // The fold of block `block` of the sources of members [0, end), in rank order.
  Expressions::Id FoldOf(int end, int block) {
    Expressions::Id fold = expressions_.Source(0, block);
    for (int member = 1; member < end; ++member) {
      fold = expressions_.Fold(fold, expressions_.Source(member, block));
    }
    return fold;
  }

  // What block `block` of a member's result must be (core/collective.h).
  Expressions::Id Expected(int member, int block) {
    const bool is_root = member == plan_.key.root;
    switch (plan_.key.kind) {
      case Kind::kAllReduce:
        break;  // CheckAllReduce
      case Kind::kAllGather:
        return expressions_.Source(block, 0);
      case Kind::kReduceScatter:
        return expressions_.Round(expressions_.Finalize(FoldOf(n_, member)));
      case Kind::kAllToAll:
      case Kind::kRaggedAllToAll:
        return expressions_.Source(block, member);
      case Kind::kPermute:
        for (const auto& [source, target] : plan_.key.pairs->list) {
          if (target == member) return expressions_.Source(source, 0);
        }
        return expressions_.Zeros();
      case Kind::kBroadcast:
        return expressions_.Source(plan_.key.root, 0);
      case Kind::kReduce:
        return is_root ? expressions_.Round(expressions_.Finalize(FoldOf(n_, 0)))
                       : expressions_.Zeros();
      case Kind::kGather:
        return is_root ? expressions_.Source(block, 0) : expressions_.Zeros();
      case Kind::kScatter:
        return expressions_.Source(plan_.key.root, member);
      case Kind::kScan:
        return expressions_.Round(FoldOf(member + 1, 0));
      case Kind::kExscan:
        return member == 0 ? expressions_.Zeros() : expressions_.Round(FoldOf(member, 0));
      case Kind::kBarrier:
        return expressions_.Source(member, 0);
    }
    return Expressions::kUnwritten;
  }

  void CheckAllReduce() {
    for (uint32_t chunk = 0; chunk < plan_.chunk_count; ++chunk) {
      const Expressions::Id first = At({BufferKind::kResult, 0, 0}, chunk).value;
      for (int member = 0; member < n_; ++member) {
        const BufferRef ref{BufferKind::kResult, 0, static_cast<uint16_t>(member)};
        const Expressions::Id value = At(ref, chunk).value;
        const std::string text = Name(ref, chunk) + " ends as " + expressions_.Text(value);
        if (value == Expressions::kUnwritten) {
          Fault(text);
          continue;
        }
        if (!expressions_.IsFinal(value)) Fault(text + ": never finalized");
        for (int source = 0; source < n_; ++source) {
          if (!expressions_.Holds(value, source)) {
            Fault(text + ": lacks the contribution of member " + std::to_string(source));
          }
        }
        if (value != first && first != Expressions::kUnwritten) {
          Fault(text + ": another fold than member 0's " + expressions_.Text(first));
        }
      }
    }
  }

  void CheckWaste() {
    for (int member = 0; member < n_; ++member) {
      for (const std::vector<Signalled>& signals : states_[member].signals) {
        for (const Signalled& signal : signals) {
          if (signal.read || signal.value == kArrived) continue;
          FaultAt(member, signal.step, "nobody waits for this signal");
        }
      }
      for (int process = 0; process < processes_; ++process) {
        if (process == ProcessOf(member)) continue;
        for (uint32_t block = 0; block < source_blocks_; ++block) {
          const BufferRef ref{BufferKind::kSource, static_cast<uint16_t>(block),
                              static_cast<uint16_t>(member)};
          for (uint32_t chunk = 0; chunk < plan_.chunk_count; ++chunk) {
            const Location& location = At(process, ref, chunk);
            if (location.write.member >= 0 && location.reads.empty()) {
              FaultAt(location.write.member, StepOf(location.write.event),
                      "nobody reads " + Name(ref, chunk));
            }
          }
        }
      }
      for (uint32_t slot = 0; slot < plan_.scratch_slots; ++slot) {
        for (uint32_t chunk = 0; chunk < plan_.chunk_count; ++chunk) {
          const BufferRef ref{BufferKind::kScratch, static_cast<uint16_t>(slot),
                              static_cast<uint16_t>(member)};
          const Location& location = At(ref, chunk);
          if (location.write.member >= 0 && location.reads.empty()) {
            FaultAt(location.write.member, StepOf(location.write.event),
                    "nobody reads " + Name(ref, chunk));
          }
        }
      }
    }
  }

  // A member's buffers are given back after its last step: by then it must know
  // of every peer's last access.
  void CheckLifetimes() {
    for (int owner = 0; owner < n_; ++owner) {
      for (int peer = 0; peer < static_cast<int>(states_.size()); ++peer) {
        const uint32_t event = states_[peer].touched[owner];
        if (event > states_[owner].clock[peer]) {
          FaultAt(
              peer, StepOf(event),
              "touches a buffer of member " + std::to_string(owner) + ", which may have finished");
        }
      }
    }
  }

  // A member has waited for whom it needs, by kind, and for nobody else, and leaves
  // a ragged exchange when all have checked their part of it. Where data goes ahead,
  // nobody waits for those who get it.
  void CheckMeetings() {
    Signature signature;
    signature.kind = plan_.key.kind;
    signature.root = plan_.key.root;
    signature.pairs = plan_.key.pairs;
    const bool across = plan_.key.placement != nullptr;
    const bool may_leave = posted_ || (plan_.key.algorithm == Algorithm::kEager &&
                                       !IsTogether(plan_.key.kind, across));
    for (int member = 0; member < n_; ++member) {
      const std::string name = "member " + std::to_string(member);
      if (is_ragged_ && states_[member].checked == 0) Fault(name + " checks nothing");
      for (int peer = 0; peer < n_; ++peer) {
        const uint32_t known = states_[member].clock[peer];
        const std::string peer_name = "member " + std::to_string(peer);
        const bool met = known >= kArrivalEvent;
        const bool needs = Needs(signature, n_, member, peer, across);
        if (met != needs && !(needs && may_leave)) {
          Fault(name + (met ? " waits, but not needs to, for " : " may finish before ") +
                peer_name);
        } else if (is_ragged_ && known < states_[peer].checked) {
          Fault(name + " may finish before " + peer_name + " has checked");
        }
      }
    }
  }

  const Plan& plan_;
  const bool posted_;  // a source is copied when its member arrives, and the copies stay
  const bool in_place_;
  const int n_;
  const bool is_ragged_;
  const uint32_t source_blocks_;
  const uint32_t result_blocks_;
  const int processes_;
  Expressions expressions_;
  std::vector<MemberState> states_;  // of members, then of actors
  std::vector<int> senders_;         // of actors
  int next_actor_ = 0;
  std::map<std::pair<int, int>, std::vector<int>> sent_;  // by member and process
  std::vector<Location> locations_;
  VerifierReport report_;
  size_t unlisted_ = 0;
};

}  // namespace

VerifierReport VerifyPlan(const Plan& plan, bool in_place) {
  return Verifier(plan, in_place).Run();
}

}  // namespace dfccl
