// SPDX-License-Identifier: Apache-2.0
// jax_dfccl._core: the handlers as capsules, and the runtime's settings and
// report. The only file that knows nanobind.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/identity.h"
#include "core/plans/choice.h"
#include "core/reduce/roofline.h"
#include "core/runtime.h"
#include "core/trace/flight.h"
#include "cuda/driver.h"
#include "cuda/service.h"
#include "xla_ffi/decode.h"
#include "xla_ffi/handlers.h"

namespace nb = nanobind;

namespace dfccl {
namespace {

constexpr char kStateTypeName[] = "jax_dfccl.call";

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// XLA's name of the platform: "cpu" or "CUDA".
bool IsCuda(const std::string& platform) {
  if (platform != "cpu" && platform != "CUDA") {
    throw nb::value_error(("there are no handlers for " + platform).c_str());
  }
  return platform == "CUDA";
}

nb::dict Registrations(const std::string& platform) {
  nb::dict targets;
  const bool is_cuda = IsCuda(platform);
  for (int i = 0; i < kTargetCount; ++i) {
    const TargetHandlers& target = (is_cuda ? CudaTargets() : CpuTargets())[i];
    nb::dict stages;
    stages["instantiate"] = Capsule(target.instantiate);
    stages["execute"] = Capsule(target.execute);
    targets[target.name] = stages;
  }
  return targets;
}

template <typename State>
nb::dict TypeRegistration() {
  nb::dict type;
  type["type_id"] = nb::capsule(static_cast<void*>(&State::id));
  type["type_info"] = nb::capsule(static_cast<const void*>(&State::type_info));
  return type;
}

nb::dict TypeRegistrations(const std::string& platform) {
  nb::dict types;
  types[kStateTypeName] =
      IsCuda(platform) ? TypeRegistration<CudaCallState>() : TypeRegistration<CallState>();
  return types;
}

int64_t Nanoseconds(double seconds, const char* what) {
  if (!(seconds >= 0) || seconds > 9e9) {
    throw nb::value_error((std::string(what) + " must be from 0 to 9e9 seconds").c_str());
  }
  return std::llround(seconds * 1e9);
}

// {kind: {plan: whether it may be chosen unasked}}
nb::dict Plans() {
  nb::dict kinds;
  for (int k = 0; k < kKindCount; ++k) {
    nb::dict plans;
    for (const PlanChoice& choice : PlansOf(static_cast<Kind>(k))) {
      plans[PlanName(choice).c_str()] = FoldsInOrder(choice.algorithm);
    }
    kinds[KindName(static_cast<Kind>(k))] = plans;
  }
  return kinds;
}

// Kind, members (0: any), most bytes (None: any), plan.
using RuleTuple = std::tuple<std::string, int, std::optional<int64_t>, std::string>;

PlanRule ToPlanRule(const RuleTuple& tuple) {
  const auto& [kind, members, most_bytes, plan] = tuple;
  for (int k = 0; k < kKindCount; ++k) {
    if (kind != KindName(static_cast<Kind>(k))) continue;
    for (const PlanChoice& choice : PlansOf(static_cast<Kind>(k))) {
      if (plan != PlanName(choice)) continue;
      return {static_cast<Kind>(k), members, most_bytes.value_or(PlanRule::kAnyBytes), choice};
    }
  }
  throw nb::value_error(("there is no plan " + plan + " of " + kind).c_str());
}

std::vector<PlanRule> ToPlanRules(const std::vector<RuleTuple>& tuples) {
  std::vector<PlanRule> rules;
  for (const RuleTuple& tuple : tuples) rules.push_back(ToPlanRule(tuple));
  return rules;
}

bool SetPlanRules(const std::vector<RuleTuple>& tuples) {
  const std::vector<PlanRule> rules = ToPlanRules(tuples);
  nb::gil_scoped_release release;
  return Runtime::Get().SetPlanRules(rules);
}

void Configure(int workers, double timeout_s, double stall_warning_s, double cycle_grace_s,
               const std::vector<RuleTuple>& plan_rules, bool preemption, uint64_t first_sequence) {
  RuntimeOptions options;
  options.workers = workers;
  options.timeout_ns = Nanoseconds(timeout_s, "timeout_s");
  options.stall_warning_ns = Nanoseconds(stall_warning_s, "stall_warning_s");
  options.cycle_grace_ns = Nanoseconds(cycle_grace_s, "cycle_grace_s");
  options.plan_rules = ToPlanRules(plan_rules);
  options.preemption = preemption;
  options.first_sequence = first_sequence;
  nb::gil_scoped_release release;
  Runtime::Configure(options);
}

void ConfigureGpus(const std::unordered_map<int, int64_t>& devices, int blocks,
                   int64_t memory_bytes, int64_t host_memory_bytes, bool several_processes,
                   int64_t low_latency_bytes, bool bulk, double timeout_s,
                   const std::vector<RuleTuple>& plan_rules) {
  CudaOptions options;
  for (const auto& [ordinal, id] : devices) options.devices.push_back({ordinal, id});
  options.service.blocks = static_cast<uint32_t>(blocks);
  options.service.memory_bytes = static_cast<size_t>(memory_bytes);
  options.service.host_memory_bytes = static_cast<size_t>(host_memory_bytes);
  options.service.several_processes = several_processes;
  options.service.low_latency_bytes = low_latency_bytes;
  options.service.bulk = bulk;
  options.service.timeout_ns = Nanoseconds(timeout_s, "timeout_s");
  options.service.plan_rules = ToPlanRules(plan_rules);
  nb::gil_scoped_release release;
  ConfigureCuda(options);
}

nb::dict GpuCounters() {
  gpu::ServiceCounters counters;
  nb::dict dict;
  bool is_used;
  {
    nb::gil_scoped_release release;
    is_used = CudaCounters(&counters);
  }
  if (!is_used) return dict;
  dict["submitted"] = counters.submitted;
  dict["low_latency"] = counters.posted;
  dict["completed"] = counters.completed;
  dict["failed"] = counters.failed;
  dict["relayed"] = counters.relayed;
  dict["launches"] = counters.launches;
  dict["quits"] = counters.quits;
  dict["turns"] = counters.turns;
  dict["preemptions"] = counters.preemptions;
  dict["context_saves"] = counters.saves;
  dict["context_loads"] = counters.loads;
  dict["bulk_copies"] = counters.bulk_copies;
  return dict;
}

void Shutdown() {
  ShutdownCuda();
  Runtime::Shutdown();
}

void RegisterSite(int64_t program, int32_t site, std::string operation, std::string name,
                  std::string source, std::string program_name, std::vector<int32_t> after) {
  SiteInfo info{std::move(operation), std::move(name), std::move(source), std::move(program_name),
                std::move(after)};
  nb::gil_scoped_release release;
  Runtime::Get().RegisterSite(static_cast<uint64_t>(program), site, std::move(info));
}

void JoinCluster(int process, std::unordered_map<int64_t, int> process_of, std::vector<int> host_of,
                 double peer_timeout_s) {
  const int64_t peer_timeout_ns = Nanoseconds(peer_timeout_s, "peer_timeout_s");
  Status status;
  {
    nb::gil_scoped_release release;
    status = Runtime::Get().JoinCluster(process, std::move(process_of), std::move(host_of),
                                        peer_timeout_ns);
  }
  if (!status.ok()) throw nb::value_error(status.message().c_str());
}

void AddLink(int process, const std::vector<int>& sockets, int memory) {
  Status status;
  {
    nb::gil_scoped_release release;
    status = Runtime::Get().AddLink(process, sockets, memory);
  }
  if (!status.ok()) throw std::runtime_error(status.message());
}

void SetDown(int process, std::string reason) {
  nb::gil_scoped_release release;
  Runtime::Get().SetDown(process, reason);
}

void SendNote(int process, const std::string& text) {
  Status status;
  {
    nb::gil_scoped_release release;
    status = Runtime::Get().SendNote(process, text);
  }
  if (!status.ok()) throw nb::value_error(status.message().c_str());
}

// (process, ended, in_order, text)
std::vector<std::tuple<int, bool, bool, std::string>> TakeNotes() {
  std::vector<std::tuple<int, bool, bool, std::string>> notes;
  for (Note& note : Runtime::Get().TakeNotes()) {
    notes.emplace_back(note.process, note.ended, note.in_order, std::move(note.text));
  }
  return notes;
}

void GiveUpBefore(uint32_t era, const std::string& reason) {
  nb::gil_scoped_release release;
  Runtime::Get().GiveUpBefore(era, reason);
}

void LeaveOut(int process, const std::string& reason) {
  nb::gil_scoped_release release;
  Runtime::Get().LeaveOut(process, reason);
}

int StandIn(double timeout_s) {
  const int64_t timeout_ns = Nanoseconds(timeout_s, "timeout_s");
  nb::gil_scoped_release release;
  return Runtime::Get().StandIn(timeout_ns);
}

const char* HandleStateName(uint64_t ticket, bool gpu) {
  switch (gpu ? StateOfCudaHandle(ticket) : StateOfHandle(ticket)) {
    case HandleState::kPending:
      return "pending";
    case HandleState::kFinished:
      return "finished";
    case HandleState::kGone:
      break;
  }
  return "gone";
}

// (tag, error)
std::vector<std::tuple<int32_t, std::string>> TakeEnds(double timeout_s) {
  const int64_t timeout_ns = Nanoseconds(timeout_s, "timeout_s");
  nb::gil_scoped_release release;
  std::vector<std::tuple<int32_t, std::string>> ends;
  for (TaggedEnd& end : TakeTaggedEnds(timeout_ns)) {
    ends.emplace_back(end.tag, std::move(end.error));
  }
  return ends;
}

nb::dict EntryDict(const FlightEntry& entry) {
  nb::dict dict;
  dict["device"] = entry.device;
  dict["sequence"] = entry.sequence;
  dict["operation"] = entry.operation;
  dict["name"] = entry.name;
  dict["key"] = entry.key;
  dict["program"] = entry.program;
  dict["launch"] = entry.launch;
  dict["source"] = entry.source;
  dict["dtype"] = entry.dtype;
  dict["count"] = entry.count;
  dict["bytes"] = entry.bytes;
  dict["plan"] = entry.plan;
  dict["group"] = entry.group;
  dict["absent"] = entry.absent;
  dict["state"] = entry.state;
  dict["error"] = entry.error;
  dict["blocks_device"] = entry.blocks_device;
  dict["age_s"] = entry.age_s;
  dict["wait_s"] = entry.wait_s;
  dict["total_s"] = entry.total_s;
  dict["preemptions"] = entry.preemptions;
  return dict;
}

nb::dict CountersDict(const DeviceCounters& counters) {
  nb::dict dict;
  dict["device"] = counters.device;
  dict["submitted"] = counters.submitted;
  dict["completed"] = counters.completed;
  dict["failed"] = counters.failed;
  dict["preemptions"] = counters.preemptions;
  dict["context_saves"] = counters.context_saves;
  dict["context_loads"] = counters.context_loads;
  dict["quits"] = counters.quits;
  dict["restarts"] = counters.restarts;
  dict["bytes"] = counters.bytes;
  dict["largest_wait_s"] = counters.largest_wait_s;
  return dict;
}

template <typename T, typename ToDict>
nb::list List(const std::vector<T>& values, ToDict to_dict) {
  nb::list list;
  for (const T& value : values) list.append(to_dict(value));
  return list;
}

nb::dict Report() {
  FlightReport report;
  {
    nb::gil_scoped_release release;
    report = Runtime::Get().Report();
    for (FlightEntry& entry : CudaInFlight()) report.in_flight.push_back(std::move(entry));
    std::stable_sort(report.in_flight.begin(), report.in_flight.end(),
                     [](const auto& a, const auto& b) { return a.device < b.device; });
  }
  nb::dict dict;
  dict["in_flight"] = List(report.in_flight, EntryDict);
  dict["recent"] = List(report.recent, EntryDict);
  dict["devices"] = List(report.devices, CountersDict);
  dict["gpus"] = GpuCounters();
  dict["cycles"] = report.cycles;
  dict["open_tickets"] = OpenTicketCount();
  return dict;
}

}  // namespace
}  // namespace dfccl

