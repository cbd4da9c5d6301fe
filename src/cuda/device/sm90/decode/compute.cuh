// Scores, softmax and products of the slices of one warp, and what all warps' sums together are. Read ../decode.cuh for
// the picture.
#pragma once

#include "common/careful_row.cuh"
#include "common/online_softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm90/decode/cta.cuh"
#include "team/compute.cuh"
#include "team/scores.cuh"
#include "team/store.cuh"
#include "team/team.cuh"
#include "team/walk.cuh"

namespace fovea::cuda::sm90::decoding {

/// A warp that computes: of the slices of a split every so-manieth.
template <Sm90DecodeSpec spec, class Mods>
struct Reader {
  using L = Layout<spec>;
  using T = typename L::T;
  using Team = team::Team<L::kWarpSpec>;
  using Row = RowView<L::kWarpSpec>;
  using Scores = team::Scores<L::kWarpSpec, Mods>;
  using Sums = team::Sums<L::kWarpSpec, Mods>;
  using Tiles = typename team::WalkOf<Mods>::Type;
  const Cta<spec>& cta;
  Ring<L::kSlots> slots{0};
  Ring<L::kRecords> records{0};

  FOVEA_DEVICE_MEMBER explicit Reader(const Cta<spec>& of_cta) : cta(of_cta) {}

  FOVEA_DEVICE_MEMBER void run() {
#pragma unroll 1
    for (;;) {
      const Work work = cta.take_work(records);
      if (work.is_nothing) return;
      compute(work);
      meet();
      join(work);
      meet();  // what was left for the others is read
    }
  }

 private:
  FOVEA_DEVICE_MEMBER static void meet() { ptx::bar_sync(1, 32 * L::kReaders); }

  // ---- slices ------------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void compute(const Work& work) {
    const Team team{cta.p.common, work, cta.smem, 0, cta.lane};
    Sums sums;
    read_queries(team, sums.scores);
    sums.start();
    const TileSpan rows = span_of<L::kWarpSpec>(work);
    Tiles tiles = team::start_tiles<Tiles>(team, rows);
    const int first = slots.stage;
#pragma unroll 1
    for (VisitedTile slice; tiles.next(slice); slots.advance()) {
      if (slots.stage % L::kReaders == cta.warp) add_slice(team, sums, slice);
    }
    put_rows(team, sums, part_of_warp(first));
  }

  /// A operands of Q Kᵀ, straight from memory: two elements of a row at a time. Rows that do not exist are the first
  /// one: nobody asks for what becomes of them.
  FOVEA_DEVICE_MEMBER void read_queries(const Team& team, Scores& scores) const {
    const ForwardParams& p = cta.p.common;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int mine = team.my_row(0, half);
      const Row row = team.row_at(team.row_at(mine).exists ? mine : 0);
      const char* from = static_cast<const char*>(p.q.data) + row.query_at() * T::kElement.bytes +
                         team.lane % 4 * 4;
#pragma unroll
      for (int chunk = 0; chunk < 2 * T::kQkSteps; ++chunk) {
        const bool exists =
            !spec.has_padded_head_dim || chunk * T::kElement.of_chunk < p.head_dim_qk;
        scores.queries[chunk / 2][0][half + chunk % 2 * 2] =
            exists ? ptx::ld_global_nc(reinterpret_cast<const std::uint32_t*>(from + chunk * 16))
                   : 0;
      }
    }
  }

  FOVEA_DEVICE_MEMBER void add_slice(const Team& team, Sums& sums, VisitedTile slice) const {
    ptx::mbarrier_wait_parity(cta.barrier(L::kAt.full, slots.stage), slots.parity);
    const typename T::VTile values = cta.values_at(slots.stage);
    const int num_keys = team.work.kv_end - slice.idx * spec.tile_kv;
    const bool is_cut = num_keys < spec.tile_kv;
    if (is_cut) clear_behind_keys(values, num_keys);
    slice.is_full = slice.is_full && !is_cut;
    typename Scores::Fragments s;
    sums.scores.multiply_keys(team, s, cta.keys_at(slots.stage));
    sums.scores.modify(team, s, slice);
    sums.scores.mask(team, s, slice);
    sums.softmax(team, s);
    if constexpr (spec.has_dropout) sums.drop(team, s, slice);
    sums.multiply_values(team, s, values);
    if (is_cut) ptx::fence_proxy_async_shared_cta();
    cta.release(cta.barrier(L::kAt.empty, slots.stage));
  }

  /// Where the sequence ends inside the slice there may be NaN behind it, and 0 * NaN is not 0.
  FOVEA_DEVICE_MEMBER void clear_behind_keys(const typename T::VTile& values, int num_keys) const {
    using Tile = typename T::VTile;
#pragma unroll 1
    for (int at = cta.lane; at < (spec.tile_kv - num_keys) * Tile::kChunks; at += 32) {
      ptx::st_shared(values.chunk(num_keys + at / Tile::kChunks, at % Tile::kChunks), ptx::U32x4{});
    }
    ptx::sync_warp();
  }

  // ---- join --------------------------------------------------------------------------------------

  static constexpr int kStateAt = 4 * spec.head_dim_v;
  static_assert(spec.head_dim_v <= 128, "a lane has four columns of a row");

  /// Parts are numbered from the split's first slice on, so that the order of their sum does not depend on what came
  /// before it.
  FOVEA_DEVICE_MEMBER int part_of_warp(int first_slot) const {
    return (cta.warp + L::kReaders - first_slot % L::kReaders) % L::kReaders;
  }

  FOVEA_DEVICE_MEMBER void put_rows(const Team& team, const Sums& sums, int part) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowState row = sums.rows[0][half];
      row.sum += ptx::shfl_bfly(row.sum, 1);
      row.sum += ptx::shfl_bfly(row.sum, 2);
      const SharedAddress to = cta.part_at(part, team.my_row(0, half));
      if (cta.lane % 4 == 0) {
        const float row_max = spec.wants_row_max ? sums.row_max[0][half] : 0.0F;
        ptx::st_shared(to + kStateAt, ptx::F32x4{row.origin, row.sum, row_max, 0.0F});
      }
