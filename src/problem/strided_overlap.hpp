// Whether two strided tensors share a byte: what lets dq, dk and dv be views of one packed buffer.
#pragma once

#include <cstdint>
#include <optional>

#include "fovea/tensor.hpp"

namespace fovea {

/// Bytes of a tensor beside the address of its first element: [low, high).
struct ByteReach {
  std::int64_t low = 0, high = 0;
};

/// Nothing where an element lies more than 2^60 bytes away: then sums of offsets may leave 64 bits. A tensor without
/// elements reaches nowhere.
std::optional<ByteReach> byte_reach(const TensorSpec& spec);

/// A false answer is proven. A true one is exact too where the search ends within `max_steps`: slices of one buffer,
/// with steps, reversed or permuted, take some tens of them. Where it does not, the answer is true.
/// Both have a byte_reach. Tensors without elements share nothing.
bool may_share_bytes(const TensorView& a, const TensorView& b, int max_steps = 1 << 14);

}  // namespace fovea
