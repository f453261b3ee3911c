// SPDX-License-Identifier: Apache-2.0
#include "core/transport/ucx_wire.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace dfccl {

namespace {

constexpr unsigned kMessageId = 0;
constexpr int kFramesPerRead = 16;
constexpr int kProgressPerLook = 64;
// The socket is looked at with each event, and with every so many-th read beside that.
constexpr uint32_t kReadsPerLook = 32;
constexpr uint32_t kMostAddressBytes = 1 << 20;
// How long an end waits for UCX to let go of its buffers.
constexpr std::chrono::seconds kLinger{1};

Status Unusable(const char* what, const char* why) {
  return {StatusCode::kInternal, std::string("UCX: ") + what + ": " + why};
}

}  // namespace

std::unique_ptr<UcxWire> UcxWire::New(const UcxApi* api, int socket, int64_t slice_bytes,
                                      int64_t silence_ns, Status* status) {
  std::unique_ptr<UcxWire> wire(new UcxWire(api, dup(socket), slice_bytes, silence_ns));
  *status = wire->SetUp();
  if (!status->ok()) return nullptr;
  close(socket);
  return wire;
}

UcxWire::UcxWire(const UcxApi* api, int socket, int64_t slice_bytes, int64_t silence_ns)
    : api_(api), socket_(socket), slice_bytes_(slice_bytes), silence_(silence_ns > 0) {
  acknowledgement_.wire = this;
}

// Makes the worker, and says to the peer how it is reached.
Status UcxWire::SetUp() {
  if (socket_ < 0) return Unusable("dup", std::strerror(errno));
  if (getrandom(token_.data(), token_.size(), 0) != static_cast<ssize_t>(token_.size())) {
    return Unusable("getrandom", std::strerror(errno));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  UcxWorkerParameters parameters;
  parameters.field_mask = UcxWorkerParameters::kThreadMode;
  parameters.thread_mode = UcxWorkerParameters::kSerialized;
  UcxStatus status = api_->WorkerCreate(api_->context, &parameters, &worker_);
  if (status != kUcxOk) return Unusable("no worker", api_->StatusText(status));
  status = api_->WorkerGetDescriptor(worker_, &descriptor_);
  if (status != kUcxOk) return Unusable("no events", api_->StatusText(status));
  UcxMessageHandler handler;
  handler.field_mask = UcxMessageHandler::kId | UcxMessageHandler::kFlags |
                       UcxMessageHandler::kCallback | UcxMessageHandler::kArgument;
  handler.id = kMessageId;
  handler.flags = UcxMessageHandler::kWholeMessage;
  handler.callback = [](void* argument, const void* header, size_t header_bytes, void* data,
                        size_t bytes, const UcxArrival* arrival) {
    return static_cast<UcxWire*>(argument)->OnMessage(header, header_bytes, data, bytes, *arrival);
  };
  handler.argument = this;
  status = api_->SetMessageHandler(worker_, &handler);
  if (status != kUcxOk) return Unusable("no handler", api_->StatusText(status));

  UcxAddress address;
  size_t bytes;
  status = api_->WorkerGetAddress(worker_, &address, &bytes);
  if (status != kUcxOk) return Unusable("no address", api_->StatusText(status));
  const uint32_t size = static_cast<uint32_t>(bytes);
  std::string greeting(reinterpret_cast<const char*>(&size), sizeof(size));
  greeting.append(token_.data(), token_.size());
  greeting.append(reinterpret_cast<const char*>(address), bytes);
  api_->WorkerReleaseAddress(worker_, address);
  const ssize_t sent = send(socket_, greeting.data(), greeting.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent == static_cast<ssize_t>(greeting.size())) return Status();
  // A peer that has gone is the end of the wire, not a reason to have none.
  if (sent < 0 && errno != EAGAIN) return Status();
  return Unusable("its address", "is too long for the socket");
}

UcxWire::~UcxWire() {
  if (endpoint_ != nullptr) {
    UcxRequestParameters parameters;
    parameters.mask = UcxRequestParameters::kFlags;
    parameters.flags = UcxRequestParameters::kForceClose;
    void* const request = api_->EndpointClose(endpoint_, &parameters);
    const auto deadline = std::chrono::steady_clock::now() + kLinger;
    while (((IsUcxRequest(request) && api_->RequestStatus(request) == kUcxInProgress) ||
            sending_.LoadRelaxed() != 0) &&
           std::chrono::steady_clock::now() < deadline) {
      api_->WorkerProgress(worker_);
    }
    if (IsUcxRequest(request)) api_->RequestFree(request);
  }
  for (Arrived& arrived : window_) Release(&arrived);
  if (worker_ != nullptr) api_->WorkerDestroy(worker_);
  if (socket_ >= 0) close(socket_);
}

size_t UcxWire::MostBytes() const {
  return Frame::kSize + OutgoingMessage::kMaxHeader + static_cast<size_t>(slice_bytes_);
}

// One frame less than the window: the last one is for the goodbye.
bool UcxWire::HasRoom() const {
  return endpoint_ != nullptr && sent_ - used_by_peer_ < kWindow - 1 &&
         (outgoing_.size() < kOutgoing ||
          std::any_of(
              outgoing_.begin(), outgoing_.end(),
              [](const std::unique_ptr<Outgoing>& each) { return !each->busy; }));
}

int64_t UcxWire::Room(uint32_t, int64_t payload) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!HasRoom()) ProgressOut();
  return HasRoom() ? std::min(payload, slice_bytes_) : -1;
}

