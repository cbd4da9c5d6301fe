// Q and K in eight bits: what common/quantize_qk.cuh takes and leaves, and what attention reads of it.
//
//   q_i ≈ scale_i code_i        k_j - μ ≈ scale_g code_j        q_i · k_j ≈ scale_i scale_g (code_i · code_j) + q_i · μ
//
// A row of Q has a scale of its own. Keys share one with those that the same lane of a warp holds in a fragment of
// scores: of every tile of 128, keys whose number modulo 8 is 2 l or 2 l + 1, l from 0 to 3.
#pragma once

#include "shared/element.h"
#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

/// Keys of a tile, which share four scales; and rows of a CTA of the kernel that rounds.
inline constexpr std::int32_t kQuantizedTile = 128;
inline constexpr std::int32_t kScalesOfTile = 4;

/// Beside the codes of a row of Q. A row that is not rounded, since it holds NaN or infinity, has scale 0 and codes 0;
/// others have more than 0.
struct alignas(8) QuantizedRow {
  float scale;
  float of_mean;  // q · μ
};

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

/// Where they are, as attention reads them.
struct QuantizedParams {
  const QuantizedRow* rows;   // [batch, num_heads_q, seqlen_q], packed [num_heads_q, total_q]
  const QuantizedKeys* keys;  // [batch, num_heads_kv, tiles, kScalesOfTile], packed without batch
  std::int64_t rows_batch_stride, rows_head_stride;
  std::int32_t num_tiles;  // of keys, of a sequence and head; packed: of a head
};

/// What the kernel that rounds is compiled for.
struct QuantizeQkSpec {
  Element element = Element::bf16;  // of q and k
  std::int32_t head_dim = 128;      // of codes: 64 or 128, the problem's padded by zeros
  bool is_packed = false;

  bool operator==(const QuantizeQkSpec&) const = default;
};

struct QuantizeQkParams {
  BshdParam q;            // [batch, seqlen_q, num_heads_q, head_dim], rows at multiples of 16 bytes
  BshdParam k;            // [batch, seqlen_kv, num_heads_kv, head_dim], likewise
  std::int32_t head_dim;  // of the problem, a multiple of 8
  std::int32_t num_heads_q, num_heads_kv, group;
  std::int32_t seqlen_q, seqlen_kv;
  IndexParam cu_seqlens_q, cu_seqlens_kv;  // packed: [num_sequences + 1]
  std::int32_t num_sequences;
  std::int64_t total_q, total_kv;  // rows of all of them, of one head
  std::int32_t num_q_tiles,
      num_kv_tiles;             // of kQuantizedTile rows: of a sequence and head; packed: of a head
  std::int32_t num_tiles_of_q;  // of all sequences and heads: CTAs before those of K
  // [batch, num_heads, seqlen, head_dim of the spec], packed [num_heads, total, head_dim]
  std::int8_t* q_codes;
  std::int8_t* k_codes;
  float* mean;  // [num_sequences, num_heads_kv, head_dim of the spec]
  QuantizedParams beside;
};

/// Threads of a CTA, and bytes of its shared memory: sums of the sample; what warps say of their keys.
inline constexpr std::int32_t kQuantizeThreads = 256;
inline constexpr std::int32_t kMeanSharedBytes = kQuantizeThreads * 8 * 8;
inline constexpr std::int32_t kQuantizeSharedBytes = kQuantizeThreads / 32 * 8;

}  // namespace fovea::cuda
