// The end of a row tile: O, lse and row_max of the rows of one warp, and whether their sums are finite. Read store.cuh
// next.
#pragma once

#include "common/float_constants.cuh"
#include "common/quad_reduce.cuh"
#include "common/row_view.cuh"
#include "ptx/fence.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"
#include "sm90/forward/cta.cuh"
#include "sm90/forward/rows.cuh"
#include "sm90/forward/scores.cuh"

namespace fovea::cuda::sm90 {

/// What one thread of a group writes of its two rows.
template <Sm90ForwardSpec spec, class Mods>
struct Output {
  using T = Traits<spec>;
  using Rows = RowsOf<spec, Mods>;
  using Sums = typename Rows::Sums;
  using Row = RowView<spec>;

  const ComputingWarp<spec> warp;

  FOVEA_DEVICE_MEMBER explicit Output(const ComputingWarp<spec>& of_warp) : warp(of_warp) {}

  /// What needs no O: lse and row_max go to their places. `factor`: what O is to be scaled by; NaN where O is nobody's,
  /// or NaN whatever the values are.
  FOVEA_DEVICE_MEMBER void finish_rows(const RowTile& tile, int q_stage, const Rows& rows,
                                       Pass pass, float (&factor)[2]) const {
    const Work work = warp.work_of(tile);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      factor[r] = is_indicator(pass)
                      ? Rows::kIndicatorFactor
                      : finish_row(Row(common(), work, warp.row(r)), q_stage, r, rows);
  }

  /// O / l goes where Q lay. Each warp writes the 16 rows of Q that only it has read. In f32 it goes to O, or
  /// the partial states of a split. `number`: of the row tile in this CTA, from 1 on.
  FOVEA_DEVICE_MEMBER void finish(const RowTile& tile, int q_stage, const float (&factor)[2],
                                  const Rows& rows, Sums& o, std::uint32_t number,
                                  Pass pass) const {
    report(o, q_stage, factor, number, pass);
    if constexpr (spec.smooths_v) {
      if (!is_indicator(pass)) add_mean_of_values(tile, rows, o);
    }
    if constexpr (T::kWritesSums) {
      write_sums(tile, o, factor, pass);
    } else {
      write_out(typename T::OTile{warp.cta.q_at(q_stage, warp.group)}, o, factor);
      ptx::fence_proxy_async_shared_cta();
    }
    warp.cta.release(warp.cta.barrier(T::kAt.o_full, q_stage * T::kGroups + warp.group));
    warp.cta.done_with(tile);
  }

 private:
  FOVEA_DEVICE_MEMBER const ForwardParams& common() const { return warp.cta.p.common; }

  /// What was taken from values comes back, times what the row's probabilities sum to.
  FOVEA_DEVICE_MEMBER void add_mean_of_values(const RowTile& tile, const Rows& rows,
                                              Sums& o) const {
    static_assert(Rows::kHasWholeSums && !spec.has_dropout);
    const Work work = warp.work_of(tile);
    if (work.sequence.is_trailing) return;
    const std::int64_t head =
        std::int64_t{work.sequence.idx} * common().num_heads_kv + work.kv_head;
    const float* const mean =
        warp.cta.p.values.mean + head * spec.head_dim_v + 2 * (warp.cta.lane % 4);
#pragma unroll
    for (int j = 0; j < spec.head_dim_v / 8; ++j) {
      const auto pair = ptx::ld_global(reinterpret_cast<const ptx::F32x2*>(mean + 8 * j));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float* const sums = o + 4 * j + 2 * r;
        sums[0] = ptx::fma_rn(rows.sum[r], pair.x, sums[0]);
        sums[1] = ptx::fma_rn(rows.sum[r], pair.y, sums[1]);
      }
    }
  }

