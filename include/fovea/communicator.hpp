// How ranks exchange data: an interface for any transport, and ranks that are threads of one process.
//
// Read context_parallel.hpp next: what exchanges through it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fovea/export.hpp"

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
/// Memory  is of the host, where ContextParallel and ContextParallelDecode compute. `stream` is the call's, null there.
/// Errors  DeviceError where a rank has ended or the transport fails: no rank may wait for ever.
class FOVEA_EXPORT Communicator {
 public:
  virtual ~Communicator();
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

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

}  // namespace fovea
