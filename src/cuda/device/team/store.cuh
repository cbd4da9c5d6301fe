// O, lse and row_max on their way out; or partial states, where the problem is split. Chapter 6 of
// sm80/attention_forward.cuh; read passes.cuh next.
#pragma once

#include "common/code_units.cuh"
#include "common/lost_row_notes.cuh"
#include "common/online_softmax.cuh"
#include "common/passes.cuh"
#include "common/row_view.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"
#include "team/compute.cuh"
#include "team/team.cuh"
#include "tile/shared_tile.cuh"

namespace fovea::cuda::team {

template <TeamSpec spec>
FOVEA_DEVICE std::int64_t out_col_bytes(const ForwardParams& p) {
  constexpr int kOutBytes = RowView<spec>::kOutBytes;
  return spec.is_split ? kOutBytes : p.out.col_stride * kOutBytes;
}

template <Element element>
FOVEA_DEVICE float load_element(const char* from) {
  if constexpr (element == Element::f32) {
    return ptx::ld_global(reinterpret_cast<const float*>(from));
  } else {
    const std::uint32_t bits = ptx::ld_global(reinterpret_cast<const std::uint16_t*>(from));
    return element == Element::bf16 ? ptx::f32_of_bf16_lo(bits) : ptx::f32_of_f16_lo(bits);
  }
}

template <Element element>
FOVEA_DEVICE void store_element(char* to, float value) {
  if constexpr (element == Element::f32) {
    ptx::st_global(reinterpret_cast<float*>(to), value);
  } else {
    ptx::st_global(reinterpret_cast<std::uint16_t*>(to),
                   static_cast<std::uint16_t>(pack<element>(value, 0.0F)));
  }
}

/// Straight from registers.
template <TeamSpec spec, class TileSums>
FOVEA_DEVICE void store_f32(const AtEnd<spec>& end, const TileSums& sums) {
  using T = Traits<spec>;
  const ForwardParams& p = end.team.p;
  const std::int64_t step = out_col_bytes<spec>(p);
#pragma unroll
  for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowView<spec> r = end.row_at(end.team.my_row(i, half));
      if (!r.exists) continue;
      char* to = r.out() + end.team.lane % 4 * 2 * step;
#pragma unroll
      for (int j = 0; j < T::kColBlocks; ++j, to += 8 * step) {
        const int col = j * 8 + end.team.lane % 4 * 2;
        if (spec.is_split || col < p.head_dim_v)
          store_element<Element::f32>(to, sums.out[i][j][half * 2]);
        if (spec.is_split || col + 1 < p.head_dim_v)
          store_element<Element::f32>(to + step, sums.out[i][j][half * 2 + 1]);
      }
    }
  }
}

/// The warp's part of O into its part of shared memory, where Q was. The lanes find each other's elements there.
template <Element element, TeamSpec spec, class TileSums>
FOVEA_DEVICE void stage_out(const AtEnd<spec>& end, const TileSums& sums) {
  using T = Traits<spec>;
  using Tile = typename T::OutTile;
  const int lane = end.team.lane;
  const SharedAddress mine = Tile{end.team.warp_smem()}.chunk(lane / 4, 0) + lane % 4 * 4;
  ptx::sync_warp();
#pragma unroll
  for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < T::kColBlocks; ++j)
        ptx::st_shared(Tile::chunk_ahead(mine, j) + (i * 16 + half * 8) * Tile::kRowPitch,
                       pack<element>(sums.out[i][j][half * 2], sums.out[i][j][half * 2 + 1]));
  ptx::sync_warp();
}

template <TeamSpec spec>
FOVEA_DEVICE RowAddresses out_rows(const AtEnd<spec>& end) {
  constexpr int kRows = Traits<spec>::kWarpRows;
  const RowView<spec> r = end.row_at(end.team.warp * kRows + end.team.lane % kRows);
  return {r.out(), r.exists};
}