  /// What O is scaled by; writes lse and row_max.
  FOVEA_DEVICE_MEMBER float finish_row(const Row& row, int q_stage, int r, const Rows& done) const {
    float sum = done.sum[r];
    if constexpr (!Rows::kHasWholeSums) sum = quad_sum(sum);
    float factor = sum == 0.0F ? 0.0F : ptx::rcp_approx_ftz(sum);
    float lse = done.lse(r, sum);
    [[maybe_unused]] float of_mean = 0;  // what the scores of all keys lack
    if constexpr (ScoreUnit<spec, Mods>::kLseLacksMean) {
      of_mean = ptx::ld_shared<float>(warp.cta.of_mean_at(q_stage, warp.row(r)));
      lse = ptx::fma_rn(common().softmax_scale, of_mean, lse);
    }
    if (!spec.is_split && common().sinks != nullptr && !row.work.sequence.is_trailing) {
      const float sink = ptx::ld_global(common().sinks + row.q_head * common().sinks_stride);
      if (sum == 0.0F) {
        lse = sink;
      } else {
        const RowResult result = with_sink(lse, 1.0F, sink);
        factor *= result.factor;
        lse = result.lse;
      }
    }
    if constexpr (knows_lost_by_reference(spec)) {
      if (warp.cta.lane % 4 == 0)
        ptx::st_shared(warp.cta.size_of_row_at(q_stage, warp.row(r)), done.reference[r]);
    }
    if (warp.cta.lane % 4 == 0 && row.exists) {
      float greatest =
          finish_row_max(done.greatest[r], sum, ScoreUnit<spec, Mods>::natural(common()));
      if constexpr (ScoreUnit<spec, Mods>::kMaxLacksMean)
        greatest = ptx::fma_rn(common().softmax_scale, of_mean, greatest);
      row.store_values(lse, sum, greatest);
    }
    if constexpr (spec.has_dropout) factor *= common().dropout_keep_scale;
    return row.exists ? factor : quiet_nan();
  }

  /// A NaN or infinity in any sum of the warp's rows (finite minus itself is 0), or sums that have left the normal
  /// range of floats below. In the first pass the first warp of the CTA to say so puts the row tile at the head of its
  /// list. If it is there still without NaN and infinity among the values, powers were too large, or too small. Rows
  /// whose factor is NaN have no say: behind the last row of a sequence are another's, or whatever memory holds. A row
  /// tile with rows of codes that are far from 0 is on the list whatever its sums are, once.
  FOVEA_DEVICE_MEMBER void report(const Sums& o, int q_stage, const float (&factor)[2],
                                  std::uint32_t number, Pass pass) const {
    float all[4] = {};
#pragma unroll
    for (int i = 0; i < Rows::kSums; ++i) all[i % 4] += ptx::abs(o[i]);
    const float row[2] = {all[0] + all[1], all[2] + all[3]};
    const bool is_large = (!(row[0] - row[0] == 0.0F) && factor[0] == factor[0]) ||
                          (!(row[1] - row[1] == 0.0F) && factor[1] == factor[1]);
    // Rows that see nothing have factor 0.
    const bool is_small = (row[0] < Rows::kLeastSum && factor[0] > 0.0F) ||
                          (row[1] < Rows::kLeastSum && factor[1] > 0.0F);
    const bool is_far = pass == Pass::all && has_far(q_stage);
    if (!ptx::vote_any(is_large || is_small || is_far) || warp.cta.lane != 0) return;
    if (pass == Pass::all) {
      add_to_redo_list(number);
    } else if (pass == Pass::finite) {
      ptx::atom_exch_shared(warp.cta.smem + T::kAt.needs_low,
                            1U);  // warps of a group may say so at once
    }
  }

  FOVEA_DEVICE_MEMBER bool has_far(int q_stage) const {
    if constexpr (!T::kTakesFarRows) return false;
    return ptx::ld_shared<std::uint32_t>(warp.cta.has_far_at(q_stage, warp.group, warp.idx)) != 0;
  }

