// What all roles of Blackwell's attention in four bits know. What they have in common with the kernel of 16 bits is in
// ../forward/cta.cuh. ../attention_fp4.cuh has the picture; read copies.cuh next.
#pragma once

#include "ptx/memory.cuh"
#include "ptx/tcgen05.cuh"
#include "shared/fp4_sm100.h"
#include "sm100/forward/cta.cuh"
#include "tile/shared_tile.cuh"

namespace fovea::cuda::sm90 {

/// As the roles that load, schedule, multiply and compute have them.
template <auto spec>
requires requires { spec.scale_group; }  // of an Sm100Fp4Spec
struct Traits<spec> {
  static_assert(spec.element != Element::f32, "what is rounded has 16 bits");
  static_assert(spec.scale_group == 16 || spec.scale_group == 32, "numbers that share a scale");
  static_assert((spec.head_dim_qk == 64 || spec.head_dim_qk == 128) &&
                    (spec.head_dim_v == 64 || spec.head_dim_v == 128),
                "rows are one or two steps of a product's depth");
  static_assert(!spec.is_cached && !spec.is_split && spec.heads_per_tile == 1 && !spec.has_dropout,
                "records are of whole tensors, tiles of one head");
  static constexpr int kGroups = sm100_groups(spec);
  static constexpr int kGroupRows = kSm100GroupRows;
  static_assert(kGroupRows == kQuantizedTile && spec.tile_kv == kQuantizedTile,
                "a group's rows are a record, and so are the keys of a tile");
  static_assert(spec.tile_q == kGroups * kGroupRows && spec.num_warps == 4 * (kGroups + 1),
                "a thread has a row, and four warps serve them");
  static_assert(kGroups >= 1 && kGroups <= kSm100MostGroups, "there are columns for two");
  static constexpr int kQueries = kQueriesOfTile<spec>;
  static constexpr int kQStages = 1;
  static constexpr int kStages = spec.stages;
  static constexpr bool kOverlapsTiles = false;
  static constexpr Sm100Fp4Layout kAt = sm100_fp4_layout(spec);
  static_assert(kAt.bytes <= 232448, "an SM has no more");
  static constexpr int kSlots = kAt.num_slots;
  static constexpr bool kPostsPlace = sm90_posts_place(spec);
  static constexpr int kReaders = 4 * kGroups;  // warps that compute
  /// The order of the recipe: codes of P are relative to the greatest score so far.
  static constexpr WalkOrder kWalkOrder = WalkOrder::rising;
  static constexpr bool kHasRoundedTiles = true;
  static constexpr bool kHasRoundedCache = false;
  static constexpr bool kCopiesPages = false;
  static constexpr int kServiceRegisters = 72;  // who loads finds records
  static constexpr int kRowRegisters = 216;
  static constexpr bool kGroupsShareScores = true;
  static constexpr bool kReadsBesideKeys = true;

  static constexpr int kQkSteps = spec.head_dim_qk / kFp4Depth;
  static constexpr int kPvSteps = spec.tile_kv / kFp4Depth;
  using QTile = SharedTile<kGroupRows, spec.head_dim_qk / 2>;
  using KTile = SharedTile<spec.tile_kv, spec.head_dim_qk / 2>;
  using VTile = SharedTile<spec.head_dim_v, spec.tile_kv / 2>;  // channels, their keys side by side
};

}  // namespace fovea::cuda::sm90

namespace fovea::cuda::sm100 {

/// Columns of scales of a group.
template <Sm100Fp4Spec spec>
struct ScaleColumns {
  static constexpr Sm100Fp4TensorLayout kAt = sm100_tensor_layout(spec);
  ptx::TmemAddress base;
  int group;

  FOVEA_DEVICE_MEMBER ptx::TmemAddress q() const { return at(kAt.q_scales); }
  FOVEA_DEVICE_MEMBER ptx::TmemAddress k() const { return at(kAt.k_scales); }
  FOVEA_DEVICE_MEMBER ptx::TmemAddress v() const { return at(kAt.v_scales); }
  FOVEA_DEVICE_MEMBER ptx::TmemAddress p() const { return at(kAt.p_scales); }

 private:
  FOVEA_DEVICE_MEMBER ptx::TmemAddress at(int column) const {
    return base.plus_columns(column + group * kAt.scales_step);
  }
};

/// Where roles of four bits find what lies in shared memory.
template <Sm100Fp4Spec spec>
struct Fp4Places {
  using T = Traits<spec>;
  const Cta<spec>& cta;

  FOVEA_DEVICE_MEMBER SharedAddress queries(int group) const { return cta.q_at(0, group); }
  FOVEA_DEVICE_MEMBER SharedAddress keys(int stage) const {
    return cta.smem + T::kAt.k + stage * T::kAt.k_bytes;
  }
  FOVEA_DEVICE_MEMBER SharedAddress values(int stage) const {
    return cta.smem + T::kAt.v + stage * T::kAt.v_bytes;
  }
  FOVEA_DEVICE_MEMBER SharedAddress p_scales(int group) const {
    return cta.smem + T::kAt.p_scales + group * fp4_scales_bytes(spec.tile_kv);
  }
  /// QuantizedRow of each row of the group: what a thread would have to keep beside scores.
  FOVEA_DEVICE_MEMBER SharedAddress beside_row(int group, int row) const {
    return cta.smem + T::kAt.beside_rows + 8 * (group * kSm100GroupRows + row);
  }
  FOVEA_DEVICE_MEMBER SharedAddress block_scores(int stage, int group) const {
    return keys(stage) + T::kAt.block_scores + group * kFp4BlockScoresBytes;
  }
};

/// The record of a group's rows of a row tile, among those of all sequences and heads. There is none where no row is
/// anybody's, or the rows are behind the last sequence.
struct QueryRecord {
  std::int64_t number;
  bool exists;
};
template <Sm100Fp4Spec spec>
FOVEA_DEVICE QueryRecord query_record(const Cta<spec>& cta, const Fp4Operands& operands,
                                      const RowTile& rows, const SequencePlace& place, int group) {
  const ForwardParams& c = cta.p.common;
  const bool is_trailing = spec.is_varlen && rows.batch >= c.num_sequences;
  const std::int32_t begin = rows.idx * spec.tile_q + group * kSm100GroupRows;
  std::int64_t number =
      (std::int64_t{cta.map_batch(rows)} * c.num_heads_q + rows.q_head) * operands.query_tiles;
  if constexpr (spec.is_varlen) number += first_packed_tile(rows.batch, place.q_row);
  return {number + begin / kQuantizedTile, !is_trailing && begin < place.seqlen_q};
}

template <Sm100Fp4Spec spec>
FOVEA_DEVICE const Fp4Operands& operands_of(const Cta<spec>& cta) {
  return static_cast<const Sm100Fp4Params&>(cta.p).operands;  // what the kernel was called with
}

}  // namespace fovea::cuda::sm100