#pragma unroll
      for (int j = 0; j < T::kColBlocks; ++j) {
        ptx::st_shared(to + (j * 8 + cta.lane % 4 * 2) * 4,
                       ptx::F32x2{sums.out[0][j][half * 2], sums.out[0][j][half * 2 + 1]});
      }
    }
  }

  FOVEA_DEVICE_MEMBER void join(const Work& work) const {
    const Team team{cta.p.common, work, cta.smem, 0, cta.lane};
#pragma unroll 1
    for (int row = cta.warp; row < spec.tile_q; row += L::kReaders) {
      const Row r = team.row_at(row);
      if (r.exists) join_row(r, row);
    }
  }

  /// A row of one warp.
  struct Part {
    float origin, sum, row_max;
  };

  FOVEA_DEVICE_MEMBER Part part_of(int reader, int row) const {
    const auto state = ptx::ld_shared<ptx::F32x4>(cta.part_at(reader, row) + kStateAt);
    return {state.x, state.y, state.z};
  }

  /// exp(m_w - m); 0 for a warp that saw no key.
  FOVEA_DEVICE_MEMBER static float weight_of(const Part& part, float origin, float c) {
    if (part.origin == -infinity()) return is_nan(part.sum) ? 1.0F : 0.0F;
    return ptx::ex2_approx_ftz((part.origin - origin) * c);
  }

  /// Four columns, in the order of warps.
  FOVEA_DEVICE_MEMBER ptx::F32x4 join_columns(const float (&weights)[L::kReaders], int row,
                                              int col) const {
    ptx::F32x4 sum{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < L::kReaders; ++i) {
      const auto part = ptx::ld_shared<ptx::F32x4>(cta.part_at(i, row) + col * 4);
      sum = {ptx::fma_rn(weights[i], part.x, sum.x), ptx::fma_rn(weights[i], part.y, sum.y),
             ptx::fma_rn(weights[i], part.z, sum.z), ptx::fma_rn(weights[i], part.w, sum.w)};
    }
    return sum;
  }

  FOVEA_DEVICE_MEMBER void join_row(const Row& r, int row) const {
    const ForwardParams& p = cta.p.common;
    const float unit = spec.is_prescaled ? 1.0F : p.softmax_scale;
    const float c = spec.is_prescaled ? kLog2E : p.softmax_scale_log2;
    Part parts[L::kReaders];
    Part whole{-infinity(), 0.0F, -infinity()};
#pragma unroll
    for (int i = 0; i < L::kReaders; ++i) {
      parts[i] = part_of(i, row);
      whole.origin = ptx::max_ftz(whole.origin, parts[i].origin);
      whole.row_max = ptx::max_ftz(whole.row_max, parts[i].row_max);
    }
    float weights[L::kReaders];
#pragma unroll
    for (int i = 0; i < L::kReaders; ++i) {
      weights[i] = weight_of(parts[i], whole.origin, c);
      whole.sum = ptx::fma_rn(weights[i], parts[i].sum, whole.sum);
    }
    const int col = cta.lane * 4;
    const bool has_cols = col < spec.head_dim_v;
    ptx::F32x4 sum{0, 0, 0, 0};
    if (has_cols) sum = join_columns(weights, row, col);
    if (!ptx::vote_all(is_finite(sum))) return CarefulRow<L::kWarpSpec, Mods>(r).run();
    RowResult result = finish_row({whole.origin, whole.sum}, unit, -infinity());
    if constexpr (spec.has_dropout) result.factor *= p.dropout_keep_scale;
    if (cta.lane == 0)
      r.store_values(result.lse, whole.sum, finish_row_max(whole.row_max, whole.sum, unit));
    if (!has_cols) return;
    ptx::st_global(reinterpret_cast<ptx::F32x4*>(r.out()) + cta.lane,
                   ptx::F32x4{sum.x * result.factor, sum.y * result.factor, sum.z * result.factor,
                              sum.w * result.factor});
  }

  FOVEA_DEVICE_MEMBER static bool is_finite(const ptx::F32x4& x) {
    const float zero =
        ptx::fma_rn(x.x, 0.0F, ptx::fma_rn(x.y, 0.0F, ptx::fma_rn(x.z, 0.0F, x.w * 0.0F)));
    return !is_nan(zero);
  }
};

}  // namespace fovea::cuda::sm90::decoding
