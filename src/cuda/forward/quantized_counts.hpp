// How many rows and tiles the kernels that round an operand take, and how many of their CTAs an SM.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/ceil_div.hpp"
#include "cuda/device/shared/quantize_qk.h"

namespace fovea::cuda {

/// Enough bytes of loads are under way then to keep memory busy.
inline constexpr int kQuantizeCtasPerSm = 3;

/// Of one operand: rows of all sequences, tiles of a sequence; packed, a bound of those of all.
struct QuantizedCounts {
  std::int64_t rows, tiles;
};
constexpr QuantizedCounts quantized_counts(bool is_packed, std::int64_t batch, std::int64_t seqlen,
                                           std::int64_t total) {
  if (is_packed) return {total, first_packed_tile(batch, total)};
  return {batch * seqlen, ceil_div(seqlen, kQuantizedTile)};
}

/// `is_packed` makes one list of tiles of all sequences.
constexpr std::int64_t num_tile_lists(bool is_packed, std::int64_t batch) {
  return is_packed ? 1 : batch;
}

/// Parts of a workspace begin at multiples of this.
inline constexpr std::int64_t kPartAlignment = 256;
constexpr std::size_t part_bytes(std::int64_t bytes) {
  return static_cast<std::size_t>(ceil_div(bytes, kPartAlignment) * kPartAlignment);
}

}  // namespace fovea::cuda
