// V in eight bits: what common/quantize_v.cuh takes and leaves, and what attention reads of it.
//
//   v_j ≈ scale_t code_j       e4m3; scale_t = greatest |v| of a tile of 128 keys / v_max
//
// Or a scale of each channel, of all keys of a sequence; or one that the call gives, which is that of each tile then.
//
// Where V is smoothed, it is v - μ that is rounded, μ the mean of all keys of a sequence and head in each channel:
// Σ p v = Σ p (v - μ) + μ Σ p, whose last term attention adds at the end.
//
// Tensor cores want operands of eight bits with their depth side by side, and the depth of P V are keys: V lies
// transposed, a row of 128 codes for each channel of a tile. Keys are in the order in which a thread's scores become
// its operand: it holds keys 2 l, 2 l + 1 of every eight, and wants four neighbours of every sixteen.
#pragma once

#include "shared/element.h"
#include "shared/quantize_k.h"
#include "shared/types.h"

namespace fovea::cuda {

/// The key of a tile whose code stands at this byte of a row.
constexpr std::int32_t key_of_byte(std::int32_t byte) {
  return byte / 16 * 16 + byte % 4 / 2 * 8 + byte % 16 / 4 * 2 + byte % 2;
}

/// Of a key of a tile, the byte.
constexpr std::int32_t byte_of_key(std::int32_t key) {
  return key / 16 * 16 + key % 8 / 2 * 4 + key / 8 % 2 * 2 + key % 2;
}

/// Of what is not finite; attention looks at the given number then. No number has this code.
inline constexpr std::uint32_t kNanCode = 0x7f;
/// 1 in e4m3.
inline constexpr std::uint32_t kOneCode = 0x38;

/// Beside the codes, as attention reads them.
struct QuantizedValues {
  // [batch, num_heads_kv, num_tiles], packed without batch; of channels [num_sequences, num_heads_kv, head_dim of the
  // codes]
  const float* scales;
  const float* mean;  // [num_sequences, num_heads_kv, head_dim of the codes], where V is smoothed
};

struct QuantizeVParams : RowsToRound {
  // [batch, num_heads_kv, num_tiles, head_dim of the codes, kQuantizedTile], packed without batch
  std::uint8_t* codes;
  // Or elements, those of what is left of V among them: [batch, num_heads_kv, seqlen_kv, head_dim of the codes], packed
  // [num_heads_kv, total_kv, head_dim]
  std::uint16_t* numbers;
  QuantizedValues beside;
  float v_max;  // the code of the greatest magnitude
};

/// A tile of codes is put together in shared memory; behind it the greatest magnitude of each warp.
constexpr std::int32_t quantize_v_shared_bytes(std::int32_t head_dim) {
  return head_dim * kQuantizedTile + kQuantizeThreads / 32 * 4;
}

}  // namespace fovea::cuda
