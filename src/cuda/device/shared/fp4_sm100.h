// The spec of Blackwell's attention in four bits by tcgen05, and where things lie in its shared memory and its tensor
// memory. Read fp4.h for the records that it reads.
#pragma once

#include "shared/element.h"
#include "shared/forward_params_sm90.h"
#include "shared/forward_spec.h"
#include "shared/forward_spec_sm100.h"
#include "shared/fp4.h"
#include "shared/types.h"

namespace fovea::cuda {

/// sm100/attention_fp4: head dims are those of the products, 64 or 128; one or two groups of 128 rows. What it has of
/// Hopper's roles it has of their spec.
struct Sm100Fp4Spec : Sm90ForwardSpec {
  std::int32_t scale_group = 16;  // numbers that share a scale: 16 in nvfp4, 32 in mxfp4

  bool operator==(const Sm100Fp4Spec&) const = default;
};

constexpr std::int32_t sm100_groups(const Sm100Fp4Spec& spec) {
  return spec.tile_q / kSm100GroupRows;
}

/// Tensor maps are not read.
struct Sm100Fp4Params : Sm90ForwardParams {
  Fp4Operands operands;
};

// ---- tensor memory ----

/// Columns: those of group g begin g steps further on. Scales are words of 128 rows to four columns, each group's own:
/// a copy of the next ones waits for nobody but the group whose products read the last ones.
struct Sm100Fp4TensorLayout {
  std::int32_t s, s_step;  // scores, f32: one place for all groups
  std::int32_t o, o_step;  // sums, f32
  std::int32_t p, p_step;  // probabilities, eight to a column
  std::int32_t q_scales, k_scales, v_scales, p_scales;
  std::int32_t scales_step;
  std::int32_t columns;
};

constexpr std::int32_t fp4_scale_columns(std::int32_t head_dim) {
  return fp4_scales_bytes(head_dim) / kFp4CopyBytes * kFp4CopyColumns;
}

constexpr Sm100Fp4TensorLayout sm100_tensor_layout(const Sm100Fp4Spec& spec) {
  const std::int32_t groups = sm100_groups(spec);
  Sm100Fp4TensorLayout at{};
  at.o = spec.tile_kv;
  at.o_step = spec.head_dim_v;
  at.p = at.o + groups * at.o_step;
  at.p_step = spec.tile_kv / 8;
  at.q_scales = at.p + groups * at.p_step;
  at.k_scales = at.q_scales + fp4_scale_columns(spec.head_dim_qk);
  at.v_scales = at.k_scales + fp4_scale_columns(spec.head_dim_qk);
  at.p_scales = at.v_scales + fp4_scale_columns(spec.head_dim_v);
  const std::int32_t end = at.p_scales + fp4_scale_columns(spec.tile_kv);
  at.scales_step = end - at.q_scales;
  at.columns = at.q_scales + groups * at.scales_step;
  return at;
}

// ---- shared memory ----

/// As far as Hopper's roles read it, and Blackwell's of numbers of 16 bits.
struct Sm100Fp4Layout : Sm100ForwardLayout {
  // Of a stage of keys: their record, marks of its values, then scores of each group's block of queries.
  std::int32_t value_marks, block_scores;
  std::int32_t k_bytes, v_bytes;  // from a stage to the next
  std::int32_t s_read;            // a barrier of 8 bytes
  std::int32_t p_scales;          // [group] as they are copied to tensor memory
  std::int32_t beside_rows;       // [group] QuantizedRow of each of its rows
};

inline constexpr std::int32_t kFp4BlockScoresBytes = 4 * kQuantizedTile;

constexpr Sm100Fp4Layout sm100_fp4_layout(const Sm100Fp4Spec& spec) {
  constexpr std::int32_t kPattern = 512;  // of a swizzle of 64 bytes, which codes have, or of 32
  const std::int32_t groups = sm100_groups(spec);
  const auto whole = [](std::int32_t bytes) {
    return (bytes + kPattern - 1) / kPattern * kPattern;
  };
  SharedRoom room;
  Sm100Fp4Layout at{};
  at.num_slots = sm90_posts_place(spec) ? 3 : 2;
  at.slot_bytes = sm90_posts_place(spec) ? 32 : 16;
  at.q_bytes = whole(fp4_marks_at(spec.head_dim_qk));
  at.q = room.take(groups * at.q_bytes);
  at.value_marks = fp4_used_bytes(spec.head_dim_qk);
  at.block_scores = at.value_marks + kFp4MarkBytes;
  at.k_bytes = whole(at.block_scores + groups * kFp4BlockScoresBytes);
  at.k = room.take(spec.stages * at.k_bytes);
  at.v_bytes = whole(fp4_marks_at(spec.head_dim_v));
  at.v = room.take(spec.stages * at.v_bytes);
  at.p_scales = room.take(groups * fp4_scales_bytes(spec.tile_kv));
  at.beside_rows = room.take(groups * kSm100GroupRows * 8);
  at.q_full = room.take(8 * groups);
  at.q_empty = room.take(8 * groups);
  at.o_full = room.take(8 * groups);
  at.s_full = room.take(8 * groups);
  at.p_full = room.take(8 * groups);
  at.s_read = room.take(8);
  take_schedule(room, spec.stages, at);
  at.kv_tiles = room.take(8 * spec.stages);
  at.redo_list = room.take(4 * 2);
  at.pass = room.take(4);
  at.needs_low = room.take(4);
  at.ids = room.take(4 * 4);
  at.tensor_memory = room.take(4);
  at.slots_read = room.take(4 * 4 * groups);
  at.bytes = room.end;
  return at;
}

}  // namespace fovea::cuda
