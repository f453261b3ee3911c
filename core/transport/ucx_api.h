// SPDX-License-Identifier: Apache-2.0
// The functions of UCX (its library ucp) that are used, found at run time, so that neither
// building nor running needs UCX. Types and constants are those of its ABI, 1.11 or newer.
// The only file that knows it.
#ifndef DFCCL_CORE_TRANSPORT_UCX_API_H_
#define DFCCL_CORE_TRANSPORT_UCX_API_H_

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/status.h"

namespace dfccl {

using UcxStatus = int8_t;  // an enumeration of one byte
constexpr UcxStatus kUcxOk = 0;
constexpr UcxStatus kUcxInProgress = 1;

struct UcxContextOpaque;
using UcxContext = UcxContextOpaque*;
struct UcxWorkerOpaque;
using UcxWorker = UcxWorkerOpaque*;
struct UcxEndpointOpaque;
using UcxEndpoint = UcxEndpointOpaque*;
struct UcxAddressOpaque;
using UcxAddress = UcxAddressOpaque*;

struct UcxParameters {  // ucp_params_t
  static constexpr uint64_t kFeatures = 1, kWorkersShared = 1 << 5;
  static constexpr uint64_t kWakeup = 1 << 4, kActiveMessages = 1 << 6;  // features
  uint64_t field_mask = 0;
  uint64_t features = 0;
  size_t request_size = 0;
  void (*request_init)(void*) = nullptr;
  void (*request_cleanup)(void*) = nullptr;
  uint64_t tag_sender_mask = 0;
  int workers_shared = 0;
  size_t endpoints = 0;
  size_t processes_per_node = 0;
  const char* name = nullptr;
};

struct UcxWorkerParameters {  // ucp_worker_params_t
  static constexpr uint64_t kThreadMode = 1;
  static constexpr int kSerialized = 1;  // thread modes
  uint64_t field_mask = 0;
  int thread_mode = 0;
  unsigned long cpu_mask[1024 / (8 * sizeof(unsigned long))] = {};
  unsigned events = 0;
  void* user_data = nullptr;
  int event_fd = -1;
  uint64_t flags = 0;
  const char* name = nullptr;
  size_t alignment = 0;
  uint64_t client = 0;
};

struct UcxErrorHandler {  // ucp_err_handler_t
  void (*callback)(void* argument, UcxEndpoint endpoint, UcxStatus status) = nullptr;
  void* argument = nullptr;
};

struct UcxEndpointParameters {  // ucp_ep_params_t
  static constexpr uint64_t kAddress = 1, kErrorMode = 1 << 1, kErrorHandler = 1 << 2;
  static constexpr int kPeer = 1;  // error modes
  uint64_t field_mask = 0;
  const UcxAddressOpaque* address = nullptr;
  int error_mode = 0;
  UcxErrorHandler error_handler;
  void* user_data = nullptr;
  unsigned flags = 0;
  const sockaddr* socket_address = nullptr;
  socklen_t socket_address_bytes = 0;
  void* connection_request = nullptr;
  const char* name = nullptr;
  const sockaddr* local_address = nullptr;
  socklen_t local_address_bytes = 0;
};

struct UcxRequestParameters {  // ucp_request_param_t
  static constexpr uint32_t kCallback = 1 << 1, kUserData = 1 << 2, kFlags = 1 << 4;
  static constexpr uint32_t kEager = 1 << 1;       // flags of a send
  static constexpr uint32_t kForceClose = 1 << 0;  // flags of a close
  uint32_t mask = 0;
  uint32_t flags = 0;
  void* request = nullptr;
  void (*callback)(void* request, UcxStatus status, void* user_data) = nullptr;
  uint64_t datatype = 0;
  void* user_data = nullptr;
  void* reply_buffer = nullptr;
  int memory_type = 0;
  void* receive_info = nullptr;
  void* memory = nullptr;
};

struct UcxArrival {  // ucp_am_recv_param_t
  static constexpr uint64_t kKeepable = 1 << 16, kRendezvous = 1 << 17;
  uint64_t attributes;
  UcxEndpoint reply_endpoint;
};

struct UcxMessageHandler {  // ucp_am_handler_param_t
  static constexpr uint64_t kId = 1, kFlags = 1 << 1, kCallback = 1 << 2, kArgument = 1 << 3;
  static constexpr uint32_t kWholeMessage = 1;  // flags
  uint64_t field_mask = 0;
  unsigned id = 0;
  uint32_t flags = 0;
  UcxStatus (*callback)(void* argument, const void* header, size_t header_bytes, void* data,
                        size_t bytes, const UcxArrival* arrival) = nullptr;
  void* argument = nullptr;
};

// USE(name in UcxApi, symbol, result, arguments)
#define DFCCL_UCX_FUNCTIONS(USE)                                                                  \
  USE(GetVersion, "ucp_get_version", void, (unsigned* major, unsigned* minor, unsigned* release)) \
  USE(StatusText, "ucs_status_string", const char*, (UcxStatus status))                           \
  USE(Init, "ucp_init_version", UcxStatus,                                                        \
      (unsigned major, unsigned minor, const UcxParameters* parameters, const void* settings,     \
       UcxContext* context))                                                                      \
  USE(WorkerCreate, "ucp_worker_create", UcxStatus,                                               \
      (UcxContext context, const UcxWorkerParameters* parameters, UcxWorker* worker))             \
  USE(WorkerDestroy, "ucp_worker_destroy", void, (UcxWorker worker))                              \
  USE(WorkerGetAddress, "ucp_worker_get_address", UcxStatus,                                      \
      (UcxWorker worker, UcxAddress * address, size_t* bytes))                                    \
  USE(WorkerReleaseAddress, "ucp_worker_release_address", void,                                   \
      (UcxWorker worker, UcxAddress address))                                                     \
  USE(WorkerGetDescriptor, "ucp_worker_get_efd", UcxStatus, (UcxWorker worker, int* descriptor))  \
  USE(WorkerArm, "ucp_worker_arm", UcxStatus, (UcxWorker worker))                                 \
  USE(WorkerProgress, "ucp_worker_progress", unsigned, (UcxWorker worker))                        \
  USE(SetMessageHandler, "ucp_worker_set_am_recv_handler", UcxStatus,                             \
      (UcxWorker worker, const UcxMessageHandler* handler))                                       \
  USE(EndpointCreate, "ucp_ep_create", UcxStatus,                                                 \
      (UcxWorker worker, const UcxEndpointParameters* parameters, UcxEndpoint* endpoint))         \
  USE(EndpointClose, "ucp_ep_close_nbx", void*,                                                   \
      (UcxEndpoint endpoint, const UcxRequestParameters* parameters))                             \
  USE(Send, "ucp_am_send_nbx", void*,                                                             \
      (UcxEndpoint endpoint, unsigned id, const void* header, size_t header_bytes,                \
       const void* data, size_t bytes, const UcxRequestParameters* parameters))                   \
  USE(ReleaseData, "ucp_am_data_release", void, (UcxWorker worker, void* data))                   \
  USE(RequestStatus, "ucp_request_check_status", UcxStatus, (void* request))                      \
  USE(RequestFree, "ucp_request_free", void, (void* request))

// Found in the library.
struct UcxApi {
#define DFCCL_MEMBER(name, symbol, result, arguments) result(*name) arguments = nullptr;
  DFCCL_UCX_FUNCTIONS(DFCCL_MEMBER)
#undef DFCCL_MEMBER
  UcxContext context = nullptr;
};

// The first of these libraries, by the rules of dlopen, that can be loaded. Once in a
// process: later calls get what the first one that succeeded got.
// nullptr: *status says why.
const UcxApi* LoadUcx(const std::vector<std::string>& libraries, Status* status);

// Of what UCX returns where a request may be: whether it is one, or an error.
inline bool IsUcxRequest(const void* result) {
  return reinterpret_cast<uintptr_t>(result) - 1 < static_cast<uintptr_t>(-100) - 1;
}
inline bool IsUcxError(const void* result) {
  return reinterpret_cast<uintptr_t>(result) >= static_cast<uintptr_t>(-100);
}

}  // namespace dfccl

#endif  // DFCCL_CORE_TRANSPORT_UCX_API_H_
