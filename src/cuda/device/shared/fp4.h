// Attention in four bits: what the kernels before it leave of Q, K and V and attention reads, and what either takes.
//
//   q_i - q̄_b ≈ Σ_g scale_ig code_i      k_j - μ ≈ Σ_g scale_jg code_j      v_jc ≈ scale_gc code_jc
//
//   q_i · k_j ≈ (codes and scales of both) + q̄_b · (k_j - μ) + q_i · μ
//
// b: 128 queries of one head, whose mean q̄_b is; μ: the mean of all keys; g: 16 or 32 neighbours along the channels of
// a row of Q or K, along the keys of a channel of V. Codes are e2m1, scales of 16 are e4m3, of 32 powers of two.
//
// A tile is 128 rows, and a record in memory: codes, scales, beside them what is rare. Records of keys and values lie
// as they are multiplied, so that a bulk copy brings one and a thread reads its operands without a shuffle:
//
//   codes    64 to a step of a product's depth, 32 bytes; rows of 16-byte chunks, permuted as tile/shared_tile.cuh says
//   scales   a word for each row and step of 64, where a product reads it
//   marks    16 bytes, a bit for each key: it holds NaN or infinity
//
// Who multiplies by mma.sync, sm120/attention_fp4, reads scales out of lanes: of row 8 j + n of 32 lane 4 n + j has the
// word, so one register of a lane serves four products. Keys of its records are permuted within 32: of four products of
// 8 keys a lane has sums 2 c and 2 c + 1 of each, c = lane mod 4, and those are neighbours, keys 8 c to 8 c + 7. As
// codes they are a register of P, the operand of P V.
//
// Who multiplies by tcgen05.mma, sm100/attention_fp4, reads scales out of tensor memory: 512 bytes, which one copy
// takes there, are words of 128 rows, that of row r for lane r mod 32, column r / 32. Keys are in order.
#pragma once

#include "shared/element.h"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"
#include "shared/quantize_k.h"
#include "shared/quantize_q.h"
#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

/// Numbers of a product's depth, and their bytes.
inline constexpr std::int32_t kFp4Depth = 64, kFp4StepBytes = 32;
inline constexpr std::int32_t kFp4MarkBytes = kQuantizedTile / 8;
inline constexpr std::int32_t kFp4Threads = 256;

/// sm120/attention_fp4: head dims are those of the products, 64 or 128.
struct Fp4ForwardSpec : ForwardSpec {
  std::int32_t group = 16;  // numbers that share a scale: 16 in nvfp4, 32 in mxfp4

  bool operator==(const Fp4ForwardSpec&) const = default;
};

/// The kernels before it, sm120/round_to_fp4.cuh.
struct Fp4RoundingSpec {
  Element element = Element::bf16;
  std::int32_t head_dim_qk = 128, head_dim_v = 128;
  std::int32_t group = 16;
  bool is_packed = false;
  // Rows and words of scales are in records as tcgen05.cp copies them, else as mma.sync finds them in registers.
  bool is_for_tensor_memory = false;

  bool operator==(const Fp4RoundingSpec&) const = default;
};

/// The greatest probability of a row as codes and scales have it: 6 · 448 uses all of e4m3 for scales of groups.
constexpr float fp4_p_max(std::int32_t group) { return group == 16 ? 6.0F * 448.0F : 6.0F; }

/// Where key `key` of a tile stands in its record.
constexpr std::int32_t fp4_row_of_key(std::int32_t key, bool is_for_tensor_memory) {
  if (is_for_tensor_memory) return key;
  return key / 32 * 32 + key % 8 / 2 * 8 + key % 32 / 8 * 2 + key % 2;
}

/// Of the scales of a record, as lanes read them: the word of a row, of `steps` that each row has.
constexpr std::int32_t fp4_scale_word(std::int32_t row, std::int32_t step, std::int32_t steps) {
  return (row / 32 * 32 + row % 8 * 4 + row % 32 / 8) * steps + step;
}

/// A copy to tensor memory takes 512 bytes: four columns, words of 128 rows.
inline constexpr std::int32_t kFp4CopyBytes = 512, kFp4CopyColumns = 4;
/// As it copies them: rows of one step below those of the one before it, `rows` of each.
constexpr std::int32_t fp4_copied_scale_word(std::int32_t row, std::int32_t step,
                                             std::int32_t rows) {
  const std::int32_t at = step * rows + row;
  return at / 128 * 128 + at % 32 * 4 + at % 128 / 32;
}

/// A record of keys or values with so many channels: codes, then scales, then marks. Of keys a row of each; of values a
/// row of each channel, two steps of keys.
constexpr std::int32_t fp4_codes_bytes(std::int32_t head_dim) {
  return kQuantizedTile * head_dim / 2;
}
constexpr std::int32_t fp4_scales_bytes(std::int32_t head_dim) {
  return kQuantizedTile * head_dim / kFp4Depth * 4;
}
constexpr std::int32_t fp4_marks_at(std::int32_t head_dim) {
  return fp4_codes_bytes(head_dim) + fp4_scales_bytes(head_dim);
}
constexpr std::int32_t fp4_used_bytes(std::int32_t head_dim) {
  return fp4_marks_at(head_dim) + kFp4MarkBytes;
}
/// From one to the next: swizzles begin anew.
constexpr std::int32_t fp4_record_bytes(std::int32_t head_dim) {
  return (fp4_used_bytes(head_dim) + 127) / 128 * 128;
}