NB_MODULE(_core, m) {
  m.doc() = "XLA FFI handlers of jax_dfccl and its process-wide runtime.";
  m.def("registrations", &dfccl::Registrations, nb::arg("platform"),
        "{target: {stage: capsule}} for jax.ffi.register_ffi_target, platform 'cpu' or 'CUDA'.");
  m.def("type_registrations", &dfccl::TypeRegistrations, nb::arg("platform"),
        "{name: {'type_id': capsule, 'type_info': capsule}} for jax.ffi.register_ffi_type. "
        "Types must be registered before the targets, and after the backend exists.");
  m.def("configure", &dfccl::Configure, nb::kw_only(), nb::arg("workers") = 0,
        nb::arg("timeout_s") = 600.0, nb::arg("stall_warning_s") = 10.0,
        nb::arg("cycle_grace_s") = 2.0, nb::arg("plan_rules") = nb::list(),
        nb::arg("preemption") = true, nb::arg("first_sequence") = 0,
        "Options of the runtime that the next use creates (core/runtime.h RuntimeOptions).");
  m.def("configure_gpus", &dfccl::ConfigureGpus, nb::kw_only(), nb::arg("devices"),
        nb::arg("blocks"), nb::arg("memory_bytes"), nb::arg("host_memory_bytes"),
        nb::arg("several_processes"), nb::arg("low_latency_bytes"), nb::arg("bulk"),
        nb::arg("timeout_s"), nb::arg("plan_rules"),
        "{number of a GPU: global device id}, and options of their daemons, which the first call "
        "starts (cuda/service.h ServiceOptions).");
  m.def("has_gpu_kernel", &dfccl::gpu::HasKernelImage,
        "Whether this build holds the kernel of the GPUs' daemons.");
  m.def("gpu_counters", &dfccl::GpuCounters,
        "What the GPUs' daemons have done together; empty before the first call.");
  m.def("plans", &dfccl::Plans,
        "{kind: {plan: whether it may be chosen unasked: it folds in the members' order}}.");
  m.def("set_plan_rules", &dfccl::SetPlanRules, nb::arg("plan_rules"),
        "Other rules from now on; False, and nothing is changed, while anything is in flight.");
  m.def(
      "plan_rules_hash", [] { return dfccl::Runtime::Get().PlanRulesHash(); },
      "Equal in processes that choose the same plans.");
  m.def("register_site", &dfccl::RegisterSite, nb::arg("program"), nb::arg("site"),
        nb::arg("operation"), nb::arg("name"), nb::arg("source"), nb::arg("program_name"),
        nb::arg("after"), "Tells reports and errors what call `site` of `program` is.");
  m.def("cluster_join", &dfccl::JoinCluster, nb::arg("process"), nb::arg("process_of"),
        nb::arg("host_of"), nb::arg("peer_timeout_s"),
        "Tells which process of a job this one is, which process has each global device, which "
        "host each process is on (empty: not known), and how long one may be silent. Once.");
  m.def("cluster_link", &dfccl::AddLink, nb::arg("process"), nb::arg("sockets"), nb::arg("memory"),
        "Takes over connected, authenticated sockets to a process, and a shared memory file or "
        "-1.");
  m.def(
      "threads_question", [] { return dfccl::Runtime::Get().ThreadsQuestion(); },
      "A descriptor that is readable when the runtime wants to know, by threads_answer, how many "
      "threads of the user there are.");
  m.def(
      "threads_answer", [](int threads) { dfccl::Runtime::Get().AnswerThreads(threads); },
      nb::arg("threads"));
  m.def("cluster_down", &dfccl::SetDown, nb::arg("process"), nb::arg("reason"),
        "That process will never come.");
  m.def("note_send", &dfccl::SendNote, nb::arg("process"), nb::arg("text"),
        "Words for the owner of another process; they come in order.");
  m.def(
      "notes_ready", [] { return dfccl::Runtime::Get().NotesReady(); },
      "A descriptor that is readable when there are notes.");
  m.def("notes_take", &dfccl::TakeNotes,
        "Notes that came: (process, whether it has ended, whether in order, text).");
  m.def("give_up_before", &dfccl::GiveUpBefore, nb::arg("era"), nb::arg("reason"),
        "Ends calls between processes that were, or will be, launched in an earlier era.");
  m.def("begin_era", &dfccl::BeginEra, nb::arg("era"),
        "Launches are counted anew from here on, in all processes that go on together.");
  m.def("leave_out", &dfccl::LeaveOut, nb::arg("process"), nb::arg("reason"),
        "Breaks with a process, which hears why if it can.");
  m.def("stand_in", &dfccl::StandIn, nb::arg("timeout_s"),
        "For so long, takes part with zeros in what other processes call; returns how many calls.");
  m.def("begin_executable", &dfccl::BeginExecutable,
        "The next executable is about to be compiled or loaded; one at a time.");
  m.def("handle_state", &dfccl::HandleStateName, nb::arg("ticket"), nb::arg("gpu") = false,
        nb::call_guard<nb::gil_scoped_release>(), "'pending', 'finished' or 'gone'.");
  m.def(
      "handle_drop",
      [](uint64_t ticket, bool gpu) {
        return gpu ? dfccl::DropCudaHandle(ticket) : dfccl::DropHandle(ticket);
      },
      nb::arg("ticket"), nb::arg("gpu") = false, nb::call_guard<nb::gil_scoped_release>(),
      "Nobody will wait for it; False: it is gone already.");
  m.def(
      "handle_cancel",
      [](uint64_t ticket, bool gpu) {
        return gpu ? dfccl::CancelCudaHandle(ticket) : dfccl::CancelHandle(ticket);
      },
      nb::arg("ticket"), nb::arg("gpu") = false, nb::call_guard<nb::gil_scoped_release>(),
      "Ends it on all members with an error; False: it is gone or has finished.");
  m.def("take_ends", &dfccl::TakeEnds, nb::arg("timeout_s"),
        "Waits for ends of operations that were started with a tag: (tag, error or '').");
  m.def("report", &dfccl::Report, "The flight record of every device, as plain dicts and lists.");
  nb::class_<dfccl::Roofline>(m, "Roofline", "The least time an all_reduce in memory takes here.")
      .def(nb::init<int, int64_t, int>(), nb::arg("members"), nb::arg("bytes"), nb::arg("threads"))
      .def("streaming_seconds", &dfccl::Roofline::StreamingSeconds, nb::arg("repetitions"),
           nb::call_guard<nb::gil_scoped_release>(), "Median time with non-temporal stores.")
      .def("cached_seconds", &dfccl::Roofline::CachedSeconds, nb::arg("repetitions"),
           nb::call_guard<nb::gil_scoped_release>(), "Median time with normal stores.");
  m.def("shutdown", &dfccl::Shutdown, nb::call_guard<nb::gil_scoped_release>(),
        "Ends everything pending with an error and joins the runtime's threads.");
}
