// SPDX-License-Identifier: Apache-2.0
// The functions of the CUDA driver that are used, found in libcuda.so.1 at run time, so
// that neither building nor importing needs a driver. Types and constants are those of
// the driver's ABI. The only file that knows it.
#ifndef DFCCL_CUDA_DRIVER_API_H_
#define DFCCL_CUDA_DRIVER_API_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/status.h"

namespace dfccl {
namespace gpu {

using CuResult = int;  // 0: success
using CuDevice = int;
using CuAddress = unsigned long long;
struct CuContextOpaque;
using CuContext = CuContextOpaque*;
struct CuStreamOpaque;
using CuStream = CuStreamOpaque*;
struct CuModuleOpaque;
using CuModule = CuModuleOpaque*;
struct CuFunctionOpaque;
using CuFunction = CuFunctionOpaque*;

constexpr unsigned kCuStreamNonBlocking = 1;
constexpr unsigned kCuHostAllocPortable = 1;
constexpr unsigned kCuHostAllocDeviceMap = 2;
constexpr unsigned kCuWaitValueGeq = 0;       // of the cyclic difference
constexpr unsigned kCuWriteValueDefault = 0;  // what came before is visible first
constexpr int kCuAttributeMultiprocessors = 16;
constexpr int kCuAttributeComputeMajor = 75;
constexpr int kCuAttributeStreamWaitValue64 = 122;  // "CAN_USE_64_BIT_STREAM_MEM_OPS"
constexpr int kCuP2pAttributeAccess = 2;
constexpr int kCuP2pAttributeNativeAtomics = 3;
constexpr CuResult kCuPeerAccessAlreadyEnabled = 704;

// USE(result's name in DriverApi, symbol, arguments)
#define DFCCL_DRIVER_FUNCTIONS(USE)                                                              \
  USE(Init, "cuInit", (unsigned flags))                                                          \
  USE(GetErrorName, "cuGetErrorName", (CuResult result, const char** name))                      \
  USE(GetErrorString, "cuGetErrorString", (CuResult result, const char** text))                  \
  USE(DeviceGetCount, "cuDeviceGetCount", (int* count))                                          \
  USE(DeviceGet, "cuDeviceGet", (CuDevice * device, int ordinal))                                \
  USE(DeviceGetAttribute, "cuDeviceGetAttribute", (int* value, int attribute, CuDevice device))  \
  USE(DeviceGetP2pAttribute, "cuDeviceGetP2PAttribute",                                          \
      (int* value, int attribute, CuDevice from, CuDevice to))                                   \
  USE(PrimaryContextRetain, "cuDevicePrimaryCtxRetain", (CuContext * context, CuDevice device))  \
  USE(PrimaryContextRelease, "cuDevicePrimaryCtxRelease_v2", (CuDevice device))                  \
  USE(ContextPush, "cuCtxPushCurrent_v2", (CuContext context))                                   \
  USE(ContextPop, "cuCtxPopCurrent_v2", (CuContext * context))                                   \
  USE(ContextGetPriorities, "cuCtxGetStreamPriorityRange", (int* least, int* greatest))          \
  USE(ContextEnablePeerAccess, "cuCtxEnablePeerAccess", (CuContext peer, unsigned flags))        \
  USE(ModuleLoadData, "cuModuleLoadData", (CuModule * module, const void* image))                \
  USE(ModuleUnload, "cuModuleUnload", (CuModule module))                                         \
  USE(ModuleGetFunction, "cuModuleGetFunction",                                                  \
      (CuFunction * function, CuModule module, const char* name))                                \
  USE(LaunchKernel, "cuLaunchKernel",                                                            \
      (CuFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, CuStream stream,               \
       void** arguments, void** extra))                                                          \
  USE(StreamCreate, "cuStreamCreateWithPriority",                                                \
      (CuStream * stream, unsigned flags, int priority))                                         \
  USE(StreamDestroy, "cuStreamDestroy_v2", (CuStream stream))                                    \
  USE(StreamSynchronize, "cuStreamSynchronize", (CuStream stream))                               \
  USE(StreamWriteValue, "cuStreamWriteValue64_v2",                                               \
      (CuStream stream, CuAddress address, uint64_t value, unsigned flags))                      \
  USE(StreamWaitValue, "cuStreamWaitValue64_v2",                                                 \
      (CuStream stream, CuAddress address, uint64_t value, unsigned flags))                      \
  USE(MemoryAllocate, "cuMemAlloc_v2", (CuAddress * address, size_t bytes))                      \
  USE(MemoryFree, "cuMemFree_v2", (CuAddress address))                                           \
  USE(HostAllocate, "cuMemHostAlloc", (void** memory, size_t bytes, unsigned flags))             \
  USE(HostFree, "cuMemFreeHost", (void* memory))                                                 \
  USE(HostGetDeviceAddress, "cuMemHostGetDevicePointer_v2",                                      \
      (CuAddress * address, void* memory, unsigned flags))                                       \
  USE(CopyToDevice, "cuMemcpyHtoDAsync_v2",                                                      \
      (CuAddress to, const void* from, size_t bytes, CuStream stream))                           \
  USE(CopyToHost, "cuMemcpyDtoHAsync_v2",                                                        \
      (void* to, CuAddress from, size_t bytes, CuStream stream))                                 \
  USE(Copy, "cuMemcpyAsync", (CuAddress to, CuAddress from, size_t bytes, CuStream stream))      \
  USE(Fill, "cuMemsetD8Async", (CuAddress to, unsigned char value, size_t bytes, CuStream stream))

// Found in the driver's library.
struct DriverApi {
#define DFCCL_MEMBER(name, symbol, arguments) CuResult(*name) arguments;
  DFCCL_DRIVER_FUNCTIONS(DFCCL_MEMBER)
#undef DFCCL_MEMBER
};

// By the rules of dlopen; once for each library. *api lives for ever.
Status LoadDriver(const std::string& library, const DriverApi** api);

}  // namespace gpu
}  // namespace dfccl

#endif  // DFCCL_CUDA_DRIVER_API_H_
