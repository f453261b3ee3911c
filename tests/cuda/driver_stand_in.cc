// SPDX-License-Identifier: Apache-2.0
// A stand-in for libcuda.so.1 with the functions that cuda/driver.cc uses, over the
// emulation: two GPUs whose contexts must be current, whose addresses must have been
// allocated, and whose streams are EmulatedStreams. What a driver would refuse is refused.
// A kernel "hog" takes all multiprocessors for as long as its argument says: a daemon
// runs before it or after it. Waiting for a GPU and freeing memory wait for all streams.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda/driver_api.h"
#include "cuda/emulation.h"
#include "cuda/kernel.h"

namespace dfccl {
namespace gpu {

struct CuContextOpaque {
  int device;
};
struct CuStreamOpaque {};
struct CuModuleOpaque {};
struct CuFunctionOpaque {};

namespace {

constexpr CuResult kInvalid = 1;
constexpr CuResult kNotInitialized = 3;
constexpr CuResult kNotFound = 500;
constexpr int kDevices = 2;

CuContextOpaque contexts[kDevices] = {{0}, {1}};
CuModuleOpaque module_loaded;
CuFunctionOpaque daemon_function;
CuFunctionOpaque hog_function;
std::mutex multiprocessors[kDevices];  // held by a hog, and by daemons, which keep hogs waiting
bool initialized = false;
bool peers = false;
std::mutex mutex;
std::map<CuAddress, size_t> allocated;
std::vector<EmulatedStream*> streams;  // that exist
thread_local std::vector<CuContext> current;

bool Known(CuAddress address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  auto after = allocated.upper_bound(address);
  if (after == allocated.begin()) return false;
  --after;
  return address + bytes <= after->first + after->second;
}

EmulatedStream& Of(CuStream stream) { return *reinterpret_cast<EmulatedStream*>(stream); }

CuAddress Remember(void* memory, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto address = reinterpret_cast<CuAddress>(memory);
  allocated[address] = bytes;
  std::memset(memory, 0x6b, bytes);  // a driver clears nothing
  return address;
}

CuResult Forget(CuAddress address) {
  std::lock_guard<std::mutex> lock(mutex);
  if (allocated.erase(address) == 0) return kInvalid;
  std::free(reinterpret_cast<void*>(address));
  return 0;
}

void WaitForAllStreams() {
  std::vector<EmulatedStream*> waited;
  {
    std::lock_guard<std::mutex> lock(mutex);
    waited = streams;
  }
  for (EmulatedStream* stream : waited) stream->Synchronize();
}

CuResult Put(CuStream stream, std::function<void()> work) {
  if (current.empty() || stream == nullptr) return kInvalid;
  Of(stream).Put(std::move(work));
  return 0;
}

}  // namespace
}  // namespace gpu
}  // namespace dfccl

using namespace dfccl::gpu;
using dfccl::Atomic;
#define DFCCL_EXPORT extern "C" __attribute__((visibility("default")))

