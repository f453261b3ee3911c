// SPDX-License-Identifier: Apache-2.0
// The loop of a block of the CUDA daemon: takes submissions in, runs their tasks, turns
// to another where one is blocked, and leaves when nothing moves on the whole GPU. All
// threads of the block run this; thread 0, the leader, decides, and the others learn of
// it through shared memory. The interpreter, order, stickiness, queues and words are those
// of core/protocol.
//
// Leaving: a block that has seen nothing move anywhere for a while sets `closing`, and all
// blocks leave between two slices, with their state in device memory. A block that finds
// something to move at that moment leaves it there: the host launches the daemon again as
// long as anything is unfinished (service.h). So no race about leaving can lose work, and a
// launch of which only some blocks have found a place on the GPU leaves, too.
#ifndef DFCCL_CUDA_DAEMON_H_
#define DFCCL_CUDA_DAEMON_H_

#include <stdint.h>
#include <string.h>

#include <new>

#include "core/protocol/interpreter.h"
#include "cuda/device.h"
#include "cuda/fold.h"
#include "cuda/layout.h"

namespace dfccl {
namespace gpu {

DFCCL_DEVICE inline Slot& SlotOf(const SubmissionEntry& entry, uint32_t member) {
  return entry.record->slots()[entry.lane * entry.members + member];
}

DFCCL_DEVICE inline int64_t IndexAt(const RaggedArrays& arrays, const void* array, uint32_t i) {
  return arrays.wide != 0 ? static_cast<const int64_t*>(array)[i]
                          : static_cast<const int32_t*>(array)[i];
}

template <typename Block>
class Daemon {
 public:
  DFCCL_DEVICE Daemon(const DaemonArguments& arguments, uint32_t index, Shared* shared,
                      Block& block)
      : wiring_(arguments.wiring[index]),
        state_(arguments.states[index]),
        grid_(*arguments.grid),
        door_(*arguments.door),
        arguments_(arguments),
        shared_(*shared),
        block_(block) {}

  DFCCL_DEVICE void Run() {
    if (block_.leader()) Begin();
    uint64_t activity = 0;
    uint32_t idle = 0, turns = 0;
    for (;;) {
      if (block_.leader()) TakeIn();
      block_.Sync();
      Scan();
      block_.Sync();
      if (block_.leader()) {
        Collect();
        shared_.task = NextTask();
        idle = shared_.task != nullptr ? 0 : idle + 1;
        const uint64_t now = grid_.activity.LoadRelaxed();
        if (now != activity) idle = 0;
        activity = now;
        // The door is far away, so who is busy does not look at it.
        if (idle > arguments_.quit_polls || (idle > 0 && door_.stop.LoadRelaxed() != 0)) {
          grid_.closing.StoreRelaxed(1);
        }
        // Relaxed: what a block leaves behind is its own. Every launch has a turn at least,
        // so that however late its blocks begin, it brings things on.
        shared_.leave = turns++ > 0 ? grid_.closing.LoadRelaxed() : 0;
        if (shared_.leave != 0 && shared_.task != nullptr) order().PushFront(shared_.task);
      }
      block_.Sync();
      if (shared_.leave != 0) break;
      if (shared_.task != nullptr) {
        RunTask();
      } else {
        block_.Pause();
      }
    }
    if (block_.leader()) End();
  }

 private:
  class Machine;

  DFCCL_DEVICE Order& order() { return *reinterpret_cast<Order*>(state_.order); }
  DFCCL_DEVICE Stickiness& stickiness() {
    return *reinterpret_cast<Stickiness*>(state_.stickiness);
  }
  // The address of some posted word that the block has looked for in vain.
  DFCCL_DEVICE Atomic<uint64_t>& awaited() {
    return *reinterpret_cast<Atomic<uint64_t>*>(shared_.awaited);
  }

