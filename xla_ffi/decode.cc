// SPDX-License-Identifier: Apache-2.0
#include "xla_ffi/decode.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <string_view>
#include <utility>

#include "core/hash.h"
#include "core/reduce/reduce.h"

namespace dfccl {
namespace {

namespace ffi = ::xla::ffi;
using Integers = ffi::Span<const int64_t>;

Status Invalid(std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message));
}

bool ParseKind(std::string_view text, Kind* kind) {
  for (int i = 0; i < kKindCount; ++i) {
    if (text == KindName(static_cast<Kind>(i))) {
      *kind = static_cast<Kind>(i);
      return true;
    }
  }
  return false;
}

bool ParseReduceOp(std::string_view text, ReduceOp* op) {
  constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kProd, ReduceOp::kMin,
                               ReduceOp::kMax, ReduceOp::kAnd,  ReduceOp::kOr,   ReduceOp::kXor};
  for (ReduceOp candidate : kOps) {
    if (text == ReduceOpName(candidate)) {
      *op = candidate;
      return true;
    }
  }
  return false;
}

struct TypePair {
  XLA_FFI_DataType xla;
  DType dtype;
};
constexpr TypePair kTypes[] = {
    {XLA_FFI_DataType_PRED, DType::kBool},
    {XLA_FFI_DataType_S8, DType::kS8},
    {XLA_FFI_DataType_S16, DType::kS16},
    {XLA_FFI_DataType_S32, DType::kS32},
    {XLA_FFI_DataType_S64, DType::kS64},
    {XLA_FFI_DataType_U8, DType::kU8},
    {XLA_FFI_DataType_U16, DType::kU16},
    {XLA_FFI_DataType_U32, DType::kU32},
    {XLA_FFI_DataType_U64, DType::kU64},
    {XLA_FFI_DataType_F16, DType::kF16},
    {XLA_FFI_DataType_BF16, DType::kBF16},
    {XLA_FFI_DataType_F32, DType::kF32},
    {XLA_FFI_DataType_F64, DType::kF64},
    {XLA_FFI_DataType_C64, DType::kC64},
    {XLA_FFI_DataType_C128, DType::kC128},
    {XLA_FFI_DataType_F8E3M4, DType::kF8E3M4},
    {XLA_FFI_DataType_F8E4M3, DType::kF8E4M3},
    {XLA_FFI_DataType_F8E4M3FN, DType::kF8E4M3FN},
    {XLA_FFI_DataType_F8E4M3FNUZ, DType::kF8E4M3FNUZ},
    {XLA_FFI_DataType_F8E4M3B11FNUZ, DType::kF8E4M3B11FNUZ},
    {XLA_FFI_DataType_F8E5M2, DType::kF8E5M2},
    {XLA_FFI_DataType_F8E5M2FNUZ, DType::kF8E5M2FNUZ},
    {XLA_FFI_DataType_F8E8M0FNU, DType::kF8E8M0FNU},
};

bool ParseDType(XLA_FFI_DataType type, DType* dtype) {
  static constexpr int kUnsupported = -1;
  static const auto table = [] {
    std::array<int, 64> by_type;
    by_type.fill(kUnsupported);
    for (const TypePair& pair : kTypes) by_type[pair.xla] = static_cast<int>(pair.dtype);
    return by_type;
  }();
  const size_t index = static_cast<size_t>(type);
  if (index >= table.size() || table[index] == kUnsupported) return false;
  *dtype = static_cast<DType>(table[index]);
  return true;
}

// Reads attributes and keeps the first failure.
class AttributeReader {
 public:
  explicit AttributeReader(const ffi::Dictionary& attributes) : attributes_(attributes) {}

  template <typename T>
  T Get(std::string_view name) {
    ffi::ErrorOr<T> value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    if (status_.ok()) {
      status_ = Invalid("attribute " + std::string(name) + ": " + value.error().message());
    }
    return T();
  }
  int64_t Integer(std::string_view name) { return Get<int64_t>(name); }
  const Status& status() const { return status_; }

 private:
  const ffi::Dictionary& attributes_;
  Status status_;
};

