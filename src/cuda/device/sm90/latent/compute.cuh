// A group's walk over the tiles of its units, and what it leaves of each: partial states for common/combine. Read
// common/careful_row.cuh next.
#pragma once

#include "common/careful_row.cuh"
#include "common/online_softmax.cuh"
#include "common/quad_reduce.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/latent/cta.cuh"
#include "sm90/latent/scores.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::sm90::latent {

template <Sm90LatentSpec spec, class Mods>
struct Compute {
  using L = Layout<spec>;
  static constexpr int kSums = L::kGroupCols / 2;  // of a thread
  const Cta<spec>& cta;
  const int group;
  Ring<L::kBuffers> buffers{0};
  Ring<L::kRecords> records{0};
  Ring<1> queries{0};

  Scores<spec, Mods> scores;
  Rows rows;
  float o[kSums];

  FOVEA_DEVICE_MEMBER explicit Compute(const Cta<spec>& of_cta)
      : cta(of_cta), group(of_cta.warp / 4), scores(of_cta, of_cta.warp / 4) {}

  FOVEA_DEVICE_MEMBER void run() {
#pragma unroll 1
    for (;;) {
      const Unit unit = cta.take_unit(records);
      if (unit.work.is_nothing) return;
      rows.start();
#pragma unroll
      for (float& sum : o) sum = 0;
      if (unit.has_tiles != 0) walk(unit.work);
      finish(cta.kept_unit(records).work);
      cta.give_back_unit(records);
    }
  }

 private:
  // ---- tiles -------------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void walk(const Work& work) {
    ptx::mbarrier_wait_parity(cta.barrier(L::kAt.q_full, 0), queries.parity);
    queries.advance();
#pragma unroll 1
    for (bool is_last = false; !is_last; buffers.advance()) {
      if (buffers.stage == group) score_tile(work);
      ptx::mbarrier_wait_parity(cta.barrier(L::kAt.p_full, buffers.stage), buffers.parity);
      is_last = PostedTile{cta.word_at(cta.word_of(buffers.stage))}.is_last();
      if (is_last) cta.release(cta.barrier(L::kAt.q_empty, 0));
      rescale();
      multiply_values();
      cta.release(cta.barrier(L::kAt.empty, buffers.stage));
    }
  }

  /// Of the tile in the group's own buffer: P and what goes with it, for both groups.
  FOVEA_DEVICE_MEMBER void score_tile(const Work& work) {
    scores.multiply_keys(buffers.parity);
    const PostedTile tile{cta.word_at(cta.word_of(group))};
    scores.apply_mods(work, tile);
    const int num_keys = work.kv_end - tile.idx() * spec.tile_kv;
    if (num_keys < spec.tile_kv) scores.clear_behind_keys(num_keys);
    scores.softmax(rows);
    ptx::fence_proxy_async_shared_cta();
    cta.release(cta.barrier(L::kAt.p_full, group));
  }

  /// Sums so far to the tile's origins. The group that has found these has done so with its rows already.
  FOVEA_DEVICE_MEMBER void rescale() {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto stats =
          ptx::ld_shared<ptx::F32x2>(cta.stats_at(buffers.stage, scores.my_row(half)));
      factor[half] = stats.y;
      if (buffers.stage != group) {
        rows.state[half].origin = stats.x;
        rows.state[half].sum *= stats.y;
      }
    }
    if (!ptx::vote_any(factor[0] != 1.0F || factor[1] != 1.0F)) return;
#pragma unroll
    for (int i = 0; i < kSums; ++i) o[i] *= factor[i / 2 % 2];
  }

  /// O += P V, of the group's columns.
  FOVEA_DEVICE_MEMBER void multiply_values() {
    using PTile = typename L::PTile;
    using VTile = typename L::VTile;
    const auto a = ptx::computed_here(k_major_descriptor(cta.probabilities(buffers.stage)));
    const auto b = ptx::computed_here(mn_major_descriptor(cta.values(buffers.stage, group)));
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < spec.tile_kv / L::kElement.k_step; ++i) {
      ptx::wgmma_ss<L::kType, L::kType, L::kGroupCols, ptx::Major::k, ptx::Major::mn>(
          o, advanced(a, k_major_offset<PTile>(i)), advanced(b, mn_major_offset<VTile>(i)), true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
  }

  // ---- the unit's end ----------------------------------------------------------------------------

  /// Of both groups.
  FOVEA_DEVICE_MEMBER static void meet() { ptx::bar_sync(3, 32 * L::kComputingWarps); }

  /// What a group knows of a row: its sum and maximum, and whether its columns of O are all finite.
  FOVEA_DEVICE_MEMBER void leave_parts() const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float zero = 0, sum = rows.state[half].sum;
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        zero = ptx::fma_rn(o[i + 2 * half], 0.0F, zero);
        zero = ptx::fma_rn(o[i + 2 * half + 1], 0.0F, zero);
      }
      zero = quad_sum(zero);
      sum = quad_sum(sum);
      if (cta.lane % 4 == 0) {
        ptx::st_shared(cta.part_at(group, scores.my_row(half)),
                       ptx::F32x4{sum, rows.greatest[half], zero, 0.0F});
      }
    }
  }

  /// Of a row: both groups' parts.
  struct Whole {
    float sum, greatest;
    bool is_finite;
  };
  FOVEA_DEVICE_MEMBER Whole whole_of(int row) const {
    const auto a = ptx::ld_shared<ptx::F32x4>(cta.part_at(0, row));
    const auto b = ptx::ld_shared<ptx::F32x4>(cta.part_at(1, row));
    return {a.x + b.x, ptx::max_ftz(a.y, b.y), a.z + b.z == 0.0F};
  }

  FOVEA_DEVICE_MEMBER void finish(const Work& work) {
    leave_parts();
    meet();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowView<spec> row(cta.p.common, work, scores.my_row(half));
      const Whole whole = whole_of(scores.my_row(half));
      if (row.exists && whole.is_finite) store_row(row, half, whole);
    }
#pragma unroll 1
    for (int i = cta.warp; i < L::kUsedRows; i += L::kComputingWarps) {
      const RowView<spec> row(cta.p.common, work, i);
      if (!row.exists || whole_of(i).is_finite) continue;
      CarefulRow<spec, Mods>(row).run();
    }
    meet();  // what was left for the other group is read
  }

  FOVEA_DEVICE_MEMBER void store_row(const RowView<spec>& row, int half, const Whole& whole) const {
    const ForwardParams& p = cta.p.common;
    const float unit = spec.is_prescaled ? 1.0F : p.softmax_scale;
    const RowState state{rows.state[half].origin, whole.sum};
    const RowResult result = finish_row(state, unit, -infinity());
    const std::int64_t at = row.partial_at();
    float* const to =
        p.partial_out + at * spec.head_dim_v + group * L::kGroupCols + cta.lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const ptx::F32x2 pair{o[i + 2 * half] * result.factor, o[i + 2 * half + 1] * result.factor};
      ptx::st_global(reinterpret_cast<ptx::F32x2*>(to + 2 * i), pair);
    }
    if (group == 0 && cta.lane % 4 == 0) {
      row.store_values(result.lse, whole.sum, finish_row_max(whole.greatest, whole.sum, unit));
    }
  }
};

}  // namespace fovea::cuda::sm90::latent