void UcxWire::Write(const Frame& frame, const void* header, const void* payload) {
  std::lock_guard<std::mutex> lock(mutex_);
  WriteFrame(frame, header, payload);
}

void UcxWire::WriteFrame(const Frame& frame, const void* header, const void* payload) {
  const auto idle = std::find_if(outgoing_.begin(), outgoing_.end(),
                                 [](const auto& each) { return !each->busy; });
  Outgoing* outgoing;
  if (idle != outgoing_.end()) {
    outgoing = idle->get();
  } else {
    outgoing_.push_back(std::make_unique<Outgoing>());
    outgoing = outgoing_.back().get();
    outgoing->wire = this;
    outgoing->bytes.reset(new char[MostBytes()]);
  }
  char* at = outgoing->bytes.get();
  frame.Encode(sent_, at);
  at += Frame::kSize;
  if (frame.header_bytes > 0) std::memcpy(at, header, frame.header_bytes);
  at += frame.header_bytes;
  if (frame.bytes > 0) std::memcpy(at, payload, frame.bytes);
  at += frame.bytes;
  outgoing->envelope.number = sent_++;
  Post(outgoing, static_cast<size_t>(at - outgoing->bytes.get()));
}

void UcxWire::Post(Outgoing* outgoing, size_t bytes) {
  outgoing->envelope.token = peer_token_;
  outgoing->envelope.used = told_used_ = used_;
  outgoing->envelope.arrived = told_arrived_ = arrived_;
  outgoing->busy = true;
  sending_.FetchAddSeqCst(1);
  messages_out_.StoreRelaxed(messages_out_.LoadRelaxed() + 1);
  UcxRequestParameters parameters;
  parameters.mask = UcxRequestParameters::kCallback | UcxRequestParameters::kUserData |
                    UcxRequestParameters::kFlags;
  parameters.flags = UcxRequestParameters::kEager;
  parameters.callback = [](void* request, UcxStatus, void* user_data) {
    // An error is also the endpoint's.
    Outgoing* const left = static_cast<Outgoing*>(user_data);
    left->wire->Left(left);
    left->wire->api_->RequestFree(request);
  };
  parameters.user_data = outgoing;
  void* const result = api_->Send(endpoint_, kMessageId, &outgoing->envelope, sizeof(Envelope),
                                  outgoing->bytes.get(), bytes, &parameters);
  if (IsUcxRequest(result)) {
    armed_.StoreSeqCst(0);  // it takes progress that nobody may be awake for
    return;
  }
  if (IsUcxError(result)) {
    const auto status = static_cast<UcxStatus>(reinterpret_cast<intptr_t>(result));
    Fail(ConnectionLost(api_->StatusText(status)));
  }
  Left(outgoing);
}

// UCX does not read it any more.
void UcxWire::Left(Outgoing* outgoing) {
  outgoing->busy = false;
  sending_.FetchSubSeqCst(1);
}

void UcxWire::Acknowledge() {
  if (endpoint_ != nullptr && !acknowledgement_.busy) Post(&acknowledgement_, 0);
}

void UcxWire::Progress() {
  for (int i = 0; i < kProgressPerLook && api_->WorkerProgress(worker_) != 0; ++i) {
  }
}

// For the out side. What came or left meanwhile is an event no more, so it is made one.
void UcxWire::ProgressOut() {
  const uint64_t in = messages_in_.LoadRelaxed();
  const uint32_t sending = sending_.LoadRelaxed();
  Progress();
  const bool moved = messages_in_.LoadRelaxed() != in || sending_.LoadRelaxed() != sending;
  if (moved && armed_.LoadSeqCst() != 0) Await(EPOLLOUT);
}