/// A record of queries: codes, then the words of their scales, row by row, or as those of keys for tensor memory; then
/// QuantizedRow of each, whose scale is 1, or 0 where the row is not rounded.
constexpr std::int32_t fp4_rows_at(std::int32_t head_dim) { return fp4_marks_at(head_dim); }
constexpr std::int32_t fp4_query_record_bytes(std::int32_t head_dim) {
  return fp4_rows_at(head_dim) + kQuantizedTile * static_cast<std::int32_t>(sizeof(QuantizedRow));
}

/// What attention reads. Tiles of an operand are counted as HeadTiles does.
struct Fp4Operands {
  const char* queries;  // [batch, num_heads_q, tiles], packed without batch
  const char* keys;     // [batch, num_heads_kv, tiles], packed without batch
  const char* values;
  const float*
      block_scores;  // q̄_b · (k_j - μ): [tile of queries][tile of the sequence's keys][kQuantizedTile]
  std::int32_t query_tiles, key_tiles;  // of a sequence and head; packed: of a head
  std::int32_t tiles_of_longest;        // tiles of keys that block_scores has room for
};

struct Fp4Params {
  ForwardParams common;  // q, k and v as given
  Fp4Operands operands;
};

struct Fp4RoundingParams {
  RowsToRound q, k, v;  // of queries what is called kv is theirs
  std::int32_t group;   // q heads of a kv head
  // Of all sequences and heads; values have as many as keys.
  std::int32_t num_query_tiles, num_key_tiles;
  double* key_sums;     // [tile of keys][head_dim_qk]
  float* key_means;     // [sequence, num_heads_kv, head_dim_qk], rounded to elements
  float* block_means;   // [tile of queries][head_dim_qk]
  Fp4Operands results;  // written
};

// ---- shared memory ----

/// Of the kernel that sums tiles: partial sums; of the one that rounds: a tile of values, then a byte for each row.
constexpr std::int32_t kFp4SumsSharedBytes = kFp4Threads * 8 * 8;
constexpr std::int32_t fp4_round_shared_bytes(const Fp4RoundingSpec& spec) {
  return kQuantizedTile * spec.head_dim_v * 2 + kQuantizedTile;
}
/// Means of queries that are multiplied at once. Keys and they lie in f32, channel by channel.
inline constexpr std::int32_t kFp4BlocksAtOnce = 64;
constexpr std::int32_t fp4_block_scores_shared_bytes(const Fp4RoundingSpec& spec) {
  return spec.head_dim_qk * (kQuantizedTile + kFp4BlocksAtOnce) * 4;
}

/// The warps of attention as team/ knows them: queries go into registers, stages are ours.
constexpr TeamSpec fp4_team_spec(const Fp4ForwardSpec& spec) {
  TeamSpec team{static_cast<const ForwardSpec&>(spec)};
  team.head_dim_qk = 0;
  team.stages = 0;
  return team;
}

struct Fp4Layout {
  std::int32_t values, block_scores;  // of a stage, behind its keys
  std::int32_t stage_bytes, stage_used_bytes;
  // [stage] from 0. The end of them is where O is put together: nobody reads stages any more then.
  std::int32_t team;  // sm80_forward_layout
  // Addresses of the sequence's first records of keys and values, and of the block's first scores.
  std::int32_t first_keys, first_values, first_scores;
  std::int32_t full;  // [stage] barriers
  std::int32_t bytes;
};

constexpr Fp4Layout fp4_layout(const Fp4ForwardSpec& spec) {
  constexpr std::int32_t kBlockScoresBytes = 4 * kQuantizedTile;
  const TeamSpec team = fp4_team_spec(spec);
  const Sm80ForwardLayout of_team = sm80_forward_layout(team);
  Fp4Layout at{};
  at.values = fp4_record_bytes(spec.head_dim_qk);
  at.block_scores = at.values + fp4_record_bytes(spec.head_dim_v);
  at.stage_bytes = at.block_scores + kBlockScoresBytes;
  at.stage_used_bytes =
      fp4_used_bytes(spec.head_dim_qk) + fp4_used_bytes(spec.head_dim_v) + kBlockScoresBytes;
  const std::int32_t out_bytes = spec.num_warps * of_team.warp_bytes;
  const std::int32_t before = spec.stages * at.stage_bytes - out_bytes;
  at.team = before > 0 ? before : 0;
  SharedRoom room{at.team + of_team.bytes};
  room.align(8);
  at.first_keys = room.take(8);
  at.first_values = room.take(8);
  at.first_scores = room.take(8);
  at.full = room.take(8 * spec.stages);
  at.bytes = room.end;
  return at;
}

}  // namespace fovea::cuda
