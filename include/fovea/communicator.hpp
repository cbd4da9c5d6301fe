// How ranks exchange data: an interface for any transport, ranks that are threads of one process, and ranks over NCCL.
//
// Read context_parallel.hpp next: what exchanges through it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fovea/export.hpp"
#include "fovea/tensor.hpp"

namespace fovea {

/// A part of an exchange: bytes for a rank, or from it.
struct OutgoingMessage {
  int to = 0;
  const void* data = nullptr;
  std::size_t bytes = 0;
};
struct IncomingMessage {
  int from = 0;
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// An exchange under way: what `wait` takes, once. The number is the communicator's own.
struct Exchange {
  std::uint64_t number = 0;
};

/// One rank's end of a group of ranks. Implement it over the transport that a program has.
///
/// All ranks begin the same exchanges in the same order; each is waited for once, in any order. Between the two calls
/// nobody writes what is sent, or looks at what is received. A communicator that does all the work in `begin` is right;
/// one that does not lets keys travel while others are attended to.
/// Memory  is of device(). There `stream` is the call's: `begin` reads what was enqueued on it before, and what is
///         enqueued after `wait` finds what has arrived; neither need keep the host waiting. On the cpu it is null.
/// Errors  DeviceError where a rank has ended or the transport fails: no rank may wait for ever.
class FOVEA_EXPORT Communicator {
 public:
  virtual ~Communicator();
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// Where tensors of its calls lie; the cpu unless overridden.
  virtual Device device() const;
  /// Throws DeviceError where an exchange has failed since it was begun. The host asks while it waits for a device.
  virtual void check();

  /// received[r · bytes, (r + 1) · bytes) is what rank r sent. Bytes are the same on all ranks.
  virtual Exchange begin_all_gather(const void* sent, void* received, std::size_t bytes,
                                    void* stream) = 0;
  /// received[i] is the sum over ranks of sent[rank · count + i], the same bits in every run.
  virtual Exchange begin_reduce_scatter(const float* sent, float* received, std::size_t count,
                                        void* stream) = 0;
  /// At most one message to each other rank and one from each: a ring's step, or all to all. Both ends say the same
  /// bytes.
  virtual Exchange begin_messages(std::span<const OutgoingMessage> sent,
                                  std::span<const IncomingMessage> received, void* stream) = 0;
  virtual void wait(Exchange exchange, void* stream) = 0;
};

/// Ranks of one process, each for a thread of its own; what is sent is copied when the exchange begins. A rank whose
/// communicator is destroyed has ended: those that wait for it get a DeviceError.
[[nodiscard]] FOVEA_EXPORT std::vector<std::unique_ptr<Communicator>> make_thread_communicators(
    int world_size);

/// A group of ranks that are about to meet over NCCL (ncclUniqueId): made by one of them, told to all by whatever the
/// program has, a file, MPI, an environment.
struct NcclId {
  std::array<char, 128> bytes{};
};
/// Throws Unsupported where there is no NCCL: it is opened at run time (docs/env.md, FOVEA_NCCL).
[[nodiscard]] FOVEA_EXPORT NcclId make_nccl_id();

/// One rank of a group over NCCL, each on a GPU of its own; returns when all have come. Exchanges have a stream of
/// their own, which waits for the call's by events and the other way: keys travel while others are attended to.
/// Sums of a reduce-scatter are NCCL's: the same bits in every run of one group, for one algorithm and protocol.
/// Where NCCL tells of a failure the next exchange throws, or the first call of a problem while it waits; the group is
/// then aborted on this rank.
[[nodiscard]] FOVEA_EXPORT std::unique_ptr<Communicator> join_nccl_ranks(const NcclId& id, int rank,
                                                                         int world_size,
                                                                         Device device);

/// The same over a group that a program has: its ncclComm_t, of the libnccl.so.2 that the process has loaded, stays its
/// own, also to abort, and outlives the communicator. `exchange_stream` is the stream of exchanges, null for one of the
/// communicator's own: what else uses the group meanwhile must be in one order with it on all ranks.
[[nodiscard]] FOVEA_EXPORT std::unique_ptr<Communicator> use_nccl_ranks(
    void* nccl_comm, void* exchange_stream = nullptr);

}  // namespace fovea
