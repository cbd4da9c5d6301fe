// Q and K in eight bits: what attention multiplies in their place.
//
//   q_i ≈ scale_i code_i        k_j - μ ≈ scale_g code_j        q_i · k_j ≈ scale_i scale_g (code_i · code_j) + q_i · μ
//
// Codes are int8; or e4m3, by scales that the call gives, and μ is 0 (shared/rounding.h).
//
// Where rows are rotated, that is done before they are rounded, to q and to k - μ: their products do not change, and
// q · μ is that of rows as given.
//
// A row of Q has a scale of its own; attention rounds it when it has arrived, or reads its codes (quantize_q.h). K is
// rounded before, by common/quantize_k.cuh, whose parameters are here: its keys share a scale with those that the same
// lane of a warp holds in a fragment of scores: of every tile of 128 those of number 2 l or 2 l + 1 modulo 8, l < 4.
#pragma once

#include "shared/element.h"
#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

/// Rows of a CTA of the kernel that rounds, and most keys that share four scales, one for each lane of four: of a tile
/// so large, or half of it.
inline constexpr std::int32_t kQuantizedTile = 128;
inline constexpr std::int32_t kScalesOfTile = 4;

/// Beside the codes of the keys that a lane holds of a tile. Bit 2 i + e of `unrounded`: key 8 i + 2 l + e of the tile
/// holds NaN or infinity, and its codes are 0. The scale is negative where there is such a key, so that attention need
/// read no more where there is none.
struct alignas(8) QuantizedKeys {
  float scale;
  std::uint32_t unrounded;
};

/// Of packed sequences tiles begin at the first row of each, and are counted on: those of a sequence from this on,
/// which leaves room for a cut tile of each before it.
constexpr std::int64_t first_packed_tile(std::int64_t sequence, std::int64_t first_row) {
  return first_row / kQuantizedTile + sequence;
}

/// Behind the mean of a head's keys stands the greatest of their scales, where attention asks for it, and room, so that
/// the next one lies at a multiple of 16 bytes: TMA brings both to whoever rounds rows of Q.
constexpr std::int32_t key_mean_floats(std::int32_t head_dim, bool keeps_greatest_scale) {
  return keeps_greatest_scale ? head_dim + 4 : head_dim;
}

/// What a rotation of rows is: src/quant/hadamard.hpp.
struct RotationParams {
  std::int32_t block;        // channels that are mixed with each other
  float factor;              // 1 / √block
  std::uint8_t flipped[16];  // bit d of byte i: channel 8 i + d changes its sign before
};

/// Where they are, as attention reads them.
struct QuantizedParams {
  // [batch, num_heads_kv, tiles, parts of a tile, kScalesOfTile], packed without batch
  const QuantizedKeys* keys;
  // [num_sequences, num_heads_kv, key_mean_floats of the codes' head_dim], where K is smoothed
  const float* mean;
  std::int32_t num_tiles;   // of a sequence and head; packed: of a head
  RotationParams rotation;  // where rows are rotated
};

/// Of a sequence and kv head, where the call gives them; data is null elsewhere.
struct GivenScales {
  const float* data;
  std::int64_t sequence_stride, head_stride;
};

/// K or V, as the kernel that rounds takes it.
struct RowsToRound {
  BshdParam x;            // [batch, seqlen_kv, num_heads_kv, head_dim]
  std::int32_t head_dim;  // of the problem
  // Rows begin at multiples of 16 bytes and are contiguous, of whole 16 bytes; unless the spec reads elements they are.
  std::int32_t is_aligned;
  std::int32_t num_heads_kv, seqlen_kv;
  std::int32_t num_tiles;    // of kQuantizedTile rows: of a sequence and head; packed: of a head
  IndexParam cu_seqlens_kv;  // packed: [num_sequences + 1]
  std::int32_t num_sequences;
  std::int64_t total_kv;  // rows of all of them, of one head
  GivenScales scales;
};

struct QuantizeKParams : RowsToRound {
  // [batch, num_heads_kv, seqlen_kv, head_dim of the codes], packed [num_heads_kv, total_kv, head_dim]
  std::int8_t* codes;
  std::uint16_t* numbers;  // or these elements, in the same places
  QuantizedParams beside;  // of codes; mean always
};

/// Threads of a CTA, and bytes of its shared memory: sums of keys or values; what warps say of their keys.
inline constexpr std::int32_t kQuantizeThreads = 256;
inline constexpr std::int32_t kMeanSharedBytes = kQuantizeThreads * 8 * 8;
inline constexpr std::int32_t kQuantizeKSharedBytes = kQuantizeThreads / 32 * 8 * 2;

}  // namespace fovea::cuda
