// SPDX-License-Identifier: Apache-2.0
#include "cuda/relay.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

namespace dfccl {
namespace gpu {
namespace {

// How long the thread sleeps while nothing becomes ready: the double each time.
constexpr std::chrono::microseconds kLeastPause(20);
constexpr std::chrono::microseconds kMostPause(1000);

}  // namespace

struct Relay::Part {
  enum class Phase { kAwaitsOperand, kSubmitting, kSubmitted, kFinished };

  Relay* relay;
  uint32_t operation;
  OperationWords* words;
  uint64_t sequence;
  Submission submission;
  std::string name;
  RaggedPart ragged;
  RaggedArrays arrays;

  Phase phase = Phase::kAwaitsOperand;
  Runtime* runtime = nullptr;
  Operation* submitted = nullptr;
  Status outcome;
  Status cancelled;         // while it was being submitted
  bool cancelling = false;  // somebody holds `submitted`, which must not be given back

  bool IsReady() const { return Reached(words->ready, sequence); }

  void ReadArrays() {
    const int members = submission.group->size();
    const std::pair<const void*, std::vector<int64_t>*> copies[] = {
        {arrays.input_offsets, &ragged.input_offsets},
        {arrays.send_sizes, &ragged.send_sizes},
        {arrays.output_offsets, &ragged.output_offsets},
        {arrays.recv_sizes, &ragged.recv_sizes}};
    for (const auto& [from, to] : copies) {
      for (int i = 0; i < members; ++i) {
        to->push_back(arrays.wide != 0 ? static_cast<const int64_t*>(from)[i]
                                       : static_cast<const int32_t*>(from)[i]);
      }
    }
    ragged.source_rows = arrays.source_rows;
    ragged.result_rows = arrays.result_rows;
    ragged.initial = arrays.initial;
  }
};

void Relay::Add(uint32_t operation, OperationWords* words, uint64_t sequence,
                const Submission& submission, const RaggedArrays* ragged) {
  auto part = std::make_shared<Part>();
  part->relay = this;
  part->operation = operation;
  part->words = words;
  part->sequence = sequence;
  part->submission = submission;
  part->name = submission.name;
  part->submission.name = part->name;
  part->submission.closed = true;  // Finish waits for nobody
  if (ragged != nullptr) {
    part->arrays = *ragged;
    part->submission.ragged = &part->ragged;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  parts_[sequence] = part;
  awaiting_.push_back(std::move(part));
  changed_.notify_all();
}

void Relay::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  std::chrono::microseconds pause = kLeastPause;
  while (!stopping_) {
    if (awaiting_.empty()) {
      changed_.wait(lock, [this] { return stopping_ || !awaiting_.empty(); });
      pause = kLeastPause;
      continue;
    }
    std::vector<std::shared_ptr<Part>> ready, unready;
    for (std::shared_ptr<Part>& part : awaiting_) {
      if (part->phase != Part::Phase::kAwaitsOperand) continue;  // cancelled
      (part->IsReady() ? ready : unready).push_back(std::move(part));
    }
    awaiting_ = std::move(unready);
    for (const auto& part : ready) Submit(part, /*linger=*/part == ready.back(), lock);
    pause = ready.empty() ? std::min(2 * pause, kMostPause) : kLeastPause;
    if (!stopping_ && ready.empty()) changed_.wait_for(lock, pause);
  }
}

void Relay::Submit(const std::shared_ptr<Part>& part, bool linger,
                   std::unique_lock<std::mutex>& lock) {
  if (part->phase != Part::Phase::kAwaitsOperand) return;
  part->phase = Part::Phase::kSubmitting;
  lock.unlock();
  if (part->submission.ragged != nullptr) part->ReadArrays();
  part->submission.linger = linger;
  part->runtime = &Runtime::Get();
  Operation* const submitted = part->runtime->Submit(part->submission);
  lock.lock();
  part->submitted = submitted;
  part->phase = Part::Phase::kSubmitted;
  const Status cancelled = part->cancelled;
  lock.unlock();
  const auto finish = [](void* argument) {
    Part* finished = static_cast<Part*>(argument);
    finished->relay->Finish(finished);
  };
  if (!part->runtime->OnFinish(submitted, finish, part.get(), /*blocks=*/true)) {
    Finish(part.get());
  }
  if (!cancelled.ok()) Cancel(part->sequence, cancelled);
  lock.lock();
}

// The runtime has finished it.
void Relay::Finish(Part* part) {
  std::lock_guard<std::mutex> lock(mutex_);
  part->runtime->Finished(part->submitted, &part->outcome);
  part->phase = Part::Phase::kFinished;
  if (!part->cancelling) EndPart(part, part->outcome);  // else who cancels it does
}

// With the lock held. The part may be gone afterwards.
void Relay::EndPart(Part* part, const Status& status) {
  if (part->submitted != nullptr) part->runtime->Release(part->submitted);
  ends_.push_back({part->operation, status});
  // Release: partner is the stream's wait. The result is there.
  part->words->done.StoreRelease(part->sequence);
  parts_.erase(part->sequence);
  if (parts_.empty()) changed_.notify_all();
}

bool Relay::Cancel(uint64_t sequence, const Status& status) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto entry = parts_.find(sequence);
  if (entry == parts_.end()) return false;
  const std::shared_ptr<Part> part = entry->second;
  switch (part->phase) {
    case Part::Phase::kAwaitsOperand:
      part->phase = Part::Phase::kFinished;
      EndPart(part.get(), status);
      return true;
    case Part::Phase::kSubmitting:
      part->cancelled = status;
      return true;
    case Part::Phase::kFinished:
      return false;
    case Part::Phase::kSubmitted:
      break;
  }
  if (part->cancelling) return true;
  part->cancelling = true;
  lock.unlock();
  const bool cancelled = part->runtime->Cancel(part->submitted, status);
  lock.lock();
  part->cancelling = false;
  if (part->phase == Part::Phase::kFinished) EndPart(part.get(), part->outcome);
  return cancelled;
}

bool Relay::IsSubmitted(uint64_t sequence) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = parts_.find(sequence);
  return entry == parts_.end() || entry->second->phase != Part::Phase::kAwaitsOperand;
}

std::vector<Relay::End> Relay::TakeEnds() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(ends_, {});
}

bool Relay::Stop(const Status& status, int64_t limit_ns) {
  std::vector<uint64_t> sequences;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  std::unique_lock<std::mutex> lock(mutex_);
  for (const auto& [sequence, part] : parts_) sequences.push_back(sequence);
  lock.unlock();
  for (uint64_t sequence : sequences) Cancel(sequence, status);
  lock.lock();
  return changed_.wait_for(lock, std::chrono::nanoseconds(limit_ns),
                           [this] { return parts_.empty(); });
}

}  // namespace gpu
}  // namespace dfccl