// `acts`: the only member of each group that runs the call; -1: all do.
Status DecodeGroups(Integers groups, Integers group_sizes, Integers devices, int64_t acts,
                    std::vector<CallState::Membership>* memberships) {
  size_t begin = 0;
  for (int64_t size : group_sizes) {
    if (size < 1 || static_cast<size_t>(size) > groups.size() - begin) {
      return Invalid("group_sizes do not fit groups");
    }
    std::vector<int64_t> members;
    for (size_t i = begin; i < begin + size; ++i) {
      const int64_t position = groups[i];
      if (position < 0 || position >= static_cast<int64_t>(devices.size())) {
        return Invalid("a group names position " + std::to_string(position) +
                       ", which the mesh does not have");
      }
      members.push_back(devices[position]);
    }
    begin += size;
    const Group* group = InternGroup(members);
    for (int member = 0; member < group->size(); ++member) {
      if (acts >= 0 && member != acts) continue;
      memberships->push_back({members[member], group, member});
    }
  }
  if (begin != groups.size()) return Invalid("group_sizes do not fit groups");
  std::sort(memberships->begin(), memberships->end(),
            [](const auto& a, const auto& b) { return a.device < b.device; });
  for (size_t i = 1; i < memberships->size(); ++i) {
    if ((*memberships)[i - 1].device == (*memberships)[i].device) {
      return Invalid("device " + std::to_string((*memberships)[i].device) +
                     " is in more than one place of the groups");
    }
  }
  return Status();
}

// What the call does; after DecodeGroups.
Status DecodeKind(std::string_view kind, std::string_view op, int64_t root, Integers pairs,
                  CallState* state) {
  const auto invalid = [&](const std::string& message) {
    return Invalid(std::string(kind) + ": " + message);
  };
  if (!ParseKind(kind, &state->kind)) return Invalid("unknown kind '" + std::string(kind) + "'");
  if (Folds(state->kind) ? !ParseReduceOp(op, &state->op) : !op.empty()) {
    return invalid("unknown op '" + std::string(op) + "'");
  }
  const bool scans = state->kind == Kind::kScan || state->kind == Kind::kExscan;
  if (scans && state->op == ReduceOp::kMean) return invalid("a mean has no meaning here");
  const auto least = std::min_element(
      state->memberships.begin(), state->memberships.end(),
      [](const auto& a, const auto& b) { return a.group->size() < b.group->size(); });
  const int64_t members = least == state->memberships.end() ? 0 : least->group->size();
  if (root != 0 && (!HasRoot(state->kind) || root < 0 || root >= members)) {
    return invalid("no member can be root " + std::to_string(root));
  }
  state->root = static_cast<int>(root);
  if (state->kind != Kind::kPermute) {
    return pairs.size() == 0 ? Status() : invalid("takes no pairs");
  }
  if (pairs.size() % 2 != 0) return invalid("pairs must have two entries each");
  std::vector<std::pair<int, int>> list;
  std::vector<bool> sends(members), receives(members);
  for (size_t i = 0; i < pairs.size(); i += 2) {
    const int64_t source = pairs[i], target = pairs[i + 1];
    const std::string pair = "(" + std::to_string(source) + ", " + std::to_string(target) + ")";
    if (std::min(source, target) < 0 || std::max(source, target) >= members) {
      return invalid("pair " + pair + " names a member that a group does not have");
    }
    if (sends[source] || receives[target]) {
      return invalid("pair " + pair + " has a source or a target that another pair has");
    }
    sends[source] = receives[target] = true;
    list.emplace_back(static_cast<int>(source), static_cast<int>(target));
  }
  state->pairs = InternPairs(std::move(list));
  return Status();
}

// A program may be loaded for several sets of devices at the same time: these
// are different programs, with launches of their own.
uint64_t LoadedProgram(uint64_t lowered, Integers devices) {
  Hash128 hash;
  hash.Add(lowered);
  for (int64_t device : devices) hash.Add(static_cast<uint64_t>(device));
  Runtime::Get().RegisterLoaded(hash.hi, lowered);
  return hash.hi;
}

}  // namespace

