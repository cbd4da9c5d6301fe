// The end of a row tile: O, lse and row_max of a warp's 16 rows. The last chapter of sm90/attention_forward_short.cuh.
#pragma once

#include "common/online_softmax.cuh"
#include "common/passes.cuh"
#include "common/row_addresses.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"
#include "sm90/short/cta.cuh"
#include "sm90/short/softmax.cuh"
#include "sm90/values_of_pass.cuh"

namespace fovea::cuda::sm90::short_keys {

/// lse and row_max go to their places. `factors`: what O is to be scaled by. Lanes of a quad have the same two rows:
/// two of them finish one each.
template <Sm90ShortSpec spec>
FOVEA_DEVICE void finish_rows(const Cta<spec>& cta, const Work& work, const Rows<spec>& rows,
                              Pass pass, float (&factors)[2]) {
  const ForwardParams& p = cta.p.common;
  const auto add = [](float a, float b) { return a + b; };
  const float sums[2] = {join_quad(rows.state[0].sum, add), join_quad(rows.state[1].sum, add)};
  const int mine = cta.lane % 2;
  const Row<spec> row(p, work, cta.my_row(mine));
  const RowState state =
      mine == 0 ? RowState{rows.state[0].origin, sums[0]} : RowState{rows.state[1].origin, sums[1]};
  const float greatest = mine == 0 ? rows.greatest[0] : rows.greatest[1];
  float sink = -infinity();
  if (p.sinks != nullptr && !work.sequence.is_trailing)
    sink = ptx::ld_global(p.sinks + row.q_head * p.sinks_stride);
  RowResult result = finish_row(state, p.softmax_scale, sink);
  if (is_indicator(pass)) {
    result.factor = 1;
  } else if (row.exists && cta.lane % 4 < 2) {
    row.store_values(result.lse, state.sum, finish_row_max(greatest, state.sum, p.softmax_scale));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) factors[r] = ptx::shfl_idx(result.factor, cta.lane / 4 * 4 + r);
}

/// Where the warp's rows of Q lay, which only it has read.
template <Sm90ShortSpec spec, class Tile>
FOVEA_DEVICE void stage_out(const Cta<spec>& cta, const Tile& tile,
                            const float (&o)[spec.head_dim_v / 2], const float (&factors)[2]) {
  const SharedAddress mine = tile.chunk(cta.first_row_of_warp() + cta.lane % 16, cta.lane / 16);
#pragma unroll
  for (int j = 0; j < spec.head_dim_v / 16; ++j) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = o + 8 * j + 2 * i;
      pairs[i] = pack<spec.out_element>(pair[0] * factors[i % 2], pair[1] * factors[i % 2]);
    }
    ptx::stmatrix_x4(tile.chunk_ahead(mine, 2 * j), {pairs[0], pairs[1], pairs[2], pairs[3]});
  }
  ptx::sync_warp();
}

/// visit(place in memory, what was left for it) for 16 bytes a lane at a time, whole rows side by side.
template <Sm90ShortSpec spec, class Tile, class Visit>
FOVEA_DEVICE void visit_chunks(const Cta<spec>& cta, const Tile& tile, const RowAddresses& rows,
                               int step, Visit&& visit) {
  constexpr int kChunks = spec.head_dim_v / 8;
  const int row = (step * 32 + cta.lane) / kChunks;
  const int chunk = (step * 32 + cta.lane) % kChunks;
  auto* const to = reinterpret_cast<ptx::U32x4*>(rows.at(row) + chunk * kChunkBytes);
  if (!rows.exists(row)) return;
  if (spec.has_padded_head_dim && 8 * chunk >= cta.p.common.head_dim_v) return;
  visit(to, ptx::ld_shared<ptx::U32x4>(tile.chunk(cta.first_row_of_warp() + row, chunk)));
}

/// Of indicators, infinity to what is there.
template <Sm90ShortSpec spec, class Tile>
FOVEA_DEVICE void store_out(const Cta<spec>& cta, const Tile& tile, const Work& work, Pass pass) {
  constexpr int kSteps = 16 * spec.head_dim_v / 8 / 32;
  const Row<spec> row(cta.p.common, work, cta.first_row_of_warp() + cta.lane % 16);
  const RowAddresses rows(row.out(), row.exists);
  if (!is_indicator(pass)) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      visit_chunks(cta, tile, rows, step,
                   [](ptx::U32x4* to, const ptx::U32x4& sums) { ptx::st_global(to, sums); });
    }
    return;
  }
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    visit_chunks(cta, tile, rows, step, [&](ptx::U32x4* to, const ptx::U32x4& reached) {
      if ((reached.x | reached.y | reached.z | reached.w) == 0) return;
      ptx::st_global(to, with_infinities<spec.out_element>(ptx::ld_global(to), reached, pass));
    });
  }
}

/// O of a warp that has rows, by way of `tile`, scaled by what finish_rows says. Whether sums of rows that exist are
/// finite.
template <Sm90ShortSpec spec, class Tile>
FOVEA_DEVICE bool finish_out(const Cta<spec>& cta, const Work& work, const Tile& tile,
                             const float (&o)[spec.head_dim_v / 2], const float (&factors)[2],
                             Pass pass) {
  float zeros[2] = {0, 0};  // or NaN where a sum of the row is not finite
#pragma unroll
  for (int i = 0; i < spec.head_dim_v / 2; ++i)
    zeros[i / 2 % 2] = ptx::fma_rn(o[i], 0.0F, zeros[i / 2 % 2]);
  stage_out(cta, tile, o, factors);
  store_out(cta, tile, work, pass);
  bool is_finite = true;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool exists = Row<spec>(cta.p.common, work, cta.my_row(r)).exists;
    is_finite = is_finite && (!exists || !is_nan(zeros[r]));
  }
  return is_finite;
}

}  // namespace fovea::cuda::sm90::short_keys
