// SPDX-License-Identifier: Apache-2.0
// What is to run on a GPU: the daemon on GPU 0, with several ranks there, through the
// driver. `gpu_check PART [DRIVER]`; a driver that is not the system's is a stand-in, which
// only shows that this program works. Needs no GoogleTest.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/driver.h"
#include "cuda/driver_api.h"
#include "cuda/service.h"
#include "tests/core/daemon/kind_values.h"

namespace dfccl {
namespace gpu {
namespace {

using dfccl::testing::Call;
using dfccl::testing::MakeCall;
using Clock = std::chrono::steady_clock;

[[noreturn]] void Fail(const std::string& why) {
  std::printf("FAILED: %s\n", why.c_str());
  std::fflush(stdout);
  std::_Exit(1);  // threads and streams may be stuck
}
void Check(const Status& status) {
  if (!status.ok()) Fail(status.message());
}
void Check(CuResult result, const char* what) {
  if (result != 0) Fail(std::string(what) + " ended with " + std::to_string(result));
}

// Ends the process when something hangs.
class Limit {
 public:
  explicit Limit(int seconds) {
    std::thread([seconds] {
      std::this_thread::sleep_for(std::chrono::seconds(seconds));
      Fail("no end within " + std::to_string(seconds) + " s");
    }).detach();
  }
};

constexpr int kRanks = 8;

class Machine {
 public:
  Machine(const std::string& driver, const ServiceOptions& options) {
    const bool stand_in = !driver.empty();
    DriverOptions driver_options;
    if (stand_in) driver_options = {driver, "a kernel"};
    Check(LoadDriver(driver_options.library, &api_));
    Status status;
    std::unique_ptr<Gpu> gpu = OpenGpu(driver_options, 0, &status);
    Check(status);
    memory_ = gpu.get();
    std::vector<std::unique_ptr<Gpu>> gpus;
    gpus.push_back(std::move(gpu));
    service_ = Service::Make(std::move(gpus), options, &status);
    Check(status);
    CuDevice device;
    CuContext context;
    Check(api_->DeviceGet(&device, 0), "cuDeviceGet");
    Check(api_->PrimaryContextRetain(&context, device), "cuDevicePrimaryCtxRetain");
    Check(api_->ContextPush(context), "cuCtxPushCurrent");
    for (CuStream& stream : streams_) {
      Check(api_->StreamCreate(&stream, kCuStreamNonBlocking, 0), "cuStreamCreate");
    }
    library_ = dlopen(driver_options.library.c_str(), RTLD_NOW);
    synchronize_ = Symbol<CuResult (*)()>("cuCtxSynchronize");
    Check(
        Symbol<CuResult (*)(char*, int, CuDevice)>("cuDeviceGetName")(name_, sizeof(name_), device),
        "cuDeviceGetName");
    Check(api_->DeviceGetAttribute(&multiprocessors_, kCuAttributeMultiprocessors, device),
          "cuDeviceGetAttribute");
    std::printf("%s\n", name_);
  }

  template <typename Function>
  Function Symbol(const char* name) {
    const auto found = reinterpret_cast<Function>(dlsym(library_, name));
    if (found == nullptr) Fail(std::string("the driver has no ") + name);
    return found;
  }
  const char* name() const { return name_; }
  int multiprocessors() const { return multiprocessors_; }

  Service& service() { return *service_; }
  const DriverApi& api() { return *api_; }
  CuStream stream(int64_t rank) { return streams_[rank]; }
  void Synchronize() {
    for (CuStream stream : streams_) Check(api_->StreamSynchronize(stream), "cuStreamSynchronize");
  }
  // Of the whole GPU.
  void SynchronizeDevice() { Check(synchronize_(), "cuCtxSynchronize"); }

  // Device memory, and host memory to read it by; kept for the next call of that size.
  void* Device(size_t bytes) { return Take(&Gpu::Allocate, &device_, bytes); }
  void* Host(size_t bytes) { return Take(&Gpu::AllocateMapped, &host_, bytes); }
  void GiveAllBack() {
    for (auto* pool : {&device_, &host_}) {
      for (auto& [size, block] : *pool) block.used = 0;
    }
  }