  DFCCL_DEVICE void Begin() {
    if (state_.initialized == 0) {
      new (state_.order) Order();
      new (state_.stickiness) Stickiness();
      new (state_.submissions) SpscConsumer<SubmissionEntry>(
          wiring_.submission_ends, wiring_.submissions, wiring_.submission_capacity);
      new (state_.completions) SpscProducer<CompletionEntry>(
          wiring_.completion_ends, wiring_.completions, wiring_.completion_capacity);
      state_.initialized = 1;
    }
    new (shared_.awaited) Atomic<uint64_t>();
    shared_.resident = nullptr;
  }

  DFCCL_DEVICE void End() {
    Save();
    // Acquire and release: the last block to leave speaks for all.
    if (grid_.left.FetchAddAcqRel(1) + 1 == arguments_.blocks) {
      grid_.left.StoreRelaxed(0);
      grid_.closing.StoreRelaxed(0);
      // Release: partner is the look in Service::LaunchIfParked.
      door_.parked.StoreRelease(arguments_.launch);
    }
  }

  // By the leader.
  DFCCL_DEVICE_CALL void TakeIn() {
    auto& submissions = *reinterpret_cast<SpscConsumer<SubmissionEntry>*>(state_.submissions);
    SubmissionEntry entry;
    while (submissions.TryPop(&entry)) {
      grid_.activity.FetchAddRelaxed(1);
      Task& task = wiring_.tasks[entry.task];
      if (entry.kind == EntryKind::kFail) {
        // A task that has not finished keeps its record in use.
        if (task.phase != Phase::kFree && task.entry.sequence == entry.sequence) {
          task.entry.record->roll.Fail();
        }
        continue;
      }
      task.entry = entry;
      task.priority = entry.priority;
      task.saved = {0, 0, 0};
      task.phase = Phase::kAwaitsReady;
      task.started = 0;
      if (Movable(task)) {
        order().Push(&task);
      } else {
        Park(&task);
      }
    }
  }

  // By the leader: the task waits among the blocked.
  DFCCL_DEVICE void Park(Task* task) {
    wiring_.blocked[state_.blocked_count++] = static_cast<uint32_t>(task - wiring_.tasks);
  }

  DFCCL_DEVICE bool Movable(const Task& task) {
    const SubmissionEntry& entry = task.entry;
    switch (task.phase) {
      case Phase::kAwaitsReady:
        return Reached(entry.words->ready, entry.sequence);  // after the operands
      case Phase::kSteps:
        if (entry.record->roll.Failed()) return true;
        if (entry.generation != 0) {
          uint32_t data;
          return task.awaited->TryRead(entry.generation, &data);
        }
        if (task.wait_member != kEveryMember) {
          return SlotOf(entry, task.wait_member).progress.Reached(task.wait_value);
        }
        for (uint32_t member = 0; member < entry.members; ++member) {
          if (!SlotOf(entry, member).progress.Reached(task.wait_value)) return false;
        }
        return true;
      case Phase::kDraining:
        return entry.record->roll.Quiet();
      case Phase::kFree:
        break;
    }
    return false;
  }

  DFCCL_DEVICE uint32_t WindowEnd() const {
    const uint32_t end = state_.cursor + kScan;
    return end < state_.blocked_count ? end : state_.blocked_count;
  }

  // By all threads: which of the blocked tasks in the window can move.
  DFCCL_DEVICE void Scan() {
    const uint32_t end = WindowEnd();
    for (uint32_t i = state_.cursor + block_.thread(); i < end; i += block_.threads()) {
      shared_.movable[i - state_.cursor] = Movable(wiring_.tasks[wiring_.blocked[i]]) ? 1 : 0;
    }
  }

