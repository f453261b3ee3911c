// SPDX-License-Identifier: Apache-2.0
// The messages between the runtimes of a job, and what is done with them.
#include "core/daemon/cluster.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <mutex>
#include <set>
#include <type_traits>
#include <utility>

#include "core/daemon/clock.h"
#include "core/daemon/crew.h"
#include "core/daemon/daemon.h"
#include "core/daemon/describe.h"
#include "core/hash.h"
#include "core/identity.h"
#include "core/transport/wire.h"

namespace dfccl {
namespace {

// Longest time a poll of the transport's own thread may run daemons.
constexpr int64_t kDriveNs = 200'000;
constexpr size_t kMostTextBytes = 600;
constexpr size_t kMostErrorBytes = 2000;

enum class Topic : uint8_t {
  kPiece = 1,
  kGroup,
  kPairs,
  kSite,
  kFailure,
  kEnded,
  kStuck,
  kNote,
  kLeftOut,
};

// Writes and reads headers that hold lists and texts.
class Writer {
 public:
  explicit Writer(Topic topic) { Put(topic); }
  template <typename T>
  Writer& Put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    text_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return *this;
  }
  Writer& Put(const std::string& text, size_t most = kMostTextBytes) {
    const size_t size = std::min(text.size(), most);
    Put(static_cast<uint32_t>(size));
    text_.append(text, 0, size);
    return *this;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// Reads zeros and nothing where the header is too short; then ok() is false.
class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) { Get<Topic>(); }
  template <typename T>
  T Get() {
    T value{};
    if (text_.size() - at_ < sizeof(T)) {
      ok_ = false;
      return value;
    }
    std::memcpy(&value, text_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }
  std::string GetText() {
    const auto size = Get<uint32_t>();
    if (size > text_.size() - at_) {
      ok_ = false;
      return "";
    }
    at_ += size;
    return text_.substr(at_ - size, size);
  }
  bool ok() const { return ok_; }

 private:
  const std::string& text_;
  size_t at_ = 0;
  bool ok_ = true;
};

// Of a buffer of that kind.
int64_t ElementSize(const Signature& signature, BufferKind kind) {
  return DTypeSize(kind == BufferKind::kScratch ? AccumulationType(signature.dtype)
                                                : signature.dtype);
}

}  // namespace

// The header of a piece of data, or of news of a member without data. The name
// of the call follows in a member's first piece.
struct Cluster::Piece {
  Topic topic = Topic::kPiece;
  BufferKind kind = BufferKind::kSource;  // where it goes:
  bool first = false;
  bool last = false;
  uint16_t member = 0;       // whose piece it is
  uint16_t destination = 0;  // whose buffer
  uint16_t name_bytes = 0;
  uint32_t value = 0;  // of the member's word, once it is there; 0: as before
  int32_t site = -1;
  int64_t offset = 0;  // in bytes
  CollectiveId id;
  uint64_t group = 0;

