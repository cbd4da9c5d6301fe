// Scores of a tile where Q and K are codes of 8 bits: their product, exact in 32 bits, and what turns it into scores. A
// part of chapter 3 of sm80/attention_forward.cuh that kernels of 16 bits skip.
//
//   score = scale_i scale_g (code_i · code_j) + q_i · μ                                     shared/quantize_k.h
//
// Of e4m3 the product is a sum of floats in the tensor cores, and μ is 0; all else is the same.
//
// Two codes are an element to all but this file: rows of Q and K are copied, and read by ldmatrix, as rows of 16-bit
// elements are, and mma.m16n8k32 wants 32 codes of a row where mma.m16n8k16 wants 16 elements.
//
// The keys that a thread has of a kv tile share a scale, which arrives with them. What is beside the codes of rows lies
// in shared memory, since sums and scores leave no registers for it. The last term is the same for all keys of a row:
// the softmax does not need it, lse and row_max get it at the end (store.cuh), programs with each score.
//
// A key or a row that holds NaN or infinity has no codes; its scores are products of what was given, one by one.
#pragma once

#include "common/code_units.cuh"
#include "common/float_constants.cuh"
#include "common/given_product.cuh"
#include "common/lost_row_notes.cuh"
#include "common/row_view.cuh"
#include "common/tile_walk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params_sm80.h"
#include "shared/forward_spec.h"
#include "shared/quantize_k.h"
#include "shared/quantize_q.h"
#include "shared/rounding.h"
#include "team/team.cuh"

namespace fovea::cuda::team {

/// Kernels that multiply Q and K themselves have none.
template <TeamSpec spec, bool multiplies_codes = spec.multiplies_codes>
struct CodeScores {};

/// What one thread knows of the codes that it multiplies.
template <TeamSpec spec>
struct CodeScores<spec, true> {
  using T = Traits<spec>;
  using Fragments = float[T::kRowBlocks][T::kKeyBlocks][4];
  static constexpr float kOrigin = sum_origin(qk_codes(spec.rounding));

  static constexpr int kParts = kQuantizedTile / spec.scale_tile;  // of a tile of codes
  static_assert(spec.scale_tile % spec.tile_kv == 0, "keys of a tile share scales");
  static_assert(!spec.holds_all_keys && !spec.is_paged, "codes are of keys that a call gives");

  const RoundedOperands* rounded;
  QuantizedKeys keys;  // beside this thread's keys of the kv tile

  // ---- before the walk -------------------------------------------------------------------------

  /// What is beside the rows of this warp goes into shared memory, and where that of the team's keys lies, and codes of
  /// their values.
  FOVEA_DEVICE_MEMBER void keep(const Team<spec>& team) const {
    if (team.lane < T::kWarpRows) {
      const RowView<spec> row = team.row_at(team.warp * T::kWarpRows + team.lane);
      const QuantizedRow beside = beside_row(row);
      ptx::st_shared(row_at(team, team.lane), beside);
      if constexpr (knows_lost_by_scale(spec)) {
        if (is_far_row(beside.scale * team.p.softmax_scale_log2, greatest_key_scale(row)))
          note_lost_row(rounded->notes, row);
      }
    }
    if (team.warp != 0 || team.lane != 0) return;
    const std::int64_t tile = first_tile(team);
    keep_address(team.smem + T::kAt.keys_beside,
                 rounded->keys.keys + tile * kParts * kScalesOfTile);
    if constexpr (spec.sums_codes) {
      constexpr int kTileBytes = spec.head_dim_v * kQuantizedTile;
      keep_address(team.smem + T::kAt.value_codes, rounded->value_codes + tile * kTileBytes);
      keep_address(team.smem + T::kAt.value_scales,
                   rounded->values.scales + first_scale(team, tile));
    }
  }

  // ---- copies ----------------------------------------------------------------------------------

  /// What is beside the keys of a tile, part of the group of copies to come.
  FOVEA_DEVICE void copy_keys_beside(const Team<spec>& team, std::int32_t idx, int stage) {
    constexpr int kOfChunk = kChunkBytes / int{sizeof(QuantizedKeys)};
    if (team.warp != 0 || team.lane >= kScalesOfTile / kOfChunk) return;
    ptx::cp_async_16(keys_at(team, stage) + team.lane * kChunkBytes,
                     keys_of(team, idx) + team.lane * kOfChunk, kChunkBytes);
  }

  // ---- of a tile -------------------------------------------------------------------------------

  /// Before its stage is written again.
  FOVEA_DEVICE_MEMBER void look_at_keys(const Team<spec>& team, int stage) {
    keys = ptx::ld_shared<QuantizedKeys>(keys_at(team, stage) +
                                         team.lane % 4 * int{sizeof(QuantizedKeys)});
  }

  /// What makes scores of this thread's row logarithms.
  FOVEA_DEVICE_MEMBER float unit(const Team<spec>& team, int i, int half) const {
    return code_unit(row_of(team, i, half).scale * team.p.softmax_scale_log2, keys.scale);
  }

  /// What follows the product: scores that programs read, and those of rows and keys that are not rounded. Whether
  /// there are such: they may be NaN.
  FOVEA_DEVICE_MEMBER bool finish(const Team<spec>& team, Fragments& s, VisitedTile tile) const {
    if constexpr (spec.is_prescaled) multiply_out(team, s);
    bool is_mine = keys.unrounded != 0;
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) is_mine = is_mine || row_of(team, i, half).scale == 0.0F;
    const bool is_any = ptx::vote_any(is_mine);
    if (is_any) restore_unrounded(team, s, tile);
    return is_any;
  }