  // By the leader: makes them ready, in order, and moves the window on.
  DFCCL_DEVICE void Collect() {
    const uint32_t begin = state_.cursor, end = WindowEnd();
    for (uint32_t i = begin; i < end; ++i) {
      if (shared_.movable[i - begin] != 0) order().Push(&wiring_.tasks[wiring_.blocked[i]]);
    }
    uint32_t gone = 0;
    for (uint32_t i = end; i-- > begin;) {
      if (shared_.movable[i - begin] == 0) continue;
      wiring_.blocked[i] = wiring_.blocked[--state_.blocked_count];
      ++gone;
    }
    state_.cursor = end - gone < state_.blocked_count ? end - gone : 0;
  }

  // By the leader.
  DFCCL_DEVICE Task* NextTask() { return static_cast<Task*>(order().Pop()); }

  // By the leader: the resident's dynamic context, if it is not saved yet.
  DFCCL_DEVICE void Save() {
    if (shared_.resident == nullptr || shared_.changed == 0) return;
    shared_.resident->saved = shared_.context;
    shared_.changed = 0;
    Count(&wiring_.counters->saves);
  }

  // By the leader: makes the task the resident. The contexts of one that stays are not
  // loaded again.
  DFCCL_DEVICE void Load(Task* task) {
    shared_.reload = shared_.resident != task ? 1 : 0;
    shared_.phase = task->phase;
    Count(&wiring_.counters->turns);
    if (shared_.reload != 0) {
      if (shared_.resident != nullptr) {
        Save();
        Count(&wiring_.counters->preemptions);
      }
      shared_.resident = task;
      shared_.context = task->saved;
      shared_.changed = 0;
      if (task->started != 0) Count(&wiring_.counters->loads);
      task->started = 1;
    }
    const uint32_t blocked = state_.blocked_count;
    shared_.context.budget = stickiness().Budget(blocked < 32 ? blocked : 32);
  }

  // One writer.
  DFCCL_DEVICE static void Count(Atomic<uint64_t>* counter) {
    counter->StoreRelaxed(counter->LoadRelaxed() + 1);
  }

  DFCCL_DEVICE void RunTask() {
    Task* task = shared_.task;
    if (block_.leader()) Load(task);
    block_.Sync();
    if (shared_.reload != 0) {
      CopyWords(&shared_.entry, &task->entry);
      block_.Sync();
    }
    const SubmissionEntry& entry = shared_.entry;
    if (shared_.phase == Phase::kDraining) {
      if (block_.leader()) Finish(task);
      return;
    }
    Machine machine(this, entry);
    const bool posted = entry.generation != 0;
    Outcome outcome = Outcome::kDone;
    if (shared_.phase != Phase::kAwaitsReady) {
      if (posted && machine.HasFailed()) outcome = Outcome::kFailed;
    } else if (posted) {
      machine.Post();
      if (block_.leader()) Begun(task);
    } else {
      machine.FillResult();
      block_.Sync();
      if (block_.leader()) Arrive(task, entry);
    }
    const StaticContext fixed = {entry.list, entry.align, entry.slice_elements};
    DynamicContext context = shared_.context;
    bool changed = false;
    if (posted && outcome == Outcome::kDone && !machine.Collect(context.budget)) {
      outcome = Outcome::kBlocked;
    }
    if (outcome == Outcome::kDone) outcome = Interpret(fixed, &context, &changed, machine);
    block_.Sync();  // everyone has its context
    if (!block_.leader()) return;
    shared_.context = context;
    if (changed) {
      shared_.changed = 1;
      grid_.activity.FetchAddRelaxed(1);
    }
    switch (outcome) {
      case Outcome::kDone:
        Finish(task);
        break;
      case Outcome::kFailed:
        task->phase = Phase::kDraining;
        if (posted) {  // nobody but this member has touched its buffers
          Finish(task);
          break;
        }
        entry.record->roll.Leave(entry.members * entry.lanes);
        grid_.activity.FetchAddRelaxed(1);
        Park(task);
        break;
      case Outcome::kYielded:
        order().PushFront(task);
        break;
      case Outcome::kBlocked: {
        stickiness().Failed();
        if (posted) {
          task->awaited = reinterpret_cast<const FlaggedWord*>(awaited().LoadRelaxed());
          Park(task);
          break;
        }
        const Step& wait = entry.list.steps[context.step];
        task->wait_member = wait.member;
        task->wait_value = wait.value;
        Park(task);
        break;
      }
    }
  }