void UcxWire::Flush() {
  if (!Holding()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  ProgressOut();
}

void UcxWire::Goodbye() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (endpoint_ == nullptr) return;
  Frame frame;
  frame.kind = FrameKind::kGoodbye;
  WriteFrame(frame, nullptr, nullptr);
}

bool UcxWire::Delivered() {
  std::lock_guard<std::mutex> lock(mutex_);
  Progress();
  ReadSocket();
  // The peer may be waiting for this, too.
  if (told_arrived_ != arrived_) Acknowledge();
  const bool knows = endpoint_ == nullptr || arrived_at_peer_ == sent_ || peer_left_;
  return !failure_.ok() || (knows && !Holding());
}

void UcxWire::Fail(Status status) {
  if (failure_.ok()) failure_ = std::move(status);
}

// Within Progress: something has come.
UcxStatus UcxWire::OnMessage(const void* header, size_t header_bytes, void* data, size_t bytes,
                             const UcxArrival& arrival) {
  Envelope envelope;
  if (header_bytes != sizeof(envelope)) return kUcxOk;
  std::memcpy(&envelope, header, sizeof(envelope));
  if (envelope.token != token_) return kUcxOk;  // a stranger
  messages_in_.StoreRelaxed(messages_in_.LoadRelaxed() + 1);
  if (envelope.used > sent_ || envelope.arrived > sent_) {
    Fail(CorruptFrame("more used than sent"));
    return kUcxOk;
  }
  used_by_peer_ = std::max(used_by_peer_, envelope.used);
  arrived_at_peer_ = std::max(arrived_at_peer_, envelope.arrived);
  if (bytes == 0) return kUcxOk;
  Arrived& arrived = window_[envelope.number % kWindow];
  const bool rendezvous = (arrival.attributes & UcxArrival::kRendezvous) != 0;
  if (envelope.number < used_ || envelope.number - used_ >= kWindow || arrived.data != nullptr ||
      bytes < Frame::kSize || bytes > MostBytes() || rendezvous) {
    Fail(CorruptFrame("a message that cannot be"));
    return kUcxOk;
  }
  const bool keeps = (arrival.attributes & UcxArrival::kKeepable) != 0;
  if (!keeps) {
    arrived.copy.reset(new char[bytes]);
    std::memcpy(arrived.copy.get(), data, bytes);
  }
  arrived.data = keeps ? static_cast<char*>(data) : arrived.copy.get();
  arrived.bytes = bytes;
  while (arrived_ - used_ < kWindow && window_[arrived_ % kWindow].data != nullptr) ++arrived_;
  return keeps ? kUcxInProgress : kUcxOk;
}

void UcxWire::Release(Arrived* arrived) {
  if (arrived->data != nullptr && arrived->copy == nullptr) {
    api_->ReleaseData(worker_, const_cast<char*>(arrived->data));
  }
  *arrived = Arrived();
}

// Takes the peer's token and address from the socket; then nothing but its end may come.
void UcxWire::ReadSocket() {
  char bytes[4096];
  while (!peer_left_) {
    const ssize_t received = recv(socket_, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && errno == EAGAIN) return;
    if (received <= 0) {
      peer_left_ = true;
    } else if (endpoint_ != nullptr) {
      return Fail(CorruptFrame("more than an address came over the socket"));
    } else {
      greeting_.append(bytes, static_cast<size_t>(received));
      Connect();
    }
  }
}

void UcxWire::Connect() {
  uint32_t size;
  const size_t before = sizeof(size) + kTokenBytes;
  if (greeting_.size() < before) return;
  std::memcpy(&size, greeting_.data(), sizeof(size));
  if (size == 0 || size > kMostAddressBytes || greeting_.size() > before + size) {
    return Fail(CorruptFrame("no address of UCX"));
  }
  if (greeting_.size() < before + size) return;
  std::memcpy(peer_token_.data(), greeting_.data() + sizeof(size), kTokenBytes);
  UcxEndpointParameters parameters;
  parameters.field_mask = UcxEndpointParameters::kAddress | UcxEndpointParameters::kErrorMode |
                          UcxEndpointParameters::kErrorHandler;
  parameters.address = reinterpret_cast<const UcxAddressOpaque*>(greeting_.data() + before);
  parameters.error_mode = UcxEndpointParameters::kPeer;
  parameters.error_handler.callback = [](void* argument, UcxEndpoint, UcxStatus status) {
    UcxWire* const wire = static_cast<UcxWire*>(argument);
    wire->Fail(ConnectionLost(wire->api_->StatusText(status)));
  };
  parameters.error_handler.argument = this;
  const UcxStatus status = api_->EndpointCreate(worker_, &parameters, &endpoint_);
  if (status != kUcxOk) {
    endpoint_ = nullptr;
    Fail(ConnectionLost(api_->StatusText(status)));
  }
}

