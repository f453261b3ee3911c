// SPDX-License-Identifier: Apache-2.0
// What XLA hands to a handler, as core values: attributes, decoded once when an
// executable is instantiated (CallState), and operands, decoded at each
// execution. Shared by the handlers of all platforms; all messages about wrong
// calls are here.
//
// Attributes of the three targets (tests compare the names with the lowering):
//   kind         str      KindName: all_reduce, all_gather, ...
//   op           str      reduction: sum, mean, prod, min, max, and, or, xor; "" for
//                         kinds that only move data
//   root         i64      index in the group, for kinds that have a root; else 0
//   pairs        i64[]    permute: source, target, source, target, ... as indices in
//                         the group; else empty
//   groups       i64[]    positions in the mesh, group after group
//   group_sizes  i64[]    members of each group
//   devices      i64[]    global device id of each position
//   members      i64[]    empty; else groups are positions in this list of ids, whose
//                         devices may run other programs
//   name         str      "" for an unnamed call
//   has_key      i64      1: an integer key is among the operands
//   priority     i64      larger first
//   timeout_us   i64      0: the process default
//   program      i64      the program's hash
//   site         i64      number of the call in the program; < 0: not assigned
//   closed       i64      1: no other operation of the program waits for peers
//   as_device    i64      id of the member that this call stands for, where a program runs
//                         those of several devices on one; < 0: the executing device's
//   acts         i64      -1; or the only member of each group that runs this call, so that
//                         a device may be another member of other groups
//   shape        i64      0; or a hash of the operand's shape that members must agree on
//   stage        i64      start only. 1: copy the source at start
//   has_tag      i64      handle_start only. 1: the last operand is a tag (s32) under which
//                         its end is announced
//   detached     i64      handle_start only. 1: nobody waits for it; it has no ticket
#ifndef DFCCL_XLA_FFI_DECODE_H_
#define DFCCL_XLA_FFI_DECODE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/collective.h"
#include "core/group.h"
#include "core/identity.h"
#include "core/runtime.h"
#include "core/status.h"
#include "xla/ffi/api/ffi.h"

namespace dfccl {

// One custom call of an executable; owned by XLA, shared by all local devices
// and immutable but for the counts inside `call_site`.
struct CallState {
  static xla::ffi::TypeId id;  // assigned by XLA when the type is registered
  static const XLA_FFI_TypeInfo type_info;

  struct CallSiteDeleter {
    void operator()(CallSite* site) const { DeleteCallSite(site); }
  };
  struct Membership {
    int64_t device;  // global id
    const Group* group;
    int member;
  };

  // The device whose part it is that `executing` executes.
  int64_t DeviceOf(int64_t executing) const { return as_device >= 0 ? as_device : executing; }

  Kind kind = Kind::kAllReduce;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  const Pairs* pairs = nullptr;
  std::string name;
  bool has_key = false;
  bool closed = false;
  bool stage_source = false;
  bool has_tag = false;
  bool detached = false;
  bool sends = false;  // a message: nobody may look at what the program gives
  int priority = 0;
  int64_t timeout_ns = 0;
  uint64_t program = 0;  // on these devices
  int32_t site = -1;
  int64_t as_device = -1;
  uint64_t shape = 0;
  std::vector<Membership> memberships;                   // sorted by device
  std::unique_ptr<CallSite, CallSiteDeleter> call_site;  // done's only knows launches
};

// The same on CUDA.
struct CudaCallState : CallState {
  static xla::ffi::TypeId id;
  static const XLA_FFI_TypeInfo type_info;
};

// Which target a state is for.
enum class Target { kSingle, kStart, kDone, kHandleStart, kHandleWait };

Status DecodeCall(Target target, const xla::ffi::Dictionary& attributes, CallState* state);

struct BufferView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t count = 0;
  int64_t bytes() const { return count * DTypeSize(dtype); }
};

// Fails for element types that have no memory form of their own (sub-byte).
Status DecodeBuffer(const XLA_FFI_Buffer& buffer, BufferView* view);

// How the host gets at what an operand holds.
using ReadMemory = std::function<Status(void* to, const void* from, size_t bytes)>;

// The operands of a ragged exchange. The part's own arrays are empty until they are
// copied, which the host can do where it can read operands.
struct RaggedOperands {
  struct Array {
    const void* data = nullptr;
    bool wide = false;  // int64, else int32
  };
  RaggedPart part;
  Array arrays[4];  // in the order of RaggedPart

  void CopyArrays(int members);
};

// The submission of a single call or of either start: everything but `result`; *ragged is
// its part of a ragged exchange. `device` is the state's for who executes it.
Status DecodeSubmission(const CallState& state, const XLA_FFI_CallFrame& frame, int64_t device,
                        int64_t run_id, const ReadMemory& read, Submission* submission,
                        RaggedOperands* ragged);

}  // namespace dfccl

#endif  // DFCCL_XLA_FFI_DECODE_H_