  /// Between two row tiles of a list all warps of the CTA meet, for a turn: so this one is the head of its list or not
  /// in it.
  FOVEA_DEVICE_MEMBER void add_to_redo_list(std::uint32_t number) const {
    const auto id = ptx::ld_shared<std::uint32_t>(warp.cta.id_at(number));
    const std::uint32_t before = ptx::atom_exch_shared(warp.cta.redo_list_at(number % 2), id);
    if (before != id) ptx::st_global(warp.cta.p.next_redo + id, static_cast<std::int32_t>(before));
  }

  // ---- sums in f32 ----

  /// Where they go; rows of partial states are as wide as the tile.
  struct F32Row {
    float* data;
    std::int64_t col_stride;
    std::int32_t width;
    bool has_pairs;  // two columns lie in 8 bytes at a multiple of 8

    FOVEA_DEVICE_MEMBER ptx::F32x2 load(int col) const {
      if (has_pairs) return ptx::ld_global(reinterpret_cast<const ptx::F32x2*>(data + col));
      ptx::F32x2 pair{};
      if (col < width) pair.x = ptx::ld_global(data + col * col_stride);
      if (col + 1 < width) pair.y = ptx::ld_global(data + (col + 1) * col_stride);
      return pair;
    }
    FOVEA_DEVICE_MEMBER void store(int col, ptx::F32x2 pair) const {
      if (has_pairs) return ptx::st_global(reinterpret_cast<ptx::F32x2*>(data + col), pair);
      if (col < width) ptx::st_global(data + col * col_stride, pair.x);
      if (col + 1 < width) ptx::st_global(data + (col + 1) * col_stride, pair.y);
    }
  };

  FOVEA_DEVICE_MEMBER F32Row f32_row(const Row& row) const {
    float* const to = row.out_f32();
    if constexpr (spec.is_split) return {to, 1, spec.head_dim_v, true};
    return {to, common().out.col_stride, common().head_dim_v, common().is_out_aligned != 0};
  }

  /// Four lanes write 32 bytes of a row together. Of indicators, infinity to what is there.
  FOVEA_DEVICE_MEMBER void write_sums(const RowTile& tile, const Sums& o, const float (&factor)[2],
                                      Pass pass) const {
    const float reached = infinity_of(pass);
    const Work work = warp.work_of(tile);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Row of_tile(common(), work, warp.row(r));
      if (!of_tile.exists) continue;
      const F32Row row = f32_row(of_tile);
#pragma unroll
      for (int j = 0; j < spec.head_dim_v / 8; ++j) {
        const int col = 8 * j + 2 * (warp.cta.lane % 4);
        if (!spec.is_split && col >= row.width) continue;
        const ptx::F32x2 pair{o[4 * j + 2 * r] * factor[r], o[4 * j + 2 * r + 1] * factor[r]};
        if (!is_indicator(pass)) {
          row.store(col, pair);
        } else if (pair.x != 0.0F || pair.y != 0.0F) {
          const ptx::F32x2 sums = row.load(col);
          row.store(col, {pair.x != 0.0F ? sums.x + reached : sums.x,
                          pair.y != 0.0F ? sums.y + reached : sums.y});
        }
      }
    }
  }

  FOVEA_DEVICE_MEMBER void write_out(const typename T::OTile& tile, const Sums& o,
                                     const float (&factor)[2]) const {
    const SharedAddress mine = tile.chunk(16 * warp.idx + warp.cta.lane % 16, warp.cta.lane / 16);
#pragma unroll
    for (int j = 0; j < spec.head_dim_v / 16; ++j) {
      const float* d = o + 8 * j;
      ptx::stmatrix_x4(
          tile.chunk_ahead(mine, 2 * j),
          {pack(d[0] * factor[0], d[1] * factor[0]), pack(d[2] * factor[1], d[3] * factor[1]),
           pack(d[4] * factor[0], d[5] * factor[0]), pack(d[6] * factor[1], d[7] * factor[1])});
    }
  }

  FOVEA_DEVICE std::uint32_t pack(float lo, float hi) {
    if constexpr (spec.out_element == Element::bf16) return ptx::cvt_bf16x2(lo, hi);
    return ptx::cvt_f16x2(lo, hi);
  }
};

}  // namespace fovea::cuda::sm90
