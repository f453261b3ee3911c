// SPDX-License-Identifier: Apache-2.0
#include "cuda/emulation.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "cuda/daemon.h"

namespace dfccl {
namespace gpu {
namespace {

// Where the threads of a block meet.
class Barrier {
 public:
  explicit Barrier(uint32_t threads) : threads_(threads) {}

  // What any thread brought.
  bool Meet(bool mine) {
    if (threads_ == 1) return mine;
    std::unique_lock<std::mutex> lock(mutex_);
    gathering_ |= mine;
    if (++arrived_ == threads_) {
      arrived_ = 0;
      result_ = gathering_;
      gathering_ = false;
      ++meeting_;
      changed_.notify_all();
      return result_;
    }
    const uint64_t meeting = meeting_;
    changed_.wait(lock, [&] { return meeting_ != meeting; });
    // The next meeting cannot end without this thread.
    return result_;
  }

 private:
  const uint32_t threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint32_t arrived_ = 0;
  uint64_t meeting_ = 0;
  bool gathering_ = false;
  bool result_ = false;
};

class ThreadGroup {
 public:
  ThreadGroup(uint32_t thread, uint32_t threads, Barrier* barrier)
      : thread_(thread), threads_(threads), barrier_(*barrier) {}
  uint32_t thread() const { return thread_; }
  uint32_t threads() const { return threads_; }
  bool leader() const { return thread_ == 0; }
  void Sync() { barrier_.Meet(false); }
  bool Any(bool mine) { return barrier_.Meet(mine); }
  void Pause() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
  static constexpr bool kCopiesInBulk = true;
  void CopyInBulk(Bulk* bulk, const char* from, const uint64_t* to, uint32_t count, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kBulkPieceBytes) {
      const auto size = static_cast<size_t>(std::min<int64_t>(kBulkPieceBytes, bytes - at));
      std::memcpy(bulk->pieces[0], from + at, size);
      for (uint32_t i = 0; i < count; ++i) {
        std::memcpy(BufferOf(to[i]) + at, bulk->pieces[0], size);
      }
    }
  }

 private:
  const uint32_t thread_;
  const uint32_t threads_;
  Barrier& barrier_;
};

void RunBlock(const DaemonArguments& arguments, uint32_t block, uint32_t threads) {
  auto shared = std::make_unique<Shared>();
  Barrier barrier(threads);
  const auto run = [&](uint32_t thread) {
    ThreadGroup group(thread, threads, &barrier);
    Daemon<ThreadGroup>(arguments, block, shared.get(), group).Run();
  };
  std::vector<std::thread> others;
  for (uint32_t thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
  run(0);
  for (std::thread& other : others) other.join();
}

}  // namespace

void WaitFor(EmulatedStream* stream, Atomic<uint64_t>* word, uint64_t value,
             std::shared_ptr<void> owner) {
  stream->Put([stream, word, value, owner = std::move(owner)] {
    // Acquire: partner is the release in Daemon::Finish.
    while (static_cast<int64_t>(word->LoadAcquire() - value) < 0 && !stream->stopping()) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
}

void RunDaemon(const DaemonArguments& arguments, uint32_t threads_of_a_block) {
  std::vector<std::thread> blocks;
  for (uint32_t block = 0; block < arguments.blocks; ++block) {
    blocks.emplace_back([&, block] { RunBlock(arguments, block, threads_of_a_block); });
  }
  for (std::thread& block : blocks) block.join();
}

EmulatedStream::EmulatedStream() : thread_([this] { Run(); }) {}

EmulatedStream::~EmulatedStream() {
  stopping_.StoreRelease(1);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    work_.clear();
    changed_.notify_all();
  }
  thread_.join();
}

void EmulatedStream::Put(std::function<void()> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  work_.push_back(std::move(work));
  changed_.notify_all();
}

void EmulatedStream::Synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return work_.empty() && !busy_; });
}

void EmulatedStream::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !work_.empty() || stopping(); });
    if (work_.empty()) return;
    const std::function<void()> work = std::move(work_.front());
    work_.pop_front();
    busy_ = true;
    lock.unlock();
    work();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

EmulatedGpu::Memory::~Memory() {
  for (void* block : blocks) std::free(block);
}

EmulatedGpu::~EmulatedGpu() {
  daemon_stream_.Synchronize();
  copy_stream_.Synchronize();
}

Status EmulatedGpu::Allocate(size_t bytes, void** memory) {
  constexpr size_t kAlign = 256;
  *memory = std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
  std::memset(*memory, 0, bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  memory_->blocks.push_back(*memory);
  return Status();
}

Status EmulatedGpu::Upload(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return Status();
}

Status EmulatedGpu::Clear(void* memory, size_t bytes) {
  std::memset(memory, 0, bytes);
  return Status();
}

Status EmulatedGpu::Download(Stream stream, void* to, const void* from, size_t bytes) {
  StreamOf(stream).Put([to, from, bytes] { std::memcpy(to, from, bytes); });
  StreamOf(stream).Synchronize();
  return Status();
}

Status EmulatedGpu::Launch(const DaemonArguments& arguments) {
  daemon_stream_.Put([arguments, this] { RunDaemon(arguments, threads_); });
  return Status();
}

Status EmulatedGpu::Write(Stream stream, Atomic<uint64_t>* word, uint64_t value) {
  // Release: partner is the acquire in Daemon::Movable.
  StreamOf(stream).Put([word, value, owner = memory_] { word->StoreRelease(value); });
  return Status();
}

Status EmulatedGpu::Wait(Stream stream, Atomic<uint64_t>* word, uint64_t value) {
  WaitFor(&StreamOf(stream), word, value, memory_);
  return Status();
}

Status EmulatedGpu::Copy(Stream stream, void* to, const void* from, size_t bytes) {
  StreamOf(stream).Put([to, from, bytes, owner = memory_] { std::memcpy(to, from, bytes); });
  return Status();
}

}  // namespace gpu
}  // namespace dfccl
