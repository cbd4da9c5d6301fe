// A communicator as engines use it: tensors with tokens first, so that those of several ranks stand one after another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "fovea/communicator.hpp"

#include "parallel/engine/memory.hpp"

namespace fovea::parallel {

class Ranks;

/// What an exchange will have brought when it is waited for, once. Memory is in use until then: where an error comes
/// between, the end of this waits.
class Pending {
 public:
  Pending() = default;
  Pending(Pending&& other) noexcept { *this = std::move(other); }
  Pending& operator=(Pending&& other) noexcept;
  ~Pending();

  /// In the order asked for.
  std::vector<OwnedTensor> wait();

 private:
  friend class Ranks;
  Communicator* communicator_ = nullptr;  // of an exchange under way
  void* stream_ = nullptr;
  Exchange exchange_{};
  std::vector<OwnedTensor> received_{};
  std::vector<OwnedTensor> sent_{};  // alive until it has arrived
};

/// Sent as it lies where it is row-major, else as a copy; memory that is owned lives until it has arrived.
struct Outgoing {
  int to = 0;
  OwnedTensor tensor{};
};
struct Incoming {
  int from = 0;
  OwnedTensor tensor{};  // row-major, filled
};

/// Its shape, with so many tokens.
std::vector<std::int64_t> shape_with_tokens(const TensorView& like, std::int64_t num_tokens);

class Ranks {
 public:
  Ranks(Communicator& communicator, const Memory& memory)
      : communicator_(communicator), memory_(memory) {}

  int rank() const { return communicator_.rank(); }
  int size() const { return communicator_.world_size(); }
  const Memory& memory() const { return memory_; }

  /// [n, ...] of every rank as one tensor, [size · n, ...].
  Pending gather(const OwnedTensor& own) const;
  /// At most one tensor to each other rank and one from each: those that are received.
  Pending swap(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming) const;
  /// f32 [size · n, ...]: the sum over ranks of this rank's n, [n, ...].
  Pending reduce_scatter(const OwnedTensor& parts) const;

 private:
  Communicator& communicator_;
  const Memory& memory_;
};

}  // namespace fovea::parallel