 private:
  struct Blocks {
    std::vector<void*> memory;
    size_t used = 0;
  };
  using Pool = std::unordered_map<size_t, Blocks>;
  void* Take(Status (Gpu::*allocate)(size_t, void**), Pool* pool, size_t bytes) {
    size_t size = 256;
    while (size < bytes) size *= 2;
    Blocks& blocks = (*pool)[size];
    if (blocks.used == blocks.memory.size()) {
      void* memory;
      Check((memory_->*allocate)(size, &memory));
      blocks.memory.push_back(memory);
    }
    return blocks.memory[blocks.used++];
  }

  const DriverApi* api_ = nullptr;
  Gpu* memory_ = nullptr;
  std::unique_ptr<Service> service_;
  CuStream streams_[kRanks] = {};
  void* library_ = nullptr;
  CuResult (*synchronize_)() = nullptr;
  char name_[256] = {};
  int multiprocessors_ = 0;
  Pool device_, host_;
};

class Part {
 public:
  Part(Machine* machine, const Call& call, int member)
      : machine_(*machine),
        call_(call),
        member_(member),
        source_bytes_(call.SourceElements() * DTypeSize(call.signature.dtype)),
        result_bytes_(call.ResultElements() * DTypeSize(call.signature.dtype)),
        host_source_(static_cast<char*>(machine->Host(source_bytes_))),
        host_result_(static_cast<char*>(machine->Host(result_bytes_))),
        source_(machine->Device(source_bytes_)),
        result_(machine->Device(result_bytes_)) {
    call.FillSource(member, host_source_);
    std::memset(host_result_, 0x5a, result_bytes_);
  }

  void Start() {
    Copy(source_, host_source_, source_bytes_);
    Submission submission = call_.MakeSubmission(member_, source_, result_);
    submission.priority = priority;
    Check(machine_.service().Start(0, stream(), submission, nullptr, &ticket_));
  }
  void Finish() {
    Check(machine_.service().Finish(stream(), ticket_, result_));
    Copy(host_result_, result_, result_bytes_);
  }
  void CheckValues() {
    const int64_t wrong = call_.FirstWrong(member_, host_result_);
    if (wrong >= 0) Fail(call_.Text(member_) + ": element " + std::to_string(wrong) + " is wrong");
  }
  int64_t device() const { return call_.group->members[member_]; }
  int priority = 0;

 private:
  CuStream stream() { return machine_.stream(device()); }
  void Copy(void* to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    Check(machine_.api().Copy(reinterpret_cast<CuAddress>(to), reinterpret_cast<CuAddress>(from),
                              bytes, stream()),
          "cuMemcpyAsync");
  }

