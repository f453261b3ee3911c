// SPDX-License-Identifier: Apache-2.0
#include "cuda/driver.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/driver_api.h"
#include "cuda/kernel.h"

namespace dfccl {
namespace gpu {
namespace {

Status Missing(const std::string& what) { return Status(StatusCode::kInternal, "CUDA: " + what); }

class DriverGpu : public Gpu {
 public:
  DriverGpu(const DriverApi& api, int ordinal) : api_(api), ordinal_(ordinal) {}

  ~DriverGpu() override {
    if (context_ == nullptr) return;
    {
      const Current current(this);
      if (daemon_stream_ != nullptr) {
        api_.StreamSynchronize(daemon_stream_);  // the service has seen it leave
        api_.StreamDestroy(daemon_stream_);
      }
      if (copy_stream_ != nullptr) api_.StreamDestroy(copy_stream_);
      for (CuAddress address : device_memory_) api_.MemoryFree(address);
      for (void* memory : host_memory_) api_.HostFree(memory);
      if (module_ != nullptr) api_.ModuleUnload(module_);
    }
    api_.PrimaryContextRelease(device_);
  }

  Status Open(const void* image) {
    Status status = Check(api_.Init(0), "cuInit");
    int count = 0;
    if (status.ok()) status = Check(api_.DeviceGetCount(&count), "cuDeviceGetCount");
    if (status.ok() && ordinal_ >= count) {
      return Missing("there is no GPU " + std::to_string(ordinal_) + "; the driver knows " +
                     std::to_string(count));
    }
    if (status.ok()) status = Check(api_.DeviceGet(&device_, ordinal_), "cuDeviceGet");
    int major = 0, stream_operations = 0;
    if (status.ok()) status = Attribute(kCuAttributeComputeMajor, &major);
    if (status.ok()) status = Attribute(kCuAttributeStreamWaitValue64, &stream_operations);
    if (!status.ok()) return status;
    if (major < 8) return Missing("GPUs before compute capability 8.0 are not supported");
    if (stream_operations == 0) {
      return Missing("the GPU or its driver has no 64-bit stream memory operations");
    }
    status = Check(api_.PrimaryContextRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
    if (!status.ok()) return status;
    const Current current(this);
    int least = 0, greatest = 0;
    status = Check(api_.ContextGetPriorities(&least, &greatest), "cuCtxGetStreamPriorityRange");
    if (status.ok()) {
      status = Check(api_.StreamCreate(&daemon_stream_, kCuStreamNonBlocking, greatest),
                     "cuStreamCreateWithPriority");
    }
    if (status.ok()) {
      status = Check(api_.StreamCreate(&copy_stream_, kCuStreamNonBlocking, greatest),
                     "cuStreamCreateWithPriority");
    }
    if (status.ok()) status = Check(api_.ModuleLoadData(&module_, image), "cuModuleLoadData");
    if (status.ok()) {
      status =
          Check(api_.ModuleGetFunction(&function_, module_, kKernelName), "cuModuleGetFunction");
    }
    return status;
  }

  Status Allocate(size_t bytes, void** memory) override {
    const Current current(this);
    CuAddress address;
    Status status = Check(api_.MemoryAllocate(&address, bytes), "cuMemAlloc");
    if (!status.ok()) return status;
    std::lock_guard<std::mutex> lock(mutex_);
    device_memory_.push_back(address);
    *memory = reinterpret_cast<void*>(address);
    return Zero(address, bytes);
  }

  Status AllocateMapped(size_t bytes, void** memory) override {
    const Current current(this);
    Status status =
        Check(api_.HostAllocate(memory, bytes, kCuHostAllocPortable | kCuHostAllocDeviceMap),
              "cuMemHostAlloc");
    if (!status.ok()) return status;
    std::lock_guard<std::mutex> lock(mutex_);
    host_memory_.push_back(*memory);
    CuAddress there;
    status = Check(api_.HostGetDeviceAddress(&there, *memory, 0), "cuMemHostGetDevicePointer");
    if (!status.ok()) return status;
    if (reinterpret_cast<void*>(there) != *memory) {
      return Missing("host memory has another address on the GPU, which is not supported");
    }
    __builtin_memset(*memory, 0, bytes);
    return Status();
  }

  Status Upload(void* to, const void* from, size_t bytes) override {
    if (bytes == 0) return Status();
    const Current current(this);
    Status status =
        Check(api_.CopyToDevice(reinterpret_cast<CuAddress>(to), from, bytes, copy_stream_),
              "cuMemcpyHtoDAsync");
    return status.ok() ? Check(api_.StreamSynchronize(copy_stream_), "cuStreamSynchronize")
                       : status;
  }

  Status Download(Stream stream, void* to, const void* from, size_t bytes) override {
    const Current current(this);
    auto* const there = static_cast<CuStream>(stream);
    Status status = Check(api_.CopyToHost(to, reinterpret_cast<CuAddress>(from), bytes, there),
                          "cuMemcpyDtoHAsync");
    return status.ok() ? Check(api_.StreamSynchronize(there), "cuStreamSynchronize") : status;
  }

  Status Clear(void* memory, size_t bytes) override {
    const Current current(this);
    return Zero(reinterpret_cast<CuAddress>(memory), bytes);
  }

  Status Launch(const DaemonArguments& arguments) override {
    const Current current(this);
    DaemonArguments copy = arguments;
    void* parameters[] = {&copy};
    return Check(api_.LaunchKernel(function_, arguments.blocks, 1, 1, kThreads, 1, 1, 0,
                                   daemon_stream_, parameters, nullptr),
                 "cuLaunchKernel");
  }

  Status Write(Stream stream, Atomic<uint64_t>* word, uint64_t value) override {
    const Current current(this);
    return Check(
        api_.StreamWriteValue(static_cast<CuStream>(stream), reinterpret_cast<CuAddress>(word),
                              value, kCuWriteValueDefault),
        "cuStreamWriteValue64");
  }

  Status Wait(Stream stream, Atomic<uint64_t>* word, uint64_t value) override {
    const Current current(this);
    return Check(api_.StreamWaitValue(static_cast<CuStream>(stream),
                                      reinterpret_cast<CuAddress>(word), value, kCuWaitValueGeq),
                 "cuStreamWaitValue64");
  }

  Status Copy(Stream stream, void* to, const void* from, size_t bytes) override {
    const Current current(this);
    return Check(api_.Copy(reinterpret_cast<CuAddress>(to), reinterpret_cast<CuAddress>(from),
                           bytes, static_cast<CuStream>(stream)),
                 "cuMemcpyAsync");
  }

  Stream CopyStream() override { return copy_stream_; }

  Status Reach(Gpu* other) override {
    const DriverGpu& peer = *static_cast<DriverGpu*>(other);
    for (int attribute : {kCuP2pAttributeAccess, kCuP2pAttributeNativeAtomics}) {
      int has = 0;
      const Status status =
          Check(api_.DeviceGetP2pAttribute(&has, attribute, device_, peer.device_),
                "cuDeviceGetP2PAttribute");
      if (!status.ok()) return status;
      if (has == 0) {
        return Missing("GPU " + std::to_string(ordinal_) + " has no " +
                       (attribute == kCuP2pAttributeAccess ? "access to" : "atomics in") +
                       " the memory of GPU " + std::to_string(peer.ordinal_));
      }
    }
    const Current current(this);
    const CuResult result = api_.ContextEnablePeerAccess(peer.context_, 0);
    if (result == kCuPeerAccessAlreadyEnabled) return Status();
    return Check(result, "cuCtxEnablePeerAccess");
  }

 private:
  // Makes the GPU's context the thread's for a while.
  class Current {
   public:
    explicit Current(const DriverGpu* gpu) : api_(gpu->api_) { api_.ContextPush(gpu->context_); }
    ~Current() {
      CuContext popped;
      api_.ContextPop(&popped);
    }

   private:
    const DriverApi& api_;
  };

  Status Check(CuResult result, const char* function) const {
    if (result == 0) return Status();
    const char* name = nullptr;
    const char* text = nullptr;
    api_.GetErrorName(result, &name);
    api_.GetErrorString(result, &text);
    return Missing(std::string(function) + " on GPU " + std::to_string(ordinal_) + ": " +
                   (name != nullptr ? name : "error " + std::to_string(result)) +
                   (text != nullptr ? std::string(" (") + text + ")" : ""));
  }

  Status Attribute(int attribute, int* value) const {
    return Check(api_.DeviceGetAttribute(value, attribute, device_), "cuDeviceGetAttribute");
  }

  // In the context.
  Status Zero(CuAddress address, size_t bytes) {
    Status status = Check(api_.Fill(address, 0, bytes, copy_stream_), "cuMemsetD8Async");
    return status.ok() ? Check(api_.StreamSynchronize(copy_stream_), "cuStreamSynchronize")
                       : status;
  }

  const DriverApi& api_;
  const int ordinal_;
  CuDevice device_ = 0;
  CuContext context_ = nullptr;
  CuModule module_ = nullptr;
  CuFunction function_ = nullptr;
  CuStream daemon_stream_ = nullptr;
  CuStream copy_stream_ = nullptr;
  std::mutex mutex_;
  std::vector<CuAddress> device_memory_;
  std::vector<void*> host_memory_;
};

}  // namespace

Status LoadDriver(const std::string& library, const DriverApi** api) {
  static std::mutex mutex;
  static auto& loaded = *new std::map<std::string, DriverApi>;
  std::lock_guard<std::mutex> lock(mutex);
  if (const auto entry = loaded.find(library); entry != loaded.end()) {
    *api = &entry->second;
    return Status();
  }
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return Missing("the driver cannot be loaded: " + std::string(dlerror()));
  DriverApi found;
#define DFCCL_FIND(name, symbol, arguments)                                   \
  found.name = reinterpret_cast<decltype(found.name)>(dlsym(handle, symbol)); \
  if (found.name == nullptr) return Missing(library + " is too old: it has no " symbol);
  DFCCL_DRIVER_FUNCTIONS(DFCCL_FIND)
#undef DFCCL_FIND
  *api = &(loaded[library] = found);
  return Status();
}

// Of kernel_image.in, or of kernel_image_none.cc.
extern const void* const kKernelImage;

bool HasKernelImage() { return kKernelImage != nullptr; }

std::unique_ptr<Gpu> OpenGpu(const DriverOptions& options, int ordinal, Status* status) {
  const void* image = options.image != nullptr ? options.image : kKernelImage;
  if (image == nullptr) {
    *status = Missing(
        "this jax_dfccl was built without its kernel: no nvcc was found. Build it with "
        "DFCCL_CUDA=ON (docs/cuda.md)");
    return nullptr;
  }
  const DriverApi* api;
  *status = LoadDriver(options.library, &api);
  if (!status->ok()) return nullptr;
  auto gpu = std::make_unique<DriverGpu>(*api, ordinal);
  *status = gpu->Open(image);
  if (!status->ok()) return nullptr;
  return gpu;
}

}  // namespace gpu
}  // namespace dfccl