template <TeamSpec spec>
FOVEA_DEVICE void store_chunks(const AtEnd<spec>& end, const RowAddresses& rows) {
  using Tile = typename Traits<spec>::OutTile;
#pragma unroll 4
  for (int step = 0; step < Tile::kRows * Tile::kChunks / 32; ++step) {
    const int row = (step * 32 + end.team.lane) / Tile::kChunks;
    const int chunk = (step * 32 + end.team.lane) % Tile::kChunks;
    char* const to = rows.at(row) + chunk * kChunkBytes;
    if (!rows.exists(row)) continue;
    if (spec.has_padded_head_dim &&
        chunk * Traits<spec>::kElement.of_chunk >= end.team.p.head_dim_v)
      continue;
    ptx::st_global(reinterpret_cast<U32x4*>(to),
                   ptx::ld_shared<U32x4>(Tile{end.team.warp_smem()}.chunk(row, chunk)));
  }
}

/// Every staged element that exists, one by one, into its place in O; or, where it is an indicator, infinity to what
/// lies there: NaN where both signs come.
template <Element staged, TeamSpec spec>
FOVEA_DEVICE void store_elements(const AtEnd<spec>& end, const RowAddresses& rows, Pass pass) {
  using T = Traits<spec>;
  using Tile = typename T::OutTile;
  const float reached = infinity_of(pass);
#pragma unroll 1
  for (int row = 0; row < T::kWarpRows; ++row) {
    char* const row_out = rows.at(row);
    if (!rows.exists(row)) continue;
#pragma unroll 1
    for (int col = end.team.lane; col < end.team.p.head_dim_v; col += 32) {
      const std::uint32_t bits = ptx::ld_shared<std::uint16_t>(
          Tile{end.team.warp_smem()}.chunk(row, col / T::kElement.of_chunk) +
          col % T::kElement.of_chunk * 2);
      float value = staged == Element::bf16 ? ptx::f32_of_bf16_lo(bits) : ptx::f32_of_f16_lo(bits);
      char* const to = row_out + col * out_col_bytes<spec>(end.team.p);
      if (pass > Pass::finite) {
        if (value == 0) continue;
        value = load_element<RowView<spec>::kOutElement>(to) + reached;
      }
      store_element<RowView<spec>::kOutElement>(to, value);
    }
  }
}

template <TeamSpec spec, class TileSums>
FOVEA_DEVICE void store_out(const AtEnd<spec>& end, const TileSums& sums, Pass pass) {
  constexpr Element kOutElement = RowView<spec>::kOutElement;
  constexpr Element kStaged = kOutElement == Element::f32 ? Element::bf16 : kOutElement;
  const bool is_indicator = pass > Pass::finite;
  if (kOutElement == Element::f32 && !is_indicator) return store_f32(end, sums);
  stage_out<kStaged>(end, sums);
  const RowAddresses rows = out_rows(end);
  const bool is_aligned = end.team.p.is_out_aligned != 0;
  if (is_aligned && !is_indicator) return store_chunks(end, rows);
  store_elements<kStaged>(end, rows, pass);
}

/// Factors of a thread's rows.
template <TeamSpec spec>
using Factors = float[Traits<spec>::kRowBlocks][2];