  // By all threads. Both are of the same type, which is plain data.
  DFCCL_DEVICE void CopyWords(SubmissionEntry* to, const SubmissionEntry* from) {
    constexpr uint32_t kWords = sizeof(SubmissionEntry) / sizeof(uint64_t);
    static_assert(sizeof(SubmissionEntry) % sizeof(uint64_t) == 0, "copied by words");
    for (uint32_t i = block_.thread(); i < kWords; i += block_.threads()) {
      StoreAs(reinterpret_cast<char*>(to) + i * sizeof(uint64_t),
              LoadAs<uint64_t>(reinterpret_cast<const char*>(from) + i * sizeof(uint64_t)));
    }
  }

  // By the leader: the member's operands are there.
  DFCCL_DEVICE void Arrive(Task* task, const SubmissionEntry& entry) {
    Slot& slot = SlotOf(entry, entry.member);
    slot.source = entry.source;
    slot.result = entry.result;
    slot.scratch = entry.scratch;
    slot.ragged = entry.ragged;
    // If it has failed the interpreter finds that out.
    if (entry.record->roll.Arrive()) slot.progress.Publish(kArrived);
    Begun(task);
  }

  DFCCL_DEVICE void Begun(Task* task) {
    task->phase = Phase::kSteps;
    grid_.activity.FetchAddRelaxed(1);
  }

  // By the leader: the task is over, and its operation with its last lane.
  DFCCL_DEVICE_CALL void Finish(Task* task) {
    const SubmissionEntry& entry = task->entry;
    Record* record = entry.record;
    // Acquire and release: the last lane speaks for all.
    const bool last =
        entry.lanes == 1 ||
        record->finished(entry.members, entry.lanes)[entry.member].FetchAddAcqRel(1) + 1 ==
            entry.lanes;
    // The record is not this member's any more once it has left; one that has failed is
    // the host's to clean, and its members left when they heard of it.
    const bool failed = task->phase == Phase::kDraining;
    Roll::Left left = Roll::Left::kFailed;
    if (entry.generation != 0) {
      // Nothing was counted. Whoever fails it does so for a task of its own block, which
      // sees that here.
      if (!record->roll.Failed()) left = Roll::Left::kOthersRemain;
    } else if (!failed) {
      left = record->roll.Leave(entry.members * entry.lanes);
    }
    if (left == Roll::Left::kLast) {
      for (uint32_t i = 0; i < entry.members * entry.lanes; ++i)
        record->slots()[i].progress.Reset();
      for (uint32_t i = 0; i < entry.members; ++i) {
        record->finished(entry.members, entry.lanes)[i].StoreRelaxed(0);
      }
      record->roll.Reset();
    }
    CompletionEntry completion;
    completion.sequence = entry.sequence;
    completion.task = entry.task;
    completion.failed = failed ? 1 : 0;
    // Relaxed: who drains has acquired the roll, which failed after this was written.
    completion.cause = failed ? record->cause.LoadRelaxed() : 0;
    completion.last = last ? 1 : 0;
    completion.record_failed = left == Roll::Left::kFailed ? 1 : 0;
    // Release: partner is the stream's wait, or the host's look.
    if (last) entry.words->done.StoreRelease(entry.sequence);
    task->phase = Phase::kFree;
    if (shared_.resident == task) shared_.resident = nullptr;
    grid_.activity.FetchAddRelaxed(1);
    // Never full: it has room for all tasks that a block can have. The host may give
    // the task's place to another operation from here on.
    reinterpret_cast<SpscProducer<CompletionEntry>*>(state_.completions)->TryPush(completion);
  }

