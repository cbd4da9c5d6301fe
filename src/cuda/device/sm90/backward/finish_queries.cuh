// dq from the fragments that sm90/attention_backward has summed: scaled, rounded once, into a tensor of any strides. A
// CTA for each tile of tile_q queries of a q head: reads 4 bytes an element, writes 2 or 4. For walks of which nobody
// knows who adds last; last_tiles.cuh does so for the others.
#pragma once

#include "common/backward_work.cuh"
#include "common/float_constants.cuh"
#include "common/store_eight.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "sm90/backward/cta.cuh"

namespace fovea::cuda::sm90 {

inline constexpr int kFinishThreads = 32 * kSm90RowWarps;
static_assert(kFinishThreads == 256, "a group for each half of a tile");

/// Four sums of the tile that begins at row `begin`.
template <Sm90BackwardSpec spec>
FOVEA_DEVICE ptx::F32x4 load_sums(const Sm90BackwardParams& p, std::int32_t begin,
                                  std::int64_t at) {
  const auto load = [at](const float* sums) {
    return ptx::ld_global(reinterpret_cast<const ptx::F32x4*>(sums) + at);
  };
  if constexpr (spec.is_staggered) {
    const ForwardParams& f = p.common.forward;
    const std::int32_t num_key_tiles = ceil_div(f.seqlen_kv, kSm90BackwardKeys);
    const std::int32_t idx = begin / spec.tile_q;
    ptx::F32x4 sum{};
    if (num_key_tiles == 0) return sum;
    if (has_first_sum(idx, num_key_tiles, ceil_div(f.seqlen_q, spec.tile_q)))
      sum = load(p.rows.dq_sums);
    if (has_round_sum(idx)) {
      const ptx::F32x4 round = load(p.rows.dq_round_sums);
      sum = {sum.x + round.x, sum.y + round.y, sum.z + round.z, sum.w + round.w};
    }
    return sum;
  }
  return load(p.rows.dq_sums);
}

/// kFinishThreads threads; sm90_finish_bytes of shared memory.
template <Sm90BackwardSpec spec, class Mods>
FOVEA_DEVICE void finish_queries(const Sm90BackwardParams& p) {
  ptx::griddepcontrol_launch_dependents();
  constexpr int kWidth = spec.head_dim_qk;
  constexpr int kRowBytes = 4 * (kWidth + 4);
  constexpr bool kHalvesAreColumns = spec.tile_q == 64;
  const ForwardParams& f = p.common.forward;
  const OwnedTile tile =
      find_tile<spec.is_varlen, false>(p.common, ptx::block_idx().x, spec.tile_q);
  ptx::griddepcontrol_wait();
  if (tile.is_nothing) return;
  const Sequence& s = tile.sequence;
  const ptx::SharedAddress rows = ptx::dynamic_shared();
  const int thread = ptx::thread_idx().x;
  const int half = thread / 128;
  const int lane = thread % 32;
  const int row = thread % 128 / 32 * 16 + lane / 4 + (kHalvesAreColumns ? 0 : 64 * half);
  const int column = 2 * (lane % 4) + (kHalvesAreColumns ? kWidth / 2 * half : 0);
  const std::int64_t first =
      statistics_at<spec.is_varlen>(p.common.rows, s, tile.head) + tile.begin;
  const std::int64_t fragment =
      first * (kWidth / 4) + thread % 128 + half * (spec.tile_q * kWidth / 8);
  const bool has_row[2] = {tile.begin + row < s.seqlen_q, tile.begin + row + 8 < s.seqlen_q};
  float zero = 0;  // NaN where a sum is not finite
#pragma unroll
  for (int j = 0; j < spec.tile_q * kWidth / (4 * kFinishThreads); ++j) {
    const ptx::F32x4 x =
        s.is_trailing ? ptx::F32x4{} : load_sums<spec>(p, tile.begin, fragment + 128 * j);
    if constexpr (spec.asks_redo) {
      if (has_row[0]) zero = ptx::fma_rn(x.x, 0.0F, ptx::fma_rn(x.y, 0.0F, zero));
      if (has_row[1]) zero = ptx::fma_rn(x.z, 0.0F, ptx::fma_rn(x.w, 0.0F, zero));
    }
    const ptx::SharedAddress at = rows + row * kRowBytes + 4 * (column + 8 * j);
    ptx::st_shared(at, ptx::F32x2{x.x, x.y});
    ptx::st_shared(at + 8 * kRowBytes, ptx::F32x2{x.z, x.w});
  }
  if (spec.asks_redo && ptx::vote_any(is_nan(zero)) && lane == 0)
    ask_redo<spec.is_varlen, false>(p.common, s, tile.head, tile.begin);
  ptx::sync_threads();
  const GradientParam& dq = p.common.dq;
  const bool is_aligned = has_aligned_rows(dq.tensor);
  const std::int32_t left = least(spec.tile_q, s.seqlen_q - tile.begin);
#pragma unroll 1
  for (int at = thread; at < left * (kWidth / 8); at += kFinishThreads) {
    const int y = at / (kWidth / 8);
    const int first_column = at % (kWidth / 8) * 8;
    const std::int32_t count = least(8, f.head_dim_qk - first_column);
    if (count <= 0) continue;
    const ptx::SharedAddress from = rows + y * kRowBytes + 4 * first_column;
    const auto lo = ptx::ld_shared<ptx::F32x4>(from);
    const auto hi = ptx::ld_shared<ptx::F32x4>(from + 16);
    const float c = f.softmax_scale;
    const float x[8] = {lo.x * c, lo.y * c, lo.z * c, lo.w * c,
                        hi.x * c, hi.y * c, hi.z * c, hi.w * c};
    store_eight<spec.element>(
        dq,
        s.q_batch * dq.tensor.batch_stride + (s.q_row + tile.begin + y) * dq.tensor.row_stride +
            tile.head * dq.tensor.head_stride + first_column * dq.tensor.col_stride,
        is_aligned, count, x);
  }
}

}  // namespace fovea::cuda::sm90