/// Sums of the row's four threads; then lse and row_max. Each of the four finishes one of their rows, and shuffles its
/// factor to the others. `shares`: of a row's weight, what its keys have, and not its sink; where V is smoothed.
template <TeamSpec spec, class TileSums>
FOVEA_DEVICE void finish_rows(const AtEnd<spec>& end, const TileSums& sums, Pass pass,
                              Factors<spec>& factors, [[maybe_unused]] Factors<spec>& shares) {
  constexpr int kRows = 2 * Traits<spec>::kRowBlocks;
  const ForwardParams& p = end.team.p;
  constexpr bool kAreCodes = TileSums::kAreCodes;
  const float unit = spec.is_prescaled || kAreCodes ? 1.0F : p.softmax_scale;
  const int mine = end.team.lane % kRows;
  RowState row = empty_row();
  float row_max = 0;
  [[maybe_unused]] float unit_of_sum = 1.0F;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const RowState whole = sums.whole_row(i / 2, i % 2);
    if (i != mine) continue;
    row = whole;
    row_max = sums.greatest(i / 2, i % 2);
    if constexpr (spec.sums_codes) unit_of_sum = sums.unit_of_sum(i / 2, i % 2);
  }
  const RowView<spec> r = end.row_at(end.team.my_row(mine / 2, mine % 2));
  float sink = -infinity();
  if (!spec.is_split && p.sinks != nullptr && !end.work.sequence.is_trailing && r.exists)
    sink = ptx::ld_global(p.sinks + r.q_head * p.sinks_stride);
  if constexpr (kAreCodes || spec.sums_codes) {
    const float shift = p.softmax_scale * sums.scores.codes.of_mean(end.team, mine / 2, mine % 2);
    constexpr float kUnit = kAreCodes ? kLn2 : 1.0F;  // of codes logarithms to base 2 so far
    row.origin = ptx::fma_rn(kUnit, row.origin, shift);
    if constexpr (kAreCodes) row_max = ptx::fma_rn(kLn2, row_max, shift);
  }
  RowResult result = finish_row(row, unit, sink);
  [[maybe_unused]] const float share = row.sum * result.factor;
  if constexpr (spec.sums_codes) result.factor *= unit_of_sum;
  if constexpr (spec.has_dropout) result.factor *= p.dropout_keep_scale;
  if (pass > Pass::finite) {
    result.factor = 1;
  } else if (r.exists && end.team.lane % 4 == mine) {
    r.store_values(result.lse, row.sum, finish_row_max(row_max, row.sum, unit));
    if constexpr (knows_lost_by_reference(spec)) {
      if (!is_huge(row.origin) && is_far_reference<spec.sums_codes>(row.origin * kLog2E))
        note_lost_row(sums.scores.codes.rounded->notes, r);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int of_row = end.team.lane / 4 * 4 + i;
    factors[i / 2][i % 2] = ptx::shfl_idx(result.factor, of_row);
    if constexpr (spec.smooths_v) shares[i / 2][i % 2] = ptx::shfl_idx(share, of_row);
  }
}

/// What was taken from values comes back to O, times what the row's probabilities sum to.
template <TeamSpec spec, class TileSums>
FOVEA_DEVICE void add_mean_of_values(const AtEnd<spec>& end, const Factors<spec>& shares,
                                     TileSums& sums) {
  using T = Traits<spec>;
  const std::int64_t head =
      std::int64_t{end.work.sequence.idx} * end.team.p.num_heads_kv + end.work.kv_head;
  const float* const mean = sums.scores.codes.rounded->values.mean + head * spec.head_dim_v;
#pragma unroll
  for (int j = 0; j < T::kColBlocks; ++j) {
    const auto pair =
        ptx::ld_global(reinterpret_cast<const ptx::F32x2*>(mean + j * 8 + end.team.lane % 4 * 2));
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& sum = sums.out[i][j][e];
        sum = ptx::fma_rn(shares[i][e / 2], e % 2 == 0 ? pair.x : pair.y, sum);
      }
  }
}

template <TeamSpec spec, class TileSums>
FOVEA_DEVICE void finish(const AtEnd<spec>& end, TileSums& sums, Pass pass) {
  using T = Traits<spec>;
  Factors<spec> factors, shares;
  finish_rows(end, sums, pass, factors, shares);
  if constexpr (T::kHasChannelScales) {
    // Indicators have no scale, nor have rows of no sequence.
    if (pass <= Pass::finite && !end.work.sequence.is_trailing) sums.scale_columns(end.team);
  }
#pragma unroll
  for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
    for (int j = 0; j < T::kColBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.out[i][j][e] *= factors[i][e / 2];
  if constexpr (spec.smooths_v) {
    if (pass <= Pass::finite && !end.work.sequence.is_trailing)
      add_mean_of_values(end, shares, sums);
  }
  store_out(end, sums, pass);
}

}  // namespace fovea::cuda::team