  const BlockWiring& wiring_;
  BlockState& state_;
  Grid& grid_;
  Door& door_;
  const DaemonArguments& arguments_;
  Shared& shared_;
  Block& block_;
};

// What the interpreter can do for one member's lane, by all threads of a block.
template <typename Block>
class Daemon<Block>::Machine {
 public:
  DFCCL_DEVICE Machine(Daemon* daemon, const SubmissionEntry& entry)
      : daemon_(*daemon), entry_(entry), block_(daemon->block_) {}

  // A member that has found all that was posted ends well, whatever has come since.
  DFCCL_DEVICE bool Failed() { return entry_.generation == 0 && HasFailed(); }
  DFCCL_DEVICE bool HasFailed() {
    return block_.Any(block_.leader() && entry_.record->roll.Failed());
  }

  // Says that the member's source is there, by the source itself.
  DFCCL_DEVICE_CALL void Post() {
    const int64_t block_bytes = entry_.count * entry_.element_size;
    const char* source = static_cast<const char*>(entry_.source);
    FlaggedWord* posted = entry_.record->posted() + entry_.member * entry_.source_words;
    for (uint32_t i = block_.thread(); i < entry_.source_words; i += block_.threads()) {
      const int64_t at = int64_t{FlaggedWord::kBytes} * (i % entry_.block_words);
      const int64_t left = block_bytes - at;
      posted[i].Post(LoadWord(source + i / entry_.block_words * block_bytes + at,
                              left < FlaggedWord::kBytes ? left : FlaggedWord::kBytes),
                     entry_.generation);
    }
    block_.Sync();  // a result may take the source's place
  }

  // Takes in what all have posted of what this member needs. False: some word was missing
  // in as many looks as it may take, and is awaited().
  DFCCL_DEVICE_CALL bool Collect(uint32_t most_polls) {
    const StepList& list = entry_.list;
    const uint32_t first = list.steps[0].source_begin;
    const uint32_t words =
        (list.steps[list.step_count - 1].source_end - first) * entry_.block_words;
    for (uint32_t polls = 0;; ++polls) {
      bool missing = false;
      for (uint32_t i = block_.thread(); i < words; i += block_.threads()) {
        const uint32_t block = i / entry_.block_words, word = i % entry_.block_words;
        const BufferRef& ref = list.refs[first + block];
        const FlaggedWord* posted = entry_.record->posted() + ref.member * entry_.source_words +
                                    ref.block * entry_.block_words + word;
        uint32_t data;
        if (posted->TryRead(entry_.generation, &data)) {
          StoreAs(Collected(block) + word * FlaggedWord::kBytes, data);
        } else {
          missing = true;
          daemon_.awaited().StoreRelaxed(reinterpret_cast<uint64_t>(posted));
        }
      }
      if (!block_.Any(missing)) {
        if (polls > 0) Polled(polls);
        return true;
      }
      if (polls == most_polls) return false;
      SpinPause();
    }
  }

  DFCCL_DEVICE bool Reached(uint16_t member, uint32_t value) {
    if (member != kEveryMember) {
      return block_.Any(block_.leader() && SlotOf(entry_, member).progress.Reached(value));
    }
    bool missing = false;
    for (uint32_t i = block_.thread(); i < entry_.members; i += block_.threads()) {
      missing |= !SlotOf(entry_, i).progress.Reached(value);
    }
    return !block_.Any(missing);
  }

  DFCCL_DEVICE void Signal(uint32_t value) {
    block_.Sync();  // all threads have done what the signal says
    if (block_.leader()) SlotOf(entry_, entry_.member).progress.Publish(value);
  }

  DFCCL_DEVICE int64_t Count(const Step& step) {
    if (entry_.is_ragged == 0) return entry_.lane_end - entry_.lane_begin;
    const BufferRef& source = entry_.list.refs[step.source_begin];
    return IndexAt(entry_.ragged, entry_.ragged.recv_sizes, source.member) * entry_.count;
  }