  /// At the end: what the scores of a row lack.
  FOVEA_DEVICE_MEMBER float of_mean(const Team<spec>& team, int i, int half) const {
    return row_of(team, i, half).of_mean;
  }

 private:
  /// Of the warp's rows.
  FOVEA_DEVICE SharedAddress row_at(const Team<spec>& team, int row) {
    return team.warp_smem() + T::kAt.rows_beside + row * int{sizeof(QuantizedRow)};
  }
  FOVEA_DEVICE SharedAddress keys_at(const Team<spec>& team, int stage) {
    return team.smem + T::kAt.key_scales + stage * kScalesOfTile * int{sizeof(QuantizedKeys)};
  }
  /// In memory; rows that there are not are like rows of zeros.
  FOVEA_DEVICE_MEMBER QuantizedRow beside_row(const RowView<spec>& row) const {
    const Sequence& sequence = row.work.sequence;
    if (!row.exists || sequence.is_trailing) return {1.0F, 0.0F};
    const QuantizedRows& beside = rounded->rows;
    return ptx::ld_global(beside.rows + sequence.q_batch * beside.batch_stride +
                          row.q_head * beside.head_stride + sequence.q_row + row.q_idx);
  }
  /// Of the keys of a row's head; 0 where it sees none.
  FOVEA_DEVICE_MEMBER float greatest_key_scale(const RowView<spec>& row) const {
    const Work& work = row.work;
    if (work.sequence.is_trailing) return 0.0F;
    constexpr int kHeadDim = 2 * spec.head_dim_qk;
    const std::int64_t head = std::int64_t{work.sequence.idx} * row.p.num_heads_kv + work.kv_head;
    return ptx::ld_global(rounded->keys.mean + head * key_mean_floats(kHeadDim, true) + kHeadDim);
  }
  FOVEA_DEVICE QuantizedRow row_of(const Team<spec>& team, int i, int half) {
    return ptx::ld_shared<QuantizedRow>(row_at(team, i * 16 + half * 8 + team.lane / 4));
  }

  /// What is beside the keys of a tile, in memory.
  FOVEA_DEVICE const QuantizedKeys* keys_of(const Team<spec>& team, std::int32_t idx) {
    const auto first = ptx::bit_cast<const QuantizedKeys*>(
        ptx::ld_shared<std::uint64_t>(team.smem + T::kAt.keys_beside));
    return first + std::int64_t{idx / (spec.scale_tile / spec.tile_kv)} * kScalesOfTile;
  }

  /// Of the sequence's keys, among the tiles of all sequences and heads.
  FOVEA_DEVICE_MEMBER std::int64_t first_tile(const Team<spec>& team) const {
    const Sequence& sequence = team.work.sequence;
    const std::int64_t pair = sequence.kv_batch * team.p.num_heads_kv + team.work.kv_head;
    std::int64_t tile = pair * rounded->keys.num_tiles;
    if constexpr (spec.is_varlen) tile += first_packed_tile(sequence.idx, sequence.kv_row);
    return tile;
  }
  /// Of values: of that tile, or of channels.
  FOVEA_DEVICE_MEMBER std::int64_t first_scale(const Team<spec>& team, std::int64_t tile) const {
    if constexpr (!T::kHasChannelScales) return tile;
    return (std::int64_t{team.work.sequence.idx} * team.p.num_heads_kv + team.work.kv_head) *
           spec.head_dim_v;
  }
  FOVEA_DEVICE void keep_address(SharedAddress at, const void* address) {
    ptx::st_shared(at, ptx::bit_cast<std::uint64_t>(address));
  }

  FOVEA_DEVICE_MEMBER void multiply_out(const Team<spec>& team, Fragments& s) const {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const QuantizedRow row = row_of(team, i, half);
        const float factor = row.scale * ptx::abs_ftz(keys.scale);
#pragma unroll
        for (int j = 0; j < T::kKeyBlocks; ++j) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e)
            s[i][j][e] = ptx::fma_rn(s[i][j][e] - kOrigin, factor, row.of_mean);
        }
      }
    }
  }

  /// Rare, so it may take long: a product of given numbers for each pair of which one is not rounded. All lanes go the
  /// same way.
  FOVEA_DEVICE_MEMBER void restore_unrounded(const Team<spec>& team, Fragments& s,
                                             VisitedTile tile) const {
    const Work work = team.kept_work();
    const std::int32_t begin = tile.idx * spec.tile_kv;
#pragma unroll 1
    for (int at = 0; at < T::kRowBlocks * T::kKeyBlocks * 4; ++at) {
      const int i = at / (T::kKeyBlocks * 4), j = at / 4 % T::kKeyBlocks;
      const int of_tile = j * 8 + team.lane % 4 * 2 + at % 2;
      const int bit = begin % spec.scale_tile / 8 * 2 + j * 2 + at % 2;
      const bool is_mine =
          row_of(team, i, at / 2 % 2).scale == 0.0F || (keys.unrounded >> bit & 1U) != 0;
      if (!ptx::vote_any(is_mine)) continue;
      const RowView<spec> row(team.p, work, team.my_row(i, at / 2 % 2));
      float product = quiet_nan();  // of a code: e4m3 has no infinity
      if constexpr (!spec.takes_codes)
        product = given_product(row, begin + of_tile, rounded->q, rounded->k, rounded->head_dim);
      const int mine = is_mine ? at : -1;
#pragma unroll
      for (int k = 0; k < T::kRowBlocks * T::kKeyBlocks * 4; ++k) {
        float& score = s[k / (T::kKeyBlocks * 4)][k / 4 % T::kKeyBlocks][k % 4];
        score = k == mine ? product : score;
      }
    }
  }
};

}  // namespace fovea::cuda::team
