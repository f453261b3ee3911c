// SPDX-License-Identifier: Apache-2.0
#include "core/transport/ucx_api.h"

#include <dlfcn.h>

#include <mutex>

namespace dfccl {

namespace {

// The version whose types ucx_api.h has; libraries of later ones take them, too.
constexpr unsigned kMajor = 1;
constexpr unsigned kMinor = 11;

Status Unusable(const std::string& why) {
  return {StatusCode::kInvalidArgument, "UCX cannot be used: " + why};
}

Status Find(void* handle, const std::string& library, UcxApi* api) {
#define DFCCL_FIND(name, symbol, result, arguments)                         \
  api->name = reinterpret_cast<decltype(api->name)>(dlsym(handle, symbol)); \
  if (api->name == nullptr) return Unusable(library + " is too old: it has no " symbol);
  DFCCL_UCX_FUNCTIONS(DFCCL_FIND)
#undef DFCCL_FIND
  unsigned major = 0, minor = 0, release = 0;
  api->GetVersion(&major, &minor, &release);
  if (major != kMajor || minor < kMinor) {
    return Unusable(library + " is of version " + std::to_string(major) + "." +
                    std::to_string(minor) + ", not 1.11 or a newer 1");
  }
  UcxParameters parameters;
  parameters.field_mask = UcxParameters::kFeatures | UcxParameters::kWorkersShared;
  parameters.features = UcxParameters::kActiveMessages | UcxParameters::kWakeup;
  parameters.workers_shared = 1;
  const UcxStatus status = api->Init(kMajor, kMinor, &parameters, nullptr, &api->context);
  if (status == kUcxOk) return Status();
  return Unusable(library + " does not start: " + api->StatusText(status));
}

Status Load(const std::vector<std::string>& libraries, UcxApi* api) {
  std::string problems;
  for (const std::string& library : libraries) {
    void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) return Find(handle, library, api);
    problems += (problems.empty() ? "" : "; ") + std::string(dlerror());
  }
  return Unusable(problems);
}

}  // namespace

const UcxApi* LoadUcx(const std::vector<std::string>& libraries, Status* status) {
  static std::mutex mutex;
  static UcxApi api;
  static bool loaded = false;
  std::lock_guard<std::mutex> lock(mutex);
  if (!loaded) {
    *status = Load(libraries, &api);
    loaded = status->ok();
  }
  return loaded ? &api : nullptr;
}

}  // namespace dfccl