Status DecodeCall(Target target, const ffi::Dictionary& attributes, CallState* state) {
  AttributeReader reader(attributes);
  const std::string_view kind = reader.Get<std::string_view>("kind");
  const std::string_view op = reader.Get<std::string_view>("op");
  const int64_t root = reader.Integer("root");
  const Integers pairs = reader.Get<Integers>("pairs");
  const Integers groups = reader.Get<Integers>("groups");
  const Integers group_sizes = reader.Get<Integers>("group_sizes");
  const Integers devices = reader.Get<Integers>("devices");
  const Integers members = reader.Get<Integers>("members");
  const std::string_view name = reader.Get<std::string_view>("name");
  const int64_t has_key = reader.Integer("has_key");
  const int64_t priority = reader.Integer("priority");
  const int64_t timeout_us = reader.Integer("timeout_us");
  const int64_t program = reader.Integer("program");
  const int64_t site = reader.Integer("site");
  const int64_t closed = reader.Integer("closed");
  const int64_t as_device = reader.Integer("as_device");
  const int64_t acts = reader.Integer("acts");
  const int64_t shape = reader.Integer("shape");
  const int64_t stage = target == Target::kStart ? reader.Integer("stage") : 0;
  const int64_t has_tag = target == Target::kHandleStart ? reader.Integer("has_tag") : 0;
  const int64_t detached = target == Target::kHandleStart ? reader.Integer("detached") : 0;
  if (!reader.status().ok()) return reader.status();

  if (site < 0 || site > std::numeric_limits<int32_t>::max()) {
    return Invalid(
        "this program was compiled without jax_dfccl's module pass, so its collectives have no "
        "identity. It must be lowered and compiled by jax.jit after `import jax_dfccl`");
  }
  if (has_key != 0 && name.empty()) return Invalid("key= needs name=");
  if (priority < std::numeric_limits<int>::min() || priority > std::numeric_limits<int>::max()) {
    return Invalid("priority " + std::to_string(priority) + " does not fit 32 bits");
  }
  if (timeout_us < 0 || timeout_us > std::numeric_limits<int64_t>::max() / 1000) {
    return Invalid("timeout of " + std::to_string(timeout_us) + " us is out of range");
  }
  state->name = std::string(name);
  state->has_key = has_key != 0;
  state->closed = closed != 0;
  state->stage_source = stage != 0 || target == Target::kHandleStart;
  state->has_tag = has_tag != 0;
  state->detached = detached != 0;
  state->sends = acts == 0;
  state->shape = static_cast<uint64_t>(shape);
  state->priority = static_cast<int>(priority);
  state->timeout_ns = timeout_us * 1000;
  state->program = LoadedProgram(static_cast<uint64_t>(program), devices);
  state->site = static_cast<int32_t>(site);
  state->as_device = as_device;
  const Integers ids = members.size() > 0 ? members : devices;
  if (Status status = DecodeGroups(groups, group_sizes, ids, acts, &state->memberships);
      !status.ok()) {
    return status;
  }
  if (Status status = DecodeKind(kind, op, root, pairs, state); !status.ok()) return status;
  // What waits is no instance; under a number of its own it doesn't count as a clone.
  state->call_site.reset(target == Target::kDone || target == Target::kHandleWait
                             ? NewCallSite(state->program, ~state->site, "")
                             : NewCallSite(state->program, state->site, state->name));
  return Status();
}

namespace {

const CallState::Membership* FindMembership(const CallState& state, int64_t device) {
  const auto entry = std::lower_bound(
      state.memberships.begin(), state.memberships.end(), device,
      [](const CallState::Membership& membership, int64_t id) { return membership.device < id; });
  return entry != state.memberships.end() && entry->device == device ? &*entry : nullptr;
}

Status DecodeKey(const XLA_FFI_Buffer& buffer, const ReadMemory& read, int64_t* key) {
  uint32_t narrow = 0;
  Status status;
  switch (buffer.dtype) {
    case XLA_FFI_DataType_S32:
      status = read(&narrow, buffer.data, sizeof(narrow));
      *key = static_cast<int32_t>(narrow);
      return status;
    case XLA_FFI_DataType_U32:
      status = read(&narrow, buffer.data, sizeof(narrow));
      *key = narrow;
      return status;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
      return read(key, buffer.data, sizeof(*key));
    default:
      return Invalid("the key must be a 32- or 64-bit integer");
  }
}

const XLA_FFI_Buffer& Operand(const XLA_FFI_CallFrame& frame, int64_t index) {
  return *static_cast<const XLA_FFI_Buffer*>(frame.args.args[index]);
}

// Operands of a ragged exchange between the source and the key.
constexpr int64_t kRaggedOperands = 5;

Status DecodeIndices(const XLA_FFI_Buffer& buffer, int members, RaggedOperands::Array* array) {
  array->wide = buffer.dtype == XLA_FFI_DataType_S64;
  array->data = buffer.data;
  if ((!array->wide && buffer.dtype != XLA_FFI_DataType_S32) || buffer.rank != 1 ||
      buffer.dims[0] != members) {
    return Invalid("offsets and sizes must be int32 or int64, one for each of the " +
                   std::to_string(members) + " members");
  }
  return Status();
}

// *row: elements of a row.
Status DecodeRagged(const XLA_FFI_CallFrame& frame, int members, int64_t* row,
                    RaggedOperands* operands) {
  const XLA_FFI_Buffer& source = Operand(frame, 0);
  const XLA_FFI_Buffer& initial = Operand(frame, 1);
  if (source.rank < 1 || initial.rank != source.rank || initial.dtype != source.dtype ||
      !std::equal(source.dims + 1, source.dims + source.rank, initial.dims + 1)) {
    return Invalid("operand and output of ragged_all_to_all must differ in their rows only");
  }
  operands->part.source_rows = source.dims[0];
  operands->part.result_rows = initial.dims[0];
  operands->part.initial = initial.data;
  *row = std::accumulate(source.dims + 1, source.dims + source.rank, int64_t{1},
                         std::multiplies<int64_t>());
  for (int i = 0; i < 4; ++i) {
    Status status = DecodeIndices(Operand(frame, 2 + i), members, &operands->arrays[i]);
    if (!status.ok()) return status;
  }
  return Status();
}

}  // namespace

