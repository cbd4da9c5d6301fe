// A Communicator over NCCL: collectives on a stream of exchanges, events between it and the call's.
//
//   call's stream   ... what is sent | record ready          attention ...    wait for done | what arrived ...
//   exchanges            wait for ready | ncclAllGather | record done
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "fovea/communicator.hpp"

#include "cuda/driver/context.hpp"
#include "cuda/driver/resources.hpp"
#include "parallel/communicator/nccl.hpp"

namespace fovea::parallel {

enum class NcclOwner : bool { caller, communicator };

class NcclCommunicator : public Communicator {
 public:
  /// `stream` null: one of its own. `context` is that of the group's device.
  NcclCommunicator(const Nccl& nccl, NcclComm comm, NcclOwner owner,
                   const cuda::driver::DeviceContext& context, void* stream);
  ~NcclCommunicator() override;
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  Device device() const override { return Device::cuda(context_.info().index); }
  void check() override;

  Exchange begin_all_gather(const void* sent, void* received, std::size_t bytes,
                            void* stream) override;
  Exchange begin_reduce_scatter(const float* sent, float* received, std::size_t count,
                                void* stream) override;
  Exchange begin_messages(std::span<const OutgoingMessage> sent,
                          std::span<const IncomingMessage> received, void* stream) override;
  void wait(Exchange exchange, void* stream) override;

 private:
  using Done = std::unique_ptr<cuda::driver::Event>;

  /// collective(the stream of exchanges), in order with the call's stream on both ends.
  Exchange begin(void* stream, const std::function<void(cuda::driver::StreamHandle)>& collective);
  /// A call of NCCL's, and what it gave.
  struct Called {
    int result = kNcclSuccess;
    std::string_view call{};
  };
  /// Within a group of calls: the first that fails, else the last.
  Called enqueue_messages(std::span<const OutgoingMessage> sent,
                          std::span<const IncomingMessage> received,
                          cuda::driver::StreamHandle stream) const;
  Done idle_event();
  int async_error() const;
  void require(int result, std::string_view call);
  [[noreturn]] void fail(int result, std::string_view call);

  const Nccl& nccl_;
  NcclComm comm_;  // null: aborted
  NcclOwner owner_;
  const cuda::driver::DeviceContext& context_;
  std::optional<cuda::driver::OwnedStream> own_stream_{};
  cuda::driver::Stream stream_{nullptr};  // of exchanges
  cuda::driver::Event ready_;
  int rank_ = -1, world_size_ = 0;
  std::vector<Done> idle_;
  std::map<std::uint64_t, Done> under_way_;
  std::uint64_t num_exchanges_ = 0;
};

/// What join_nccl_ranks does, over a library and a driver that a test gives.
std::unique_ptr<NcclCommunicator> join_nccl(const Nccl& nccl, const NcclId& id, int rank,
                                            int world_size,
                                            const cuda::driver::DeviceContext& context);

}  // namespace fovea::parallel