  DFCCL_DEVICE_CALL bool Reduce(const Step& step, int64_t begin, int64_t end) {
    block_.Sync();  // the step before is over, and with it its list of buffers
    const uint32_t sources = step.source_end - step.source_begin;
    const uint32_t destinations = step.destination_end - step.destination_begin;
    for (uint32_t i = block_.thread(); i < sources + destinations; i += block_.threads()) {
      const uint32_t index =
          i < sources ? step.source_begin + i : step.destination_begin + i - sources;
      daemon_.shared_.buffers[i] =
          entry_.generation != 0 && i < sources
              ? reinterpret_cast<uint64_t>(Collected(index - entry_.list.steps[0].source_begin))
              : Address(entry_.list.refs[index], begin);
    }
    block_.Sync();
    FoldArguments arguments;
    arguments.op = entry_.op;
    arguments.dtype = entry_.dtype;
    arguments.element_size = entry_.element_size;
    arguments.source_count = sources;
    arguments.destination_count = destinations;
    arguments.buffers = daemon_.shared_.buffers;
    arguments.count = end - begin;
    arguments.mean_divisor = step.finalize ? entry_.members : 0;
    if (CopyInBulk(arguments) || Fold(block_, arguments)) return true;
    Fail(Reason::kImpossible, 0);
    return false;
  }

  // Whether the rows that all members send to this one fit.
  DFCCL_DEVICE bool Check() {
    bool wrong = false;
    for (uint32_t peer = block_.thread(); peer < entry_.members; peer += block_.threads()) {
      wrong |= !Fits(peer);
    }
    if (!block_.Any(wrong)) return true;
    uint32_t peer = 0;
    while (Fits(peer)) ++peer;
    Fail(Reason::kRagged, peer);
    return false;
  }

  // Plans with sends are for several processes; the host gives this daemon none.
  DFCCL_DEVICE void Send(const Step&) { Fail(Reason::kImpossible, 0); }

  DFCCL_DEVICE bool ShouldYield() {
    bool yield = false;
    if (block_.leader()) {
      daemon_.TakeIn();
      daemon_.grid_.activity.FetchAddRelaxed(1);
      yield = daemon_.order().HasAbove(entry_.priority) || daemon_.grid_.closing.LoadRelaxed() != 0;
    }
    return block_.Any(yield);
  }

  DFCCL_DEVICE void Polled(uint32_t polls) {
    if (block_.leader()) daemon_.stickiness().Succeeded(polls);
  }

  // What the result of a ragged exchange holds before.
  DFCCL_DEVICE void FillResult() {
    if (entry_.is_ragged == 0 || entry_.ragged.initial == entry_.result) return;
    if (block_.leader()) {
      daemon_.shared_.buffers[0] = reinterpret_cast<uint64_t>(entry_.ragged.initial);
      daemon_.shared_.buffers[1] = reinterpret_cast<uint64_t>(entry_.result);
    }
    block_.Sync();
    FoldArguments arguments = {};
    arguments.element_size = entry_.element_size;
    arguments.source_count = 1;
    arguments.destination_count = 1;
    arguments.buffers = daemon_.shared_.buffers;
    arguments.count = entry_.ragged.result_rows * entry_.count;
    CopyElements(block_, arguments, entry_.element_size);
  }

 private:
  // False: it is none, or a small one, or this is not how it is to be done.
  DFCCL_DEVICE bool CopyInBulk(const FoldArguments& arguments) {
    if constexpr (Block::kCopiesInBulk) {
      bool accumulated;
      if (daemon_.arguments_.bulk == 0 || entry_.generation != 0 || arguments.source_count != 1 ||
          !IsCopy(arguments, &accumulated)) {
        return false;
      }
      const int64_t bytes =
          arguments.count * (accumulated ? int64_t{sizeof(float)} : arguments.element_size);
      if (bytes < kLeastBulkBytes) return false;
      bool askew = bytes % kBulkAlign != 0;
      for (uint32_t i = block_.thread(); i <= arguments.destination_count; i += block_.threads()) {
        askew |= arguments.buffers[i] % kBulkAlign != 0;
      }
      if (block_.Any(askew)) return false;
      if (block_.leader()) {
        Daemon::Count(&daemon_.wiring_.counters->bulk_copies);
        block_.CopyInBulk(&daemon_.shared_.bulk, BufferOf(arguments.buffers[0]),
                          arguments.buffers + 1, arguments.destination_count, bytes);
      }
      block_.Sync();
      return true;
    } else {
      return false;
    }
  }