  Machine& machine_;
  const Call call_;
  const int member_;
  const size_t source_bytes_, result_bytes_;
  char* const host_source_;
  char* const host_result_;
  void* const source_;
  void* const result_;
  uint64_t ticket_ = 0;
};
using Parts = std::vector<std::unique_ptr<Part>>;

std::vector<int64_t> Devices(int count) {
  std::vector<int64_t> devices;
  for (int i = 0; i < count; ++i) devices.push_back(i);
  return devices;
}

ServiceOptions WithoutLowLatency() {
  ServiceOptions options;
  options.low_latency_bytes = 0;
  return options;
}

void Conformance(const std::string& driver, const ServiceOptions& options,
                 const std::vector<int64_t>& counts) {
  Machine machine(driver, options);
  std::mt19937 random(1);
  int done = 0;
  for (int k = 0; k < kKindCount; ++k) {
    if (static_cast<Kind>(k) == Kind::kRaggedAllToAll) continue;
    for (int members : {1, 2, 3, 8}) {
      for (int64_t count : counts) {
        const Call call = MakeCall(static_cast<Kind>(k), Devices(members), count, &random);
        Parts parts;
        for (int m = 0; m < members; ++m) {
          parts.push_back(std::make_unique<Part>(&machine, call, m));
        }
        std::shuffle(parts.begin(), parts.end(), random);
        for (auto& part : parts) {
          part->Start();
          part->Finish();
        }
        machine.Synchronize();
        for (auto& part : parts) part->CheckValues();
        machine.GiveAllBack();
        ++done;
      }
    }
  }
  std::printf("%d collectives, all values right; %llu parts by low latency\n", done,
              static_cast<unsigned long long>(machine.service().Counters().posted));
}

void Disorder(const std::string& driver, int rounds) {
  Machine machine(driver, ServiceOptions());
  std::mt19937 random(2);
  constexpr int kCollectives = 50;
  for (int round = 0; round < rounds; ++round) {
    std::vector<Parts> parts(kRanks);
    for (int i = 0; i < kCollectives; ++i) {
      std::vector<int64_t> devices = Devices(kRanks);
      std::shuffle(devices.begin(), devices.end(), random);
      devices.resize(1 + random() % kRanks);
      const auto kind = static_cast<Kind>(random() % static_cast<int>(Kind::kRaggedAllToAll));
      const Call call = MakeCall(kind, devices, 1 + static_cast<int64_t>(random() % 500), &random);
      const int priority = static_cast<int>(random() % 3);
      for (int m = 0; m < call.members(); ++m) {
        parts[devices[m]].push_back(std::make_unique<Part>(&machine, call, m));
        parts[devices[m]].back()->priority = priority;
      }
    }
    for (Parts& of_rank : parts) std::shuffle(of_rank.begin(), of_rank.end(), random);
    for (Parts& of_rank : parts) {
      for (auto& part : of_rank) part->Start();
    }
    for (Parts& of_rank : parts) {
      std::shuffle(of_rank.begin(), of_rank.end(), random);
      for (auto& part : of_rank) part->Finish();
    }
    machine.Synchronize();
    for (Parts& of_rank : parts) {
      for (auto& part : of_rank) part->CheckValues();
    }
    machine.GiveAllBack();
  }
  const ServiceCounters counters = machine.service().Counters();
  std::printf("%llu parts of collectives, %llu preemptions, %llu launches\n",
              static_cast<unsigned long long>(counters.submitted),
              static_cast<unsigned long long>(counters.preemptions),
              static_cast<unsigned long long>(counters.launches));
  if (counters.preemptions == 0) Fail("no preemption was needed");
}

// While a collective lacks a member, the GPU can be waited for and memory allocated.
void Quit(const std::string& driver) {
  Machine machine(driver, ServiceOptions());
  std::mt19937 random(3);
  double longest = 0;
  for (int round = 0; round < 20; ++round) {
    const Call call = MakeCall(Kind::kAllReduce, Devices(2), 1000, &random);
    Part first(&machine, call, 0), second(&machine, call, 1);
    first.Start();
    const auto begin = Clock::now();
    machine.SynchronizeDevice();
    CuAddress memory;
    Check(machine.api().MemoryAllocate(&memory, 1 << 20), "cuMemAlloc");
    Check(machine.api().MemoryFree(memory), "cuMemFree");
    longest = std::max(longest, std::chrono::duration<double>(Clock::now() - begin).count());
    first.Finish();
    second.Start();
    second.Finish();
    machine.Synchronize();
    first.CheckValues();
    second.CheckValues();
    machine.GiveAllBack();
  }
  const ServiceCounters counters = machine.service().Counters();
  std::printf("synchronization and allocation took %.2f ms at most; %llu launches, %llu quits\n",
              1e3 * longest, static_cast<unsigned long long>(counters.launches),
              static_cast<unsigned long long>(counters.quits));
  if (counters.launches < 2 || counters.quits == 0) Fail("the daemon has never left");
  if (longest > 1) Fail("that is longer than a second");
}

// Takes a multiprocessor for as many nanoseconds as its argument says.
constexpr char kHog[] = R"(
.version 7.0
.target sm_80
.address_size 64
.visible .entry hog(.param .u64 nanoseconds)
{
  .reg .u64 %begin, %now, %limit;
  .reg .pred %again;
  ld.param.u64 %limit, [nanoseconds];
  mov.u64 %begin, %globaltimer;
turn:
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %begin;
  setp.lt.u64 %again, %now, %limit;
  @%again bra turn;
  ret;
}
)";

// A kernel of others takes the whole GPU while members come and while they are awaited.
void Hog(const std::string& driver) {
  Machine machine(driver, ServiceOptions());
  const DriverApi& api = machine.api();
  CuModule module;
  CuFunction hog;
  CuStream stream;
  Check(api.ModuleLoadData(&module, kHog), "cuModuleLoadData");
  Check(api.ModuleGetFunction(&hog, module, "hog"), "cuModuleGetFunction");
  Check(api.StreamCreate(&stream, kCuStreamNonBlocking, 0), "cuStreamCreate");
  uint64_t nanoseconds = 20'000'000;
  void* arguments[] = {&nanoseconds};
  const auto take_all = [&] {
    // Two blocks of 1024 threads fill a multiprocessor.
    Check(api.LaunchKernel(hog, 2 * machine.multiprocessors(), 1, 1, 1024, 1, 1, 0, stream,
                           arguments, nullptr),
          "cuLaunchKernel");
  };
  std::mt19937 random(5);
  for (int round = 0; round < 10; ++round) {
    const Call call = MakeCall(Kind::kAllReduce, Devices(4), 5000, &random);
    Parts parts;
    for (int m = 0; m < 4; ++m) parts.push_back(std::make_unique<Part>(&machine, call, m));
    if (round % 2 == 0) take_all();
    for (int m = 0; m < 3; ++m) parts[m]->Start();
    if (round % 2 == 1) {
      take_all();
      Check(api.StreamSynchronize(stream), "cuStreamSynchronize");  // though one is missing
    }
    parts[3]->Start();
    for (auto& part : parts) part->Finish();
    machine.Synchronize();
    for (auto& part : parts) part->CheckValues();
    machine.GiveAllBack();
  }
  Check(api.StreamSynchronize(stream), "cuStreamSynchronize");
  Check(api.StreamDestroy(stream), "cuStreamDestroy");
  std::printf("collectives and a kernel on all %d multiprocessors got by each other\n",
              machine.multiprocessors());
}

// Of collectives of f32 by two ranks, back to back, without copies in and out.
double SecondsOfOne(Machine* machine, Kind kind, int64_t count, int repetitions) {
  std::mt19937 random(6);
  Call call = MakeCall(kind, Devices(2), count, &random);
  call.signature.dtype = DType::kF32;
  call.signature.op = ReduceOp::kSum;
  const size_t bytes = static_cast<size_t>(count) * sizeof(float);
  void* const sources[] = {machine->Device(bytes), machine->Device(bytes)};
  const auto result_bytes = bytes * static_cast<size_t>(ResultBlocks(kind, 2));
  void* const results[] = {machine->Device(result_bytes), machine->Device(result_bytes)};
  std::vector<double> seconds;
  for (int round = 0; round < 6; ++round) {
    machine->Synchronize();
    const auto begin = Clock::now();
    for (int i = 0; i < repetitions; ++i) {
      ++call.number;
      for (int m = 0; m < 2; ++m) {
        const Submission submission = call.MakeSubmission(m, sources[m], results[m]);
        uint64_t ticket;
        Check(machine->service().Start(0, machine->stream(m), submission, nullptr, &ticket));
        Check(machine->service().Finish(machine->stream(m), ticket, results[m]));
      }
    }
    machine->Synchronize();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count() / repetitions);
  }
  machine->GiveAllBack();
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

double SecondsOfACopy(Machine* machine, size_t bytes) {
  void* const from = machine->Device(bytes);
  void* const to = machine->Device(bytes);
  std::vector<double> seconds;
  for (int round = 0; round < 6; ++round) {
    machine->Synchronize();
    const auto begin = Clock::now();
    Check(machine->api().Copy(reinterpret_cast<CuAddress>(to), reinterpret_cast<CuAddress>(from),
                              bytes, machine->stream(0)),
          "cuMemcpyAsync");
    machine->Synchronize();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
  }
  machine->GiveAllBack();
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

// The bars of the project for one GPU; for an emulated one only that they can be measured.
void Bars(const std::string& driver, int64_t count, int repetitions) {
  double small_without = 0;
  {
    Machine machine(driver, WithoutLowLatency());
    small_without = SecondsOfOne(&machine, Kind::kAllReduce, 2, repetitions);
  }
  double gather_in_bulk = 0;
  {
    ServiceOptions options;
    options.bulk = true;
    Machine machine(driver, options);
    gather_in_bulk = SecondsOfOne(&machine, Kind::kAllGather, count, 5);
    if (machine.service().Counters().bulk_copies == 0) std::printf("no copies in bulk here\n");
  }
  Machine machine(driver, ServiceOptions());
  const double small = SecondsOfOne(&machine, Kind::kAllReduce, 2, repetitions);
  const double large = SecondsOfOne(&machine, Kind::kAllReduce, count, 5);
  const double gather = SecondsOfOne(&machine, Kind::kAllGather, count, 5);
  const auto bytes = static_cast<size_t>(count) * sizeof(float);
  // Two ranks read and write as much as two copies do.
  const double share = 2 * SecondsOfACopy(&machine, bytes) / large;
  const bool fast = small < 6e-6, wide = share >= 0.8;
  std::printf(
      "{\"device\": \"%s\", \"all_reduce_8_bytes_us\": %.2f, "
      "\"all_reduce_8_bytes_without_low_latency_us\": %.2f, \"all_reduce_bytes\": %zu, "
      "\"all_reduce_us\": %.1f, \"share_of_copy_bandwidth\": %.3f, \"all_gather_us\": %.1f, "
      "\"all_gather_in_bulk_us\": %.1f}\n",
      machine.name(), 1e6 * small, 1e6 * small_without, bytes, 1e6 * large, share, 1e6 * gather,
      1e6 * gather_in_bulk);
  if (driver.empty() && (!fast || !wide)) {
    Fail(std::string("missed:") + (fast ? "" : " under 6 us for 8 bytes") +
         (wide ? "" : " 80 % of the copy bandwidth"));
  }
}

// Times, for people; only values can fail.
void Speed(const std::string& driver, const std::vector<int64_t>& counts) {
  Machine machine(driver, ServiceOptions());
  std::mt19937 random(4);
  for (int members : {2, 8}) {
    for (int64_t count : counts) {
      std::vector<double> microseconds;
      for (int round = 0; round < 20; ++round) {
        Call call = MakeCall(Kind::kAllReduce, Devices(members), count, &random);
        call.signature.dtype = DType::kF32;
        call.signature.op = ReduceOp::kSum;
        Parts parts;
        for (int m = 0; m < members; ++m) {
          parts.push_back(std::make_unique<Part>(&machine, call, m));
        }
        machine.Synchronize();
        const auto begin = Clock::now();
        for (auto& part : parts) part->Start();
        for (auto& part : parts) part->Finish();
        machine.Synchronize();
        microseconds.push_back(
            std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
        if (round == 0) {
          for (auto& part : parts) part->CheckValues();
        }
        machine.GiveAllBack();
      }
      std::sort(microseconds.begin(), microseconds.end());
      std::printf(
          "all_reduce of %lld f32 by %d ranks on one GPU, with copies in and out: "
          "median %.1f us\n",
          static_cast<long long>(count), members, microseconds[microseconds.size() / 2]);
    }
  }
}

int Run(const std::string& part, const std::string& driver) {
  const Limit limit(300);
  if (part == "conformance") {
    Conformance(driver, ServiceOptions(), {0, 1, 7, 1000, 100'003});
    Conformance(driver, WithoutLowLatency(), {0, 1, 7, 1000});
  } else if (part == "conformance-small") {
    Conformance(driver, ServiceOptions(), {1, 1003});
    Conformance(driver, WithoutLowLatency(), {1});
  } else if (part == "disorder") {
    Disorder(driver, 450);  // about 10^5 parts
  } else if (part == "disorder-small") {
    Disorder(driver, 4);
  } else if (part == "quit") {
    Quit(driver);
  } else if (part == "hog") {
    Hog(driver);
  } else if (part == "bars") {
    Bars(driver, 16'777'216, 200);
  } else if (part == "bars-small") {
    Bars(driver, 4096, 20);
  } else if (part == "speed") {
    Speed(driver, {2, 1024, 262'144, 4'194'304});
  } else if (part == "speed-small") {
    Speed(driver, {2, 1024});
  } else {
    std::printf("there is no part '%s'\n", part.c_str());
    return 2;
  }
  std::fflush(stdout);
  return 0;
}

}  // namespace
}  // namespace gpu
}  // namespace dfccl

int main(int argc, char** argv) {
  return dfccl::gpu::Run(argc > 1 ? argv[1] : "", argc > 2 ? argv[2] : "");
}