// Feeds a frame. nullptr, or what is wrong with it.
const char* UcxWire::Feed(const char* bytes, size_t size, Assembler* assembler) {
  const char* const wrong = assembler->Begin(bytes);
  if (wrong != nullptr) return wrong;
  if (assembler->lent()) return "lent payload over UCX";
  const size_t header = assembler->header_wanted();
  const int64_t payload = assembler->payload_wanted();
  if (size != Frame::kSize + header + static_cast<size_t>(payload)) return "of another size";
  if (header > 0) {
    std::memcpy(assembler->header(), bytes + Frame::kSize, header);
    assembler->HeaderThere();
  }
  if (payload > 0) {
    void* const to = assembler->BeginSlice(payload);
    if (to != nullptr) {
      std::memcpy(to, bytes + Frame::kSize + header, static_cast<size_t>(payload));
    }
    assembler->EndSlice(payload);
  }
  return nullptr;
}

Wire::Moved UcxWire::Read(Assembler* assembler) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (endpoint_ == nullptr || ++reads_ % kReadsPerLook == 0) ReadSocket();
  Progress();
  int frames = 0;
  bool wrong = false;
  for (; frames < kFramesPerRead && used_ < arrived_ && !wrong && !assembler->goodbye(); ++frames) {
    Arrived& next = window_[used_ % kWindow];
    lock.unlock();  // nobody else takes it from its place
    const char* const what = Feed(next.data, next.bytes, assembler);
    lock.lock();
    Release(&next);
    ++used_;
    wrong = what != nullptr;
    if (wrong) Fail(CorruptFrame(what));
  }
  if (assembler->goodbye()) Fail(LeftJob());
  if (used_ - told_used_ >= kWindow / 4 || assembler->goodbye()) Acknowledge();
  if (frames == 0 && peer_left_) Fail(ConnectionLost("closed by the peer"));
  // What arrived before the end still counts.
  const bool ended = wrong || assembler->goodbye() || (!failure_.ok() && used_ == arrived_);
  if (!ended) return frames > 0 ? Moved::kSome : Moved::kNothing;
  end_ = failure_;
  return Moved::kEnded;
}

bool UcxWire::Watch(int epoll, void* tag) {
  epoll_ = epoll;
  tag_ = tag;
  epoll_event event = {};
  event.events = EPOLLONESHOT;
  event.data.ptr = tag_;
  return epoll_ctl(epoll_, EPOLL_CTL_ADD, socket_, &event) == 0 &&
         epoll_ctl(epoll_, EPOLL_CTL_ADD, descriptor_, &event) == 0;
}

bool UcxWire::Arm(bool room) {
  std::lock_guard<std::mutex> lock(mutex_);
  // UCX reports no event for what it could have done before.
  if (api_->WorkerProgress(worker_) != 0) return false;
  if (used_ < arrived_ || !failure_.ok() || peer_left_) return false;
  if (room && HasRoom() && !Holding()) return false;
  if (api_->WorkerArm(worker_) != kUcxOk) return false;
  armed_.StoreSeqCst(1);
  reads_ = kReadsPerLook - 1;  // whatever the event is, the next read looks at the socket
  Await(0);
  return true;
}

bool UcxWire::ArmedForRoom() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return armed_.LoadSeqCst() != 0 && !HasRoom();
}

// `more`: of the socket; EPOLLOUT comes at once.
void UcxWire::Await(uint32_t more) {
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLRDHUP | EPOLLONESHOT;
  event.data.ptr = tag_;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, descriptor_, &event);
  event.events |= more;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, socket_, &event);
}

bool UcxWire::Tick(bool* heartbeat) {
  return silence_.Tick(messages_out_.LoadRelaxed(), messages_in_.LoadRelaxed(), heartbeat);
}

void UcxWire::Shut() {
  epoll_ctl(epoll_, EPOLL_CTL_DEL, socket_, nullptr);
  epoll_ctl(epoll_, EPOLL_CTL_DEL, descriptor_, nullptr);
  shutdown(socket_, SHUT_RDWR);
}

}  // namespace dfccl