DFCCL_EXPORT CuResult cuInit(unsigned) {
  initialized = true;
  return 0;
}
DFCCL_EXPORT CuResult cuGetErrorName(CuResult result, const char** name) {
  *name = result == kInvalid ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_OTHER";
  return 0;
}
DFCCL_EXPORT CuResult cuGetErrorString(CuResult, const char** text) {
  *text = "said by the stand-in";
  return 0;
}
DFCCL_EXPORT CuResult cuDeviceGetCount(int* count) {
  *count = kDevices;
  return initialized ? 0 : kNotInitialized;
}
DFCCL_EXPORT CuResult cuDeviceGet(CuDevice* device, int ordinal) {
  *device = ordinal;
  return ordinal < kDevices ? 0 : kInvalid;
}
DFCCL_EXPORT CuResult cuDeviceGetName(char* name, int bytes, CuDevice) {
  std::strncpy(name, "stand-in", bytes);
  return 0;
}
DFCCL_EXPORT CuResult cuDeviceGetAttribute(int* value, int attribute, CuDevice) {
  *value = attribute == kCuAttributeComputeMajor ? 9 : 1;
  return 0;
}
DFCCL_EXPORT CuResult cuDeviceGetP2PAttribute(int* value, int, CuDevice from, CuDevice to) {
  *value = from != to ? 1 : 0;
  return 0;
}
DFCCL_EXPORT CuResult cuDevicePrimaryCtxRetain(CuContext* context, CuDevice device) {
  *context = &contexts[device];
  return 0;
}
DFCCL_EXPORT CuResult cuDevicePrimaryCtxRelease_v2(CuDevice) { return 0; }
DFCCL_EXPORT CuResult cuCtxPushCurrent_v2(CuContext context) {
  current.push_back(context);
  return 0;
}
DFCCL_EXPORT CuResult cuCtxPopCurrent_v2(CuContext* context) {
  if (current.empty()) return kInvalid;
  *context = current.back();
  current.pop_back();
  return 0;
}
DFCCL_EXPORT CuResult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}
DFCCL_EXPORT CuResult cuCtxEnablePeerAccess(CuContext, unsigned flags) {
  if (flags != 0) return kInvalid;
  std::lock_guard<std::mutex> lock(mutex);
  if (peers) return kCuPeerAccessAlreadyEnabled;
  peers = true;
  return 0;
}
DFCCL_EXPORT CuResult cuCtxSynchronize() {
  if (current.empty()) return kInvalid;
  WaitForAllStreams();
  return 0;
}
DFCCL_EXPORT CuResult cuModuleLoadData(CuModule* module, const void* image) {
  *module = &module_loaded;
  return image != nullptr && !current.empty() ? 0 : kInvalid;
}
DFCCL_EXPORT CuResult cuModuleUnload(CuModule) { return 0; }
DFCCL_EXPORT CuResult cuModuleGetFunction(CuFunction* function, CuModule, const char* name) {
  const bool is_hog = std::strcmp(name, "hog") == 0;
  *function = is_hog ? &hog_function : &daemon_function;
  return is_hog || std::strcmp(name, kKernelName) == 0 ? 0 : kNotFound;
}
DFCCL_EXPORT CuResult cuLaunchKernel(CuFunction function, unsigned grid_x, unsigned grid_y,
                                     unsigned grid_z, unsigned block_x, unsigned block_y,
                                     unsigned block_z, unsigned shared_bytes, CuStream stream,
                                     void** arguments, void** extra) {
  if (current.empty()) return kInvalid;
  if (function == &hog_function) {
    const std::chrono::nanoseconds time(*static_cast<const uint64_t*>(arguments[0]));
    return Put(stream, [time, device = current.back()->device] {
      std::lock_guard<std::mutex> lock(multiprocessors[device]);
      std::this_thread::sleep_for(time);
    });
  }
  const auto daemon = *static_cast<const DaemonArguments*>(arguments[0]);
  if (function != &daemon_function || grid_x != daemon.blocks || grid_y * grid_z != 1 ||
      block_x != kThreads || block_y * block_z != 1 || shared_bytes != 0 || extra != nullptr) {
    return kInvalid;
  }
  return Put(stream, [daemon, device = current.back()->device] {
    std::lock_guard<std::mutex> lock(multiprocessors[device]);
    RunDaemon(daemon, 1);
  });
}
DFCCL_EXPORT CuResult cuStreamCreateWithPriority(CuStream* stream, unsigned flags, int priority) {
  if (flags != kCuStreamNonBlocking || (priority != 0 && priority != -5) || current.empty())
    return kInvalid;
  auto* const made = new EmulatedStream;
  std::lock_guard<std::mutex> lock(mutex);
  streams.push_back(made);
  *stream = reinterpret_cast<CuStream>(made);
  return 0;
}
DFCCL_EXPORT CuResult cuStreamDestroy_v2(CuStream stream) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    streams.erase(std::find(streams.begin(), streams.end(), &Of(stream)));
  }
  delete &Of(stream);
  return 0;
}
DFCCL_EXPORT CuResult cuStreamSynchronize(CuStream stream) {
  Of(stream).Synchronize();
  return 0;
}
DFCCL_EXPORT CuResult cuStreamWriteValue64_v2(CuStream stream, CuAddress address, uint64_t value,
                                              unsigned flags) {
  if (!Known(address, sizeof(uint64_t)) || flags != kCuWriteValueDefault) return kInvalid;
  auto* word = reinterpret_cast<Atomic<uint64_t>*>(address);
  return Put(stream, [=] { word->StoreRelease(value); });
}
DFCCL_EXPORT CuResult cuStreamWaitValue64_v2(CuStream stream, CuAddress address, uint64_t value,
                                             unsigned flags) {
  if (!Known(address, sizeof(uint64_t)) || flags != kCuWaitValueGeq) return kInvalid;
  if (current.empty() || stream == nullptr) return kInvalid;
  WaitFor(&Of(stream), reinterpret_cast<Atomic<uint64_t>*>(address), value, nullptr);
  return 0;
}
DFCCL_EXPORT CuResult cuMemAlloc_v2(CuAddress* address, size_t bytes) {
  if (current.empty() || bytes == 0) return kInvalid;
  *address = Remember(std::aligned_alloc(256, (bytes + 255) / 256 * 256), bytes);
  return 0;
}
DFCCL_EXPORT CuResult cuMemFree_v2(CuAddress address) {
  WaitForAllStreams();
  return Forget(address);
}
DFCCL_EXPORT CuResult cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  if (flags != (kCuHostAllocPortable | kCuHostAllocDeviceMap)) return kInvalid;
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  Remember(*memory, bytes);
  return 0;
}
DFCCL_EXPORT CuResult cuMemFreeHost(void* memory) {
  return Forget(reinterpret_cast<CuAddress>(memory));
}
DFCCL_EXPORT CuResult cuMemHostGetDevicePointer_v2(CuAddress* address, void* memory, unsigned) {
  *address = reinterpret_cast<CuAddress>(memory);
  return Known(*address, 1) ? 0 : kInvalid;
}
DFCCL_EXPORT CuResult cuMemcpyHtoDAsync_v2(CuAddress to, const void* from, size_t bytes,
                                           CuStream stream) {
  if (!Known(to, bytes)) return kInvalid;
  return Put(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); });
}
// From and to the program's buffers, which the tests have not allocated here.
DFCCL_EXPORT CuResult cuMemcpyDtoHAsync_v2(void* to, CuAddress from, size_t bytes,
                                           CuStream stream) {
  return Put(stream, [=] { std::memcpy(to, reinterpret_cast<const void*>(from), bytes); });
}
DFCCL_EXPORT CuResult cuMemcpyAsync(CuAddress to, CuAddress from, size_t bytes, CuStream stream) {
  if (!Known(to, bytes) && !Known(from, bytes)) return kInvalid;
  return Put(stream, [=] {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  });
}
DFCCL_EXPORT CuResult cuMemsetD8Async(CuAddress to, unsigned char value, size_t bytes,
                                      CuStream stream) {
  if (!Known(to, bytes)) return kInvalid;
  return Put(stream, [=] { std::memset(reinterpret_cast<void*>(to), value, bytes); });
}