  // Of a member's first piece:
  Kind collective = Kind::kBarrier;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kF32;
  bool has_key = false;
  int32_t root = 0;
  int64_t count = 0;
  uint64_t pairs = 0;  // 0: none
  uint64_t shape = 0;
  uint64_t program = 0;
  uint64_t launch = 0;
  uint64_t occurrence = 0;
  int64_t key = 0;
  int64_t device = 0;
  int64_t kept_begin = 0;
  int64_t kept_bytes = 0;
};

Cluster::~Cluster() {
  Close();
  if (question_ >= 0) close(question_);
  if (notes_ready_ >= 0) close(notes_ready_);
}

Status Cluster::Join(int process, int processes, int devices_here,
                     const TransportOptions& options) {
  if (!peers_.empty()) return Status(StatusCode::kInvalidArgument, "it has joined a job before");
  process_ = process;
  devices_here_ = devices_here;
  for (int i = 0; i < processes; ++i) peers_.push_back(std::make_unique<Peer>());
  stuck_.resize(processes);
  for (int i = 0; i < processes; ++i) stuck_[i].process = i;
  told_on_.resize(processes);
  question_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  notes_ready_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  transport_ = Transport::New(process, this, options);
  if (transport_ == nullptr) return Status(StatusCode::kInternal, "the system is out of files");
  joined_.StoreRelease(transport_.get());
  return Status();
}

Status Cluster::AddLink(int process, const std::vector<int>& sockets, int memory) {
  // Acquire: partner is the release in Join.
  Transport* transport = joined_.LoadAcquire();
  if (transport == nullptr || process < 0 || static_cast<size_t>(process) >= peers_.size()) {
    return Status(StatusCode::kInvalidArgument,
                  "a link to process " + std::to_string(process) + " of an unknown job");
  }
  return transport->AddLink(process, sockets, memory);
}

void Cluster::SetDown(int process, const Status& status) {
  Transport* transport = joined_.LoadAcquire();
  if (transport != nullptr) transport->SetDown(process, status);
}

void Cluster::Close() {
  Transport* transport = joined_.LoadAcquire();
  if (transport != nullptr) transport->Close();
}

void Cluster::BeginPolling() {
  Transport* transport = joined_.LoadAcquire();
  if (transport != nullptr) transport->BeginPolling();
}

void Cluster::EndPolling() {
  Transport* transport = joined_.LoadAcquire();
  if (transport != nullptr) transport->EndPolling();
}

bool Cluster::Poll() {
  Transport* transport = joined_.LoadAcquire();
  return transport != nullptr && transport->Poll();
}

void Cluster::BeginPoll() { environment_.crew->BeginDrive(); }

void Cluster::EndPoll() {
  environment_.crew->Drive(nullptr, NowNs() + kDriveNs);
  environment_.crew->EndDrive();
}

// What a send with data moves, and to which byte of its destination.
struct Cluster::Payload {
  const char* data = nullptr;
  int64_t bytes = 0;
  int64_t offset = 0;
};

Cluster::Payload Cluster::PayloadOf(const Operation& operation, const Step& step) {
  const StepList& list = operation.fixed.list;
  const Signature& signature = operation.signature;
  const Slot& slot = *operation.slot;
  const BufferRef& from = list.refs[step.source_begin];
  const BufferRef& to = list.refs[step.destination_begin];
  const auto* buffer = static_cast<const char*>(from.kind == BufferKind::kSource   ? slot.source
                                                : from.kind == BufferKind::kResult ? slot.result
                                                                                   : slot.scratch);
  const int64_t size = ElementSize(signature, from.kind);
  const int64_t block_bytes = signature.count * size;
  if (signature.kind == Kind::kRaggedAllToAll) {
    const RaggedSlot& ragged = *slot.ragged;
    if (from.block == ragged.members) {
      return {reinterpret_cast<const char*>(&ragged), RaggedSlot::Bytes(operation.group->size()),
              0};
    }
    return {buffer + ragged.input_offsets()[to.member] * block_bytes,
            ragged.send_sizes()[to.member] * block_bytes,
            ragged.output_offsets()[to.member] * block_bytes};
  }
  const int64_t align = operation.fixed.align;
  const int64_t begin = ChunkStart(signature.count, step.chunk_begin, list.chunk_count, align);
  const int64_t end = ChunkStart(signature.count, step.chunk_end, list.chunk_count, align);
  return {buffer + from.block * block_bytes + begin * size, (end - begin) * size,
          to.block * block_bytes + begin * size};
}

void Cluster::Send(Operation* operation, const Step& step) {
  const Group& group = *operation->group;
  const Signature& signature = operation->signature;
  const int process = group.processes[step.member];
  const StepList& list = operation->fixed.list;
  Piece piece;
  piece.first = step.first;
  piece.last = step.finalize;
  piece.member = operation->member;
  piece.value = step.value;
  piece.id = operation->record->id;
  piece.group = group.hash;
  const bool has_data = step.source_begin < step.source_end;
  Payload payload;
  if (has_data) {
    payload = PayloadOf(*operation, step);
    const BufferRef& to = list.refs[step.destination_begin];
    piece.kind = to.kind;
    piece.destination = to.member;
    piece.offset = payload.offset;
  }
  char header[sizeof(Piece) + kMostTextBytes];
  if (piece.first) {
    const OperationInfo& info = operation->info;
    TellAbout(process, *operation);
    piece.collective = signature.kind;
    piece.op = signature.op;
    piece.dtype = signature.dtype;
    piece.root = signature.root;
    piece.count = signature.count;
    piece.shape = signature.shape;
    if (signature.pairs != nullptr) piece.pairs = signature.pairs->hash;
    piece.program = info.program;
    piece.launch = info.launch;
    piece.occurrence = info.occurrence;
    piece.site = info.site;
    piece.has_key = info.has_key;
    piece.key = info.key;
    piece.device = info.device;
    int64_t kept_begin = INT64_MAX, kept_end = 0;
    for (uint32_t i = 0; i < list.step_count; ++i) {
      const Step& send = list.steps[i];
      if (send.kind != StepKind::kSend || send.member != step.member ||
          send.source_begin == send.source_end) {
        continue;
      }
      if (list.refs[send.destination_begin].kind != BufferKind::kSource) continue;
      const Payload kept = PayloadOf(*operation, send);
      kept_begin = std::min(kept_begin, kept.offset);
      kept_end = std::max(kept_end, kept.offset + kept.bytes);
    }
    if (kept_begin < kept_end) {
      piece.kept_begin = kept_begin;
      piece.kept_bytes = kept_end - kept_begin;
    }
    if (info.name != nullptr) {
      piece.name_bytes = static_cast<uint16_t>(std::min(info.name->size(), kMostTextBytes));
      std::memcpy(header + sizeof(Piece), info.name->data(), piece.name_bytes);
    }
  }
  std::memcpy(header, &piece, sizeof(piece));

  OutgoingMessage message;
  message.header = header;
  message.header_bytes = static_cast<uint32_t>(sizeof(Piece) + piece.name_bytes);
  message.payload = payload.data;
  message.payload_bytes = payload.bytes;
  message.priority = std::min(operation->priority, kFirst - 1);
  message.owner = payload.bytes > 0 ? operation->slot : nullptr;
  // The operation may end once the last send has left; its slot stays until Sent is
  // through with it.
  if (has_data) operation->record->remaining.FetchAddAcqRel(1);
  bool left = false;
  const bool posted = joined_.LoadAcquire()->Post(process, message, &left);
  if (has_data && (left || !posted || payload.bytes == 0)) Sent(operation->slot);
}

void Cluster::Sent(void* owner) {
  auto& slot = *static_cast<Slot*>(owner);
  // SeqCst: partners are the looks in Daemon::Machine.
  const uint32_t sent = slot.sent.FetchAddSeqCst(1) + 1;
  if (slot.sleep.TryWake(kOwnSends, sent)) slot.operation->daemon->Wake(slot.operation);
  if (slot.record->remaining.FetchSubAcqRel(1) == 1) environment_.table->Free(slot.record);
}

void Cluster::Cancel(Operation* operation) {
  Transport* transport = joined_.LoadAcquire();
  if (transport == nullptr) return;
  const Group& group = *operation->group;
  for (int process : group.processes) {
    if (process != process_) transport->Cancel(process, operation->slot);
  }
}

void Cluster::Tell(int process, const std::string& header, int32_t priority) {
  OutgoingMessage message;
  message.header = header.data();
  message.header_bytes = static_cast<uint32_t>(header.size());
  message.priority = priority;
  joined_.LoadAcquire()->Post(process, message);
}

void Cluster::TellAllMet(const std::string& header, int32_t priority) {
  for (size_t process = 0; process < peers_.size(); ++process) {
    if (peers_[process]->met.LoadRelaxed() != 0) Tell(static_cast<int>(process), header, priority);
  }
}

// With the peer's lock held, so that no message that refers to it is earlier.
void Cluster::TellGroup(int process, const Group& group) {
  if (!peers_[process]->told.insert(MixBits(group.hash)).second) return;
  peers_[process]->met.StoreRelaxed(1);
  Writer writer(Topic::kGroup);
  for (int64_t member : group.members) writer.Put(member);
  Tell(process, writer.text());
}

void Cluster::TellAbout(int process, const Operation& operation) {
  const Group& group = *operation.group;
  const Pairs* pairs = operation.signature.pairs;
  const OperationInfo& info = operation.info;
  const uint64_t site = MixBits(info.program) + static_cast<uint32_t>(info.site);
  Peer& peer = *peers_[process];
  std::lock_guard<SpinLock> lock(peer.lock);
  const uint64_t all = MixBits(group.hash ^ (pairs == nullptr ? 0 : MixBits(pairs->hash))) ^ site;
  if (!peer.told.insert(MixBits(all)).second) return;
  TellGroup(process, group);
  if (pairs != nullptr && peer.told.insert(pairs->hash).second) {
    Writer writer(Topic::kPairs);
    for (const auto& [source, target] : pairs->list) {
      writer.Put(static_cast<int32_t>(source)).Put(static_cast<int32_t>(target));
    }
    Tell(process, writer.text());
  }
  if (info.site >= 0 && peer.told.insert(site).second) {
    const SiteInfo text = environment_.sites->Find(info.program, info.site);
    Tell(process, Writer(Topic::kSite)
                      .Put(info.program)
                      .Put(info.site)
                      .Put(text.operation)
                      .Put(text.name)
                      .Put(text.source)
                      .Put(text.program)
                      .text());
  }
}

void Cluster::TellFailed(const RecordTable::Failure& failure) {
  if (joined_.LoadAcquire() == nullptr) return;
  Writer writer(Topic::kFailure);
  writer.Put(failure.id)
      .Put(failure.group->hash)
      .Put(failure.status.code())
      .Put(failure.name != nullptr)
      .Put(failure.key)
      .Put(failure.occurrence)
      .Put(failure.program)
      .Put(failure.launch)
      .Put(failure.name != nullptr ? *failure.name : std::string())
      .Put(failure.status.message(), kMostErrorBytes);
  for (int member : failure.absent) writer.Put(static_cast<uint16_t>(member));
  for (int process : failure.group->processes) {
    if (process == process_) continue;
    std::lock_guard<SpinLock> lock(peers_[process]->lock);
    TellGroup(process, *failure.group);
    Tell(process, writer.text());
  }
}

void Cluster::TellEnded(const Ended& ended) {
  if (joined_.LoadAcquire() == nullptr) return;
  const std::string text = Writer(Topic::kEnded)
                               .Put(ended.device)
                               .Put(ended.program)
                               .Put(ended.launch)
                               .Put(ended.status.code())
                               .Put(ended.status.message(), kMostErrorBytes)
                               .text();
  TellAllMet(text);
}

Cluster::MustEnd Cluster::TellStuck(uint64_t words, uint64_t activity,
                                    std::vector<DeviceWait> waits) {
  // Of one process, so that a message can hold it; and those told on at a time.
  constexpr size_t kMostWaits = 12;
  constexpr size_t kMostAwaited = 16;
  constexpr size_t kMostCallBytes = 150;
  constexpr size_t kMostToldOn = 16;
  // With several devices XLA runs the programs of a process one after the other; with
  // one, those of one thread.
  const bool serial = devices_here_ > 1 || threads_.LoadRelaxed() == 1;
  if (!waits.empty() && devices_here_ == 1) {
    threads_.StoreRelaxed(0);
    const uint64_t one = 1;
    const ssize_t written = write(question_, &one, sizeof(one));
    static_cast<void>(written);
  }
  std::set<int> awaited;
  if (waits.size() > kMostWaits) waits.resize(kMostWaits);
  for (DeviceWait& wait : waits) {
    if (wait.awaits.size() > kMostAwaited) wait.awaits.resize(kMostAwaited);
    for (const int64_t device : wait.awaits) awaited.insert(ProcessOf(device));
  }
  const auto text_of = [&](const StuckProcess& process) {
    Writer writer(Topic::kStuck);
    writer.Put(process.process).Put(process.activity).Put(process.count).Put(process.serial);
    writer.Put(process.sees).Put(static_cast<uint32_t>(process.waits.size()));
    for (const DeviceWait& wait : process.waits) {
      writer.Put(wait.device).Put(wait.id).Put(wait.call, kMostCallBytes);
      writer.Put(static_cast<uint32_t>(wait.awaits.size()));
      for (const int64_t device : wait.awaits) writer.Put(device);
    }
    return writer.text();
  };
  MustEnd ends;
  std::string own_text;
  std::vector<std::pair<int, std::string>> others;
  {
    std::lock_guard<SpinLock> lock(stuck_lock_);
    StuckProcess& own = stuck_[process_];
    own = {process_, activity, own.count + 1, serial, std::move(waits)};
    if (!own.waits.empty()) {
      const std::vector<StuckCycle> cycles = FindStuckCycles(stuck_);
      for (const StuckCycle& cycle : cycles) {
        if (own.sees == 0 && cycle.Has(process_) && cycle.HeardDirectly(process_, words)) {
          own.sees = cycle.Hash();
        }
      }
      ends = MustEndHere(cycles);
      for (size_t i = 0; i < stuck_.size() && others.size() < kMostToldOn; ++i) {
        const size_t process = next_told_on_;
        next_told_on_ = (next_told_on_ + 1) % stuck_.size();
        const StuckProcess& other = stuck_[process];
        if (&other == &own || other.count == told_on_[process]) continue;
        told_on_[process] = other.count;
        others.emplace_back(other.process, text_of(other));
      }
    }
    own_text = text_of(own);
  }
  TellAllMet(own_text, kLast);
  for (const int process : awaited) {
    if (process == process_) continue;
    for (const auto& [about, text] : others) {
      if (about != process) Tell(process, text);
    }
  }
  return ends;
}

// With the lock of stuck_.
Cluster::MustEnd Cluster::MustEndHere(const std::vector<StuckCycle>& cycles) const {
  MustEnd ends;
  for (const StuckCycle& cycle : cycles) {
    const uint64_t hash = cycle.Hash();
    const bool agreed =
        std::all_of(cycle.links.begin(), cycle.links.end(),
                    [hash](const StuckCycle::Link& link) { return link.process->sees == hash; });
    if (!agreed || cycle.FirstProcess() != process_) continue;
    ends.why = Describe(cycle);
    for (const StuckCycle::Link& link : cycle.links) {
      if (link.process->process == process_) ends.ids.push_back(link.wait->id);
    }
    break;  // the others next time
  }
  return ends;
}

uint64_t Cluster::StuckWords() {
  std::lock_guard<SpinLock> lock(stuck_lock_);
  return stuck_words_;
}

void Cluster::HearStuck(int from, const std::string& header) {
  Reader reader(header);
  StuckProcess told;
  told.process = reader.Get<int>();
  told.activity = reader.Get<uint64_t>();
  told.count = reader.Get<uint64_t>();
  told.serial = reader.Get<bool>();
  told.sees = reader.Get<uint64_t>();
  const auto waits = reader.Get<uint32_t>();
  for (uint32_t i = 0; i < waits && reader.ok(); ++i) {
    DeviceWait wait;
    wait.device = reader.Get<int64_t>();
    wait.id = reader.Get<CollectiveId>();
    wait.call = reader.GetText();
    const auto awaited = reader.Get<uint32_t>();
    for (uint32_t j = 0; j < awaited && reader.ok(); ++j) {
      wait.awaits.push_back(reader.Get<int64_t>());
    }
    told.waits.push_back(std::move(wait));
  }
  const int process = told.process;
  if (!reader.ok() || process == process_ || process < 0) return;
  if (static_cast<size_t>(process) >= stuck_.size()) return;
  std::lock_guard<SpinLock> lock(stuck_lock_);
  StuckProcess& known = stuck_[process];
  if (from == process) {
    known.direct_activity = told.activity;
    known.direct_word = ++stuck_words_;
  }
  // It may have come by several ways.
  if (told.count <= known.count) return;
  told.direct_activity = known.direct_activity;
  told.direct_word = known.direct_word;
  known = std::move(told);
}

void Cluster::AnswerThreads(int threads) {
  uint64_t asked;
  const ssize_t got = read(question_, &asked, sizeof(asked));
  static_cast<void>(got);
  threads_.StoreRelaxed(threads);
}

Status Cluster::SendNote(int process, const std::string& text) {
  Transport* transport = joined_.LoadAcquire();
  if (transport == nullptr || process < 0 || static_cast<size_t>(process) >= peers_.size() ||
      process == process_ || text.size() > Runtime::kMostNoteBytes) {
    return Status(StatusCode::kInvalidArgument, "a note that is too long, or to nobody");
  }
  Tell(process, Writer(Topic::kNote).Put(text, Runtime::kMostNoteBytes).text());
  return Status();
}

void Cluster::HearNote(Note note) {
  std::lock_guard<SpinLock> lock(notes_lock_);
  notes_.push_back(std::move(note));
  const uint64_t one = 1;
  const ssize_t written = write(notes_ready_, &one, sizeof(one));
  static_cast<void>(written);
}

std::vector<Note> Cluster::TakeNotes() {
  std::lock_guard<SpinLock> lock(notes_lock_);
  uint64_t count;
  const ssize_t got = read(notes_ready_, &count, sizeof(count));
  static_cast<void>(got);
  return std::exchange(notes_, {});
}

void Cluster::GiveUpBefore(uint32_t era, const Status& status) {
  {
    std::lock_guard<SpinLock> lock(known_lock_);
    given_up_ = status;
  }
  // SeqCst: whoever joins a record after this looks (FailIfGivenUp); who joined
  // before is found below.
  given_up_before_.StoreSeqCst(era);
  const auto given_up = [era](Record& record) {
    if (record.group->placement == nullptr || record.failed.LoadRelaxed() != 0) return false;
    for (int i = 0; i < record.members(); ++i) {
      const Slot& slot = record.slots()[i];
      if (slot.arrived && EraOf(slot.info.launch) < era) return true;
    }
    return false;
  };
  for (const RecordView& view : environment_.table->View(given_up)) {
    environment_.table->Fail(view.id, view.group, status);
  }
}

void Cluster::FailIfGivenUp(const CollectiveId& id, const Group* group, uint64_t launch) {
  if (EraOf(launch) >= given_up_before_.LoadSeqCst()) return;
  Status status;
  {
    std::lock_guard<SpinLock> lock(known_lock_);
    status = given_up_;
  }
  environment_.table->Fail(id, group, status);
}

void Cluster::LeaveOut(int process, const Status& status) {
  if (joined_.LoadAcquire() == nullptr) return;
  Tell(process, Writer(Topic::kLeftOut).Put(status.message(), kMostErrorBytes).text());
  SetDown(process, status);
}

void Cluster::HearGroup(const std::string& header) {
  Reader reader(header);
  std::vector<int64_t> members((header.size() - sizeof(Topic)) / sizeof(int64_t));
  for (int64_t& member : members) member = reader.Get<int64_t>();
  const Group* group = InternGroup(members);
  std::lock_guard<SpinLock> lock(known_lock_);
  groups_[group->hash] = group;
}

void Cluster::HearPairs(const std::string& header) {
  Reader reader(header);
  std::vector<std::pair<int, int>> list((header.size() - sizeof(Topic)) / (2 * sizeof(int32_t)));
  for (auto& [source, target] : list) {
    source = reader.Get<int32_t>();
    target = reader.Get<int32_t>();
  }
  const Pairs* pairs = InternPairs(std::move(list));
  std::lock_guard<SpinLock> lock(known_lock_);
  pairs_[pairs->hash] = pairs;
}

void Cluster::HearSite(const std::string& header) {
  Reader reader(header);
  const auto program = reader.Get<uint64_t>();
  const auto site = reader.Get<int32_t>();
  SiteInfo info;
  info.operation = reader.GetText();
  info.name = reader.GetText();
  info.source = reader.GetText();
  info.program = reader.GetText();
  if (reader.ok()) environment_.sites->RegisterIfUnknown(program, site, std::move(info));
}

void Cluster::HearFailure(const std::string& header) {
  Reader reader(header);
  RecordTable::Failure failure{};
  failure.id = reader.Get<CollectiveId>();
  failure.group = GroupOf(reader.Get<uint64_t>());
  const auto code = reader.Get<StatusCode>();
  const bool named = reader.Get<bool>();
  failure.key = reader.Get<int64_t>();
  failure.occurrence = reader.Get<uint64_t>();
  failure.program = reader.Get<uint64_t>();
  failure.launch = reader.Get<uint64_t>();
  const std::string name = reader.GetText();
  failure.status = Status(code, reader.GetText());
  if (!reader.ok() || failure.group == nullptr) return;
  if (named) failure.name = &name;
  for (;;) {
    const auto member = reader.Get<uint16_t>();
    if (!reader.ok()) break;
    if (member < failure.group->size()) failure.absent.push_back(member);
  }
  environment_.table->FailTold(failure);
}

void Cluster::HearEnded(const std::string& header) {
  Reader reader(header);
  Ended ended{};
  ended.device = reader.Get<int64_t>();
  ended.program = reader.Get<uint64_t>();
  ended.launch = reader.Get<uint64_t>();
  const auto code = reader.Get<StatusCode>();
  ended.status = Status(code, reader.GetText());
  if (reader.ok()) environment_.ended(ended);
}

const Group* Cluster::GroupOf(uint64_t hash) {
  std::lock_guard<SpinLock> lock(known_lock_);
  const auto found = groups_.find(hash);
  return found == groups_.end() ? nullptr : found->second;
}

void Cluster::Refuse(int process, const char* what) {
  SetDown(process, Status(StatusCode::kInternal,
                          std::string("sent what this version does not understand: ") + what));
}

// A member's first piece: it enters the record. False: the piece is wrong.
bool Cluster::Arrive(int process, const Piece& piece, const char* name) {
  RecordTable::RemoteMember member{};
  member.group = GroupOf(piece.group);
  if (member.group == nullptr || piece.member >= member.group->size() ||
      member.group->IsHere(piece.member) || member.group->ProcessOf(piece.member) != process) {
    return false;
  }
  member.id = piece.id;
  member.member = piece.member;
  Signature& signature = member.signature;
  signature.kind = piece.collective;
  signature.op = piece.op;
  signature.dtype = piece.dtype;
  signature.count = piece.count;
  signature.root = piece.root;
  signature.shape = piece.shape;
  if (piece.pairs != 0) {
    std::lock_guard<SpinLock> lock(known_lock_);
    const auto found = pairs_.find(piece.pairs);
    if (found == pairs_.end()) return false;
    signature.pairs = found->second;
  }
  OperationInfo& info = member.info;
  info.device = piece.device;
  info.program = piece.program;
  info.launch = piece.launch;
  info.occurrence = piece.occurrence;
  info.key = piece.key;
  info.has_key = piece.has_key;
  info.site = piece.site;
  if (piece.name_bytes > 0) info.name = InternName({name, piece.name_bytes});
  info.submit_ns = NowNs();
  info.timeout_ns = INT64_MAX / 2;  // its own process sees to that
  member.kept_begin = piece.kept_begin;
  member.kept_bytes = piece.kept_bytes;
  const Shape shape = environment_.shape_of(signature, *member.group);
  if (shape.chosen.plan == nullptr) return false;
  const bool is_ragged = signature.kind == Kind::kRaggedAllToAll;
  if (is_ragged && piece.kept_bytes != RaggedSlot::Bytes(member.group->size())) return false;
  switch (environment_.table->JoinFromElsewhere(member, shape)) {
    case RecordTable::Arrival::kJoined:
      FailIfGivenUp(member.id, member.group, info.launch);
      if (stands_in_.LoadSeqCst() != 0) environment_.announced();
      return true;
    case RecordTable::Arrival::kFailedBefore:
      return true;
    case RecordTable::Arrival::kTwice:
      return false;
    case RecordTable::Arrival::kMismatch:
      break;
  }
  FailMismatch(environment_.table, *environment_.describer, member.id, member.group, info,
               signature);
  return true;
}

Record* Cluster::BeginPiece(int process, const Piece& piece, const char* name, int64_t offset) {
  if (offset == 0 && piece.first && !Arrive(process, piece, name)) {
    Refuse(process, "an arrival");
    return nullptr;
  }
  const Group* group = GroupOf(piece.group);
  if (group == nullptr || piece.member >= group->size()) {
    Refuse(process, "a piece");
    return nullptr;
  }
  return environment_.table->BeginReceive(piece.id, group, piece.member);
}

// nullptr: it does not fit there.
char* Cluster::Destination(const Piece& piece, Record* record, int64_t payload_bytes) {
  if (piece.offset < 0 || piece.destination >= record->members()) return nullptr;
  const Slot& slot = record->slots()[piece.destination];
  if (piece.kind == BufferKind::kSource) {
    if (piece.destination != piece.member || slot.kept == nullptr) return nullptr;
    const int64_t at = piece.offset - slot.kept_begin;
    if (at < 0 || payload_bytes > slot.kept_bytes - at) return nullptr;
    return static_cast<char*>(slot.kept) + at;
  }
  // Its owner has said that it is here, by a message that was sent after the
  // slot was filled.
  if (!slot.progress.Reached(kArrived) || slot.operation == nullptr) return nullptr;
  const bool is_result = piece.kind == BufferKind::kResult;
  if (!is_result && piece.kind != BufferKind::kScratch) return nullptr;
  const int64_t bytes = is_result
                            ? slot.operation->result_bytes
                            : slot.operation->fixed.list.scratch_slots * record->signature.count *
                                  ElementSize(record->signature, BufferKind::kScratch);
  if (payload_bytes > bytes - piece.offset) return nullptr;
  return static_cast<char*>(is_result ? slot.result : slot.scratch) + piece.offset;
}

void* Cluster::BeginSlice(int process, const void* header, uint32_t header_bytes,
                          int64_t payload_bytes, int64_t offset, int64_t /*bytes*/) {
  Peer& peer = *peers_[process];
  peer.receiving = nullptr;
  Piece piece;
  if (header_bytes < sizeof(piece)) return nullptr;
  std::memcpy(&piece, header, sizeof(piece));
  if (piece.topic != Topic::kPiece || header_bytes != sizeof(piece) + piece.name_bytes) {
    return nullptr;
  }
  Record* record =
      BeginPiece(process, piece, static_cast<const char*>(header) + sizeof(piece), offset);
  if (record == nullptr) return nullptr;
  char* destination = Destination(piece, record, payload_bytes);
  if (destination == nullptr) {
    environment_.table->EndReceive(record, piece.member, /*last=*/false);
    Refuse(process, "a piece that does not fit");
    return nullptr;
  }
  peer.receiving = record;
  return destination + offset;
}

void Cluster::EndSlice(int process, const void* header, uint32_t header_bytes,
                       int64_t payload_bytes, int64_t /*offset*/, int64_t /*bytes*/, bool last) {
  const auto* text = static_cast<const char*>(header);
  Topic topic;
  std::memcpy(&topic, text, sizeof(topic));
  Piece piece;
  switch (topic) {
    case Topic::kPiece:
      if (header_bytes < sizeof(piece)) return Refuse(process, "a short header");
      std::memcpy(&piece, header, sizeof(piece));
      if (header_bytes != sizeof(piece) + piece.name_bytes) {
        return Refuse(process, "a header of another size");
      }
      break;
    case Topic::kGroup:
      peers_[process]->met.StoreRelaxed(1);
      return HearGroup({text, header_bytes});
    case Topic::kPairs:
      return HearPairs({text, header_bytes});
    case Topic::kSite:
      return HearSite({text, header_bytes});
    case Topic::kFailure:
      return HearFailure({text, header_bytes});
    case Topic::kEnded:
      return HearEnded({text, header_bytes});
    case Topic::kStuck:
      return HearStuck(process, {text, header_bytes});
    case Topic::kNote: {
      const std::string note(text, header_bytes);
      return HearNote({process, /*ended=*/false, /*in_order=*/false, Reader(note).GetText()});
    }
    case Topic::kLeftOut: {
      const std::string reason(text, header_bytes);
      return SetDown(process, Status(StatusCode::kAborted, Reader(reason).GetText()));
    }
    default:
      return Refuse(process, "an unknown topic");
  }
  Peer& peer = *peers_[process];
  Record* record = payload_bytes > 0 ? std::exchange(peer.receiving, nullptr)
                                     : BeginPiece(process, piece, text + sizeof(piece), 0);
  if (record == nullptr) return;
  if (last && piece.value != 0) SignalProgress(record, piece.member, piece.value);
  environment_.table->EndReceive(record, piece.member, last && piece.last);
}

void Cluster::Down(int process, const Status& status) {
  HearNote({process, /*ended=*/true, status.message() == LeftJob().message(), status.message()});
  any_down_.StoreSeqCst(1);
  {
    std::lock_guard<SpinLock> lock(stuck_lock_);
    stuck_[process].waits.clear();
  }
  FailWhatNeeds(process, status, [](const Record& record) {
    return record.group->placement != nullptr && record.failed.LoadRelaxed() == 0;
  });
}

void Cluster::FailIfGone(const CollectiveId& id, const Group* group, uint64_t launch) {
  FailIfGivenUp(id, group, launch);
  if (any_down_.LoadSeqCst() == 0) return;
  Status status;
  for (int process : group->processes) {
    if (process == process_ || !joined_.LoadAcquire()->IsDown(process, &status)) continue;
    FailWhatNeeds(process, status,
                  [&](const Record& record) { return record.id == id && record.group == group; });
  }
}

template <typename Condition>
void Cluster::FailWhatNeeds(int process, const Status& status, const Condition& condition) {
  const auto needs = [&](Record& record) {
    if (!condition(record)) return false;
    for (int i = 0; i < record.members(); ++i) {
      if (record.group->ProcessOf(i) == process && !record.slots()[i].received_all) return true;
    }
    return false;
  };
  for (const RecordView& view : environment_.table->View(needs)) {
    environment_.table->Fail(
        view.id, view.group,
        Status(StatusCode::kAborted, environment_.describer->Gone(view, process, status)));
  }
}

}  // namespace dfccl
