// SPDX-License-Identifier: Apache-2.0
// Text for people: every message and report line about operations is made
// here, from copies, so that it can be made while the job is stuck.
#ifndef DFCCL_CORE_DAEMON_DESCRIBE_H_
#define DFCCL_CORE_DAEMON_DESCRIBE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/daemon/daemon.h"
#include "core/daemon/record.h"
#include "core/daemon/stuck.h"
#include "core/plans/choice.h"
#include "core/runtime.h"

namespace dfccl {

// What the lowering told about call sites. Thread-safe.
class SiteTable {
 public:
  void Register(uint64_t program, int32_t site, SiteInfo info);
  void RegisterIfUnknown(uint64_t program, int32_t site, SiteInfo info);
  // `program` is `lowered`, loaded for some devices: it has the same sites.
  void RegisterLoaded(uint64_t program, uint64_t lowered);
  SiteInfo Find(uint64_t program, int32_t site) const;  // empty if unknown

  enum class Dependence : uint8_t { kUnknown, kNone, kData };
  // Whether the call that `wanted` is, as made by program `program`, needs the
  // result of that program's site `blocked_in`.
  Dependence NeedsResultOf(const OperationInfo& wanted, uint64_t program, int32_t blocked_in) const;

 private:
  uint64_t Lowered(uint64_t program) const;

  mutable std::mutex mutex_;
  std::map<std::pair<uint64_t, int32_t>, SiteInfo> sites_;
  std::map<uint64_t, uint64_t> lowered_;  // by loaded program
};

// Devices that wait for each other: in `chain`, each one's operation lacks the
// next one's device, and the last one's lacks the first's.
struct WaitCycle {
  struct Link {
    const RecordView* record;
    int member;  // who waits
  };
  std::vector<Link> chain;
};
// The cycles among incomplete records whose operations block a program. Every
// device is in at most one of those returned.
std::vector<WaitCycle> FindCycles(const std::vector<RecordView>& records);

class Describer {
 public:
  using Choose = std::function<PlanChoice(const Signature& signature, const Group& group)>;
  Describer(const SiteTable* sites, Choose choose) : sites_(sites), choose_(std::move(choose)) {}

  std::string Timeout(const RecordView& record, int64_t now_ns) const;
  std::string Stall(const RecordView& record, int64_t now_ns) const;
  std::string Mismatch(const RecordView& record, const OperationInfo& other,
                       const Signature& other_signature) const;
  std::string Twice(const OperationInfo& info, const Signature& signature) const;
  std::string Wrong(const OperationInfo& info, const Signature& signature,
                    const std::string& fault) const;
  std::string Cycle(const WaitCycle& cycle) const;
  // What a member waits for.
  DeviceWait Wait(const RecordView& record, int member) const;
  std::string Gone(const RecordView& record, int process, const Status& how) const;

  FlightEntry Entry(const RecordView& record, int member, int64_t now_ns) const;
  FlightEntry Entry(const Flight& flight, int64_t now_ns) const;

 private:
  std::string Call(const OperationInfo& info, const Signature& signature) const;
  std::string Missing(const RecordView& record, int64_t now_ns) const;
  FlightEntry Common(const OperationInfo& info, const Signature& signature, int64_t bytes,
                     const Group& group) const;

  const SiteTable* const sites_;
  const Choose choose_;
};

// Fails an instance which a member has joined with another signature.
void FailMismatch(RecordTable* table, const Describer& describer, const CollectiveId& id,
                  const Group* group, const OperationInfo& info, const Signature& signature);

}  // namespace dfccl

#endif  // DFCCL_CORE_DAEMON_DESCRIBE_H_
