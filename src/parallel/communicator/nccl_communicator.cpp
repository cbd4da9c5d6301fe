#include "parallel/communicator/nccl_communicator.hpp"

#include <fmt/format.h>

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "core/check.hpp"

namespace fovea {
namespace parallel {
namespace {

using cuda::driver::ContextScope;
using cuda::driver::Event;
using cuda::driver::Stream;
using cuda::driver::StreamHandle;

/// Of a communicator that does not block: how often it is asked whether a call is through.
constexpr std::chrono::microseconds kPollInterval{50};

}  // namespace

NcclCommunicator::NcclCommunicator(const Nccl& nccl, NcclComm comm, NcclOwner owner,
                                   const cuda::driver::DeviceContext& context, void* stream)
    : nccl_(nccl),
      comm_(comm),
      owner_(owner),
      context_(context),
      stream_(stream),
      ready_(context, Event::Timing::off) {
  if (stream == nullptr) stream_ = own_stream_.emplace(context).get();
  require(async_error(), "ncclCommInitRank");  // of one that does not block it may be under way
  require(nccl_.api().user_rank(comm_, &rank_), "ncclCommUserRank");
  require(nccl_.api().count(comm_, &world_size_), "ncclCommCount");
}

NcclCommunicator::~NcclCommunicator() {
  const bool is_ours = owner_ == NcclOwner::communicator && comm_ != nullptr;
  if (is_ours && context_.driver().is_usable()) nccl_.api().destroy(comm_);
}

int NcclCommunicator::async_error() const {
  int error = kNcclSuccess;
  const int result = nccl_.api().async_error(comm_, &error);
  return result != kNcclSuccess ? result : error;
}

void NcclCommunicator::check() {
  if (comm_ == nullptr) {
    throw DeviceError(fmt::format(
        "communicator: an exchange on rank {} has failed before; make a new group", rank_));
  }
  const int error = async_error();
  if (error != kNcclSuccess && error != kNcclInProgress) fail(error, "an exchange of NCCL");
}

void NcclCommunicator::require(int result, std::string_view call) {
  while (result == kNcclInProgress) {
    std::this_thread::sleep_for(kPollInterval);
    result = async_error();
  }
  if (result != kNcclSuccess) fail(result, call);
}

void NcclCommunicator::fail(int result, std::string_view call) {
  // Kernels that wait for a rank which has ended would keep the device busy for ever.
  if (owner_ == NcclOwner::communicator) nccl_.api().abort(std::exchange(comm_, nullptr));
  throw DeviceError(
      fmt::format("communicator: {} failed on rank {}: {}; has another rank ended or raised an "
                  "error?",
                  call, rank_, nccl_.words(result)));
}

Exchange NcclCommunicator::begin_all_gather(const void* sent, void* received, std::size_t bytes,
                                            void* stream) {
  return begin(stream, [&](StreamHandle exchanges) {
    require(nccl_.api().all_gather(sent, received, bytes, kNcclBytes, comm_, exchanges),
            "ncclAllGather");
  });
}

Exchange NcclCommunicator::begin_reduce_scatter(const float* sent, float* received,
                                                std::size_t count, void* stream) {
  return begin(stream, [&](StreamHandle exchanges) {
    require(nccl_.api().reduce_scatter(sent, received, count, kNcclF32, kNcclSum, comm_, exchanges),
            "ncclReduceScatter");
  });
}

Exchange NcclCommunicator::begin_messages(std::span<const OutgoingMessage> sent,
                                          std::span<const IncomingMessage> received, void* stream) {
  return begin(stream, [&](StreamHandle exchanges) {
    if (sent.empty() && received.empty()) return;
    require(nccl_.api().group_start(), "ncclGroupStart");
    const Called last = enqueue_messages(sent, received, exchanges);
    // Closed before anything is said of it: an error aborts the group of ranks, which a call under way must not need.
    const int closed = nccl_.api().group_end();
    require(last.result, last.call);
    require(closed, "ncclGroupEnd");
  });
}

NcclCommunicator::Called NcclCommunicator::enqueue_messages(
    std::span<const OutgoingMessage> sent, std::span<const IncomingMessage> received,
    StreamHandle stream) const {
  Called last;
  for (const OutgoingMessage& message : sent) {
    last = {nccl_.api().send(message.data, message.bytes, kNcclBytes, message.to, comm_, stream),
            "ncclSend"};
    if (last.result != kNcclSuccess) return last;
  }
  for (const IncomingMessage& message : received) {
    last = {
        nccl_.api().receive(message.data, message.bytes, kNcclBytes, message.from, comm_, stream),
        "ncclRecv"};
    if (last.result != kNcclSuccess) return last;
  }
  return last;
}

Exchange NcclCommunicator::begin(void* stream,
                                 const std::function<void(StreamHandle)>& collective) {
  check();
  const ContextScope scope(context_, stream_.handle());
  ready_.record(Stream(stream));
  ready_.hold_back(stream_);
  collective(stream_.handle());
  Done done = idle_event();
  done->record(stream_);
  under_way_.emplace(++num_exchanges_, std::move(done));
  return {num_exchanges_};
}

NcclCommunicator::Done NcclCommunicator::idle_event() {
  if (idle_.empty()) return std::make_unique<Event>(context_, Event::Timing::off);
  Done event = std::move(idle_.back());
  idle_.pop_back();
  return event;
}

void NcclCommunicator::wait(Exchange exchange, void* stream) {
  auto found = under_way_.extract(exchange.number);
  if (found.empty()) {
    invalid("communicator", fmt::format("exchange {} is waited for, which is not under way; "
                                        "expected what begin_... returned, once",
                                        exchange.number));
  }
  found.mapped()->hold_back(Stream(stream));
  idle_.push_back(std::move(found.mapped()));
  check();
}

std::unique_ptr<NcclCommunicator> join_nccl(const Nccl& nccl, const NcclId& id, int rank,
                                            int world_size,
                                            const cuda::driver::DeviceContext& context) {
  constexpr const char* kWhere = "join_nccl_ranks";
  if (rank < 0 || rank >= world_size) {
    invalid(kWhere, fmt::format("rank is {} and world_size {}; expected a rank from 0 up, below "
                                "world_size",
                                rank, world_size));
  }
  const ContextScope scope(context);  // NCCL takes the device that is current
  NcclComm comm = nullptr;
  const int result = nccl.api().init_rank(&comm, world_size, id, rank);
  if (result != kNcclSuccess && result != kNcclInProgress) {
    throw DeviceError(fmt::format("{}: ncclCommInitRank failed on rank {} of {}: {}", kWhere, rank,
                                  world_size, nccl.words(result)));
  }
  return std::make_unique<NcclCommunicator>(nccl, comm, NcclOwner::communicator, context, nullptr);
}

}  // namespace parallel

NcclId make_nccl_id() {
  const parallel::Nccl& nccl = parallel::process_nccl();
  NcclId id;
  if (const int result = nccl.api().unique_id(&id); result != parallel::kNcclSuccess)
    throw DeviceError(fmt::format("make_nccl_id: ncclGetUniqueId failed: {}", nccl.words(result)));
  return id;
}

std::unique_ptr<Communicator> join_nccl_ranks(const NcclId& id, int rank, int world_size,
                                              Device device) {
  if (device.kind != Device::Kind::cuda) {
    invalid("join_nccl_ranks",
            fmt::format("device is {}; expected a GPU, of each rank its own", to_string(device)));
  }
  return parallel::join_nccl(parallel::process_nccl(), id, rank, world_size,
                             cuda::driver::process_context(device));
}

std::unique_ptr<Communicator> use_nccl_ranks(void* nccl_comm, void* exchange_stream) {
  if (nccl_comm == nullptr) invalid("use_nccl_ranks", "nccl_comm is null; expected an ncclComm_t");
  const parallel::Nccl& nccl = parallel::process_nccl();
  auto* const comm = static_cast<parallel::NcclComm>(nccl_comm);
  int index = 0;
  if (const int result = nccl.api().cuda_device(comm, &index); result != parallel::kNcclSuccess) {
    throw DeviceError(
        fmt::format("use_nccl_ranks: ncclCommCuDevice failed: {}", nccl.words(result)));
  }
  return std::make_unique<parallel::NcclCommunicator>(
      nccl, comm, parallel::NcclOwner::caller, cuda::driver::process_context(Device::cuda(index)),
      exchange_stream);
}

}  // namespace fovea