ffi::TypeId CallState::id = {};
const XLA_FFI_TypeInfo CallState::type_info = ffi::MakeTypeInfo<CallState>();

ffi::TypeId CudaCallState::id = {};
const XLA_FFI_TypeInfo CudaCallState::type_info = ffi::MakeTypeInfo<CudaCallState>();

void RaggedOperands::CopyArrays(int members) {
  std::vector<int64_t>* const copies[] = {&part.input_offsets, &part.send_sizes,
                                          &part.output_offsets, &part.recv_sizes};
  for (int i = 0; i < 4; ++i) {
    copies[i]->resize(members);
    for (int j = 0; j < members; ++j) {
      (*copies[i])[j] = arrays[i].wide ? static_cast<const int64_t*>(arrays[i].data)[j]
                                       : static_cast<const int32_t*>(arrays[i].data)[j];
    }
  }
}

Status DecodeBuffer(const XLA_FFI_Buffer& buffer, BufferView* view) {
  if (!ParseDType(buffer.dtype, &view->dtype)) {
    return Invalid("element type " + std::to_string(buffer.dtype) + " is not supported");
  }
  view->data = buffer.data;
  view->count = 1;
  for (int64_t i = 0; i < buffer.rank; ++i) view->count *= buffer.dims[i];
  return Status();
}

Status DecodeSubmission(const CallState& state, const XLA_FFI_CallFrame& frame, int64_t device,
                        int64_t run_id, const ReadMemory& read, Submission* submission,
                        RaggedOperands* ragged) {
  const bool is_ragged = state.kind == Kind::kRaggedAllToAll;
  const int64_t key_index = is_ragged ? 1 + kRaggedOperands : 1;
  const int64_t expected = key_index + (state.has_key ? 1 : 0) + (state.has_tag ? 1 : 0);
  if (frame.args.size != expected) {
    return Invalid("expected " + std::to_string(expected) + " operands, got " +
                   std::to_string(frame.args.size));
  }
  BufferView source;
  if (Status status = DecodeBuffer(Operand(frame, 0), &source); !status.ok()) return status;
  if (Folds(state.kind) && !IsSupported(state.op, source.dtype)) {
    return Invalid(std::string(ReduceOpName(state.op)) + " of " + DTypeName(source.dtype) +
                   " has no meaning");
  }
  int64_t key = 0;
  if (state.has_key) {
    if (Status status = DecodeKey(Operand(frame, key_index), read, &key); !status.ok()) {
      return status;
    }
  }
  const CallState::Membership* membership = FindMembership(state, device);
  if (membership == nullptr) {
    return Invalid("device " + std::to_string(device) +
                   " runs a collective but is in none of its " + "groups");
  }
  int64_t count = source.count;
  const int64_t blocks = SourceBlocks(state.kind, membership->group->size());
  if (is_ragged) {
    const Status status = DecodeRagged(frame, membership->group->size(), &count, ragged);
    if (!status.ok()) return status;
    submission->ragged = &ragged->part;
  }
  if (count % blocks != 0) {
    return Invalid(std::string(KindName(state.kind)) + ": the operand has " +
                   std::to_string(count) + " elements, which cannot be cut into " +
                   std::to_string(blocks) + " equal blocks");
  }
  const IdentifiedCall call = state.call_site->Next(device, run_id, membership->group, key);
  submission->device = device;
  submission->group = membership->group;
  submission->member = membership->member;
  submission->id = call.id;
  submission->signature = {state.kind, state.op,    source.dtype, count / blocks,
                           state.root, state.pairs, state.shape};
  submission->source = source.data;
  submission->stage_source = state.stage_source;
  submission->closed = state.closed;
  submission->priority = state.priority;
  submission->timeout_ns = state.timeout_ns;
  submission->program = state.program;
  submission->launch = call.launch;
  submission->occurrence = call.occurrence;
  submission->site = state.site;
  submission->name = state.name;
  submission->key = key;
  submission->has_key = state.has_key;
  return Status();
}

}  // namespace dfccl