  // Where the block that is the member's `index`th source is, once it has been collected.
  DFCCL_DEVICE char* Collected(uint32_t index) {
    const uint32_t bytes = entry_.block_words * FlaggedWord::kBytes;
    return daemon_.shared_.sources + index * ((bytes + kPostedAlign - 1) & ~(kPostedAlign - 1));
  }

  DFCCL_DEVICE static uint32_t LoadWord(const char* from, int64_t bytes) {
    uint32_t word = 0;
    if (bytes == FlaggedWord::kBytes && reinterpret_cast<uint64_t>(from) % sizeof(word) == 0) {
      return LoadAs<uint32_t>(from);
    }
    for (int64_t i = 0; i < bytes; ++i) {
      word |= static_cast<uint32_t>(static_cast<unsigned char>(from[i])) << (8 * i);
    }
    return word;
  }

  // If several fail it, any of them says why.
  DFCCL_DEVICE void Fail(Reason reason, uint32_t peer) {
    if (!block_.leader()) return;
    entry_.record->cause.StoreRelaxed(Cause{reason, entry_.member, peer}.Word());
    entry_.record->roll.Fail();
  }

  DFCCL_DEVICE bool Fits(uint32_t peer) const {
    const RaggedArrays& to = entry_.ragged;
    const RaggedArrays& from = SlotOf(entry_, peer).ragged;
    const int64_t rows = IndexAt(from, from.send_sizes, entry_.member);
    if (rows < 0 || rows != IndexAt(to, to.recv_sizes, peer)) return false;
    if (rows == 0) return true;
    const int64_t input = IndexAt(from, from.input_offsets, entry_.member);
    const int64_t output = IndexAt(from, from.output_offsets, entry_.member);
    return input >= 0 && input <= from.source_rows - rows && output >= 0 &&
           output <= to.result_rows - rows;
  }

  DFCCL_DEVICE uint64_t Address(const BufferRef& ref, int64_t element) const {
    const Slot& slot = SlotOf(entry_, ref.member);
    int64_t row = ref.block;  // of `count` elements
    switch (ref.kind) {
      case BufferKind::kSource:
        if (entry_.is_ragged != 0) {
          row = IndexAt(slot.ragged, slot.ragged.input_offsets, ref.block);
        }
        return reinterpret_cast<uint64_t>(slot.source) + Offset(row, element, entry_.element_size);
      case BufferKind::kResult:
        if (entry_.is_ragged != 0) {
          const RaggedArrays& from = SlotOf(entry_, ref.block).ragged;
          row = IndexAt(from, from.output_offsets, ref.member);
        }
        return reinterpret_cast<uint64_t>(entry_.generation != 0 ? entry_.result : slot.result) +
               Offset(row, element, entry_.element_size);
      case BufferKind::kScratch:
        break;
    }
    return (reinterpret_cast<uint64_t>(slot.scratch) +
            Offset(row, element, entry_.accumulated_size)) |
           kAccumulated;
  }
  DFCCL_DEVICE uint64_t Offset(int64_t row, int64_t element, uint32_t size) const {
    return static_cast<uint64_t>(row * entry_.count + entry_.lane_begin + element) * size;
  }

  Daemon& daemon_;
  const SubmissionEntry& entry_;
  Block& block_;
};

}  // namespace gpu
}  // namespace dfccl

#endif  // DFCCL_CUDA_DAEMON_H_
