// What backward kernels need to know of each row before they start (RowStatistics): its sum of exponentials, as the
// forward call left it in lse, and delta = rowsum(dout out) - dlse.          Dao et al. 2022, appendix B, equation 4
//
// Bound: memory, out and dout once. Eight lanes share a row, four rows a warp.
//
// Two kinds of rows are looked at again, by the warp together, all their keys one by one; few calls have any:
//   - a large lse, where its rounding to f32 would show in P: a bias of 10^6, or the lowest float in a whole row. Its
//     greatest score and the sum relative to that take the place of lse;
//   - with dsinks, a row whose dout or out is not finite: where it sees no key, neither has an effect.
// With parts of the keys, as ranks have them, callers give the lse of all: it is kept as it is then.
#pragma once

#include "common/backward_work.cuh"
#include "common/element.cuh"
#include "common/online_softmax.cuh"
#include "common/warp_reduce.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/backward_params.h"
#include "shared/backward_spec.h"

namespace fovea::cuda {

/// Eight neighbours of a row, 0 behind its end.
struct EightFloats {
  float value[8];
};

template <Element element>
FOVEA_DEVICE EightFloats load_eight(const void* data, std::int64_t at, std::int64_t stride,
                                    int count, bool is_aligned) {
  EightFloats x;
  if (is_aligned && count >= 8) {
    if constexpr (element == Element::f32) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto four = ptx::ld_global_nc(
            reinterpret_cast<const ptx::F32x4*>(static_cast<const float*>(data) + at) + i);
        x.value[i * 4] = four.x, x.value[i * 4 + 1] = four.y;
        x.value[i * 4 + 2] = four.z, x.value[i * 4 + 3] = four.w;
      }
    } else {
      const auto pairs = ptx::ld_global_nc(
          reinterpret_cast<const ptx::U32x4*>(static_cast<const std::uint16_t*>(data) + at));
      const std::uint32_t pair[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x.value[i * 2] =
            element == Element::bf16 ? ptx::f32_of_bf16_lo(pair[i]) : ptx::f32_of_f16_lo(pair[i]);
        x.value[i * 2 + 1] =
            element == Element::bf16 ? ptx::f32_of_bf16_hi(pair[i]) : ptx::f32_of_f16_hi(pair[i]);
      }
    }
    return x;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x.value[i] = 0;
    if (i < count) x.value[i] = load_element(data, element, at + i * stride);
  }
  return x;
}

template <DeltaSpec spec, class Mods>
struct DeltaTile {
  static constexpr int kWarps = kDeltaThreads / 32;
  static constexpr int kRowsAtOnce = 4;  // of a warp
  static constexpr std::int32_t kKeysAtOnce = 32;

  const BackwardParams& b;
  const ForwardParams& p;
  const OwnedTile tile;
  const int warp, lane;

  FOVEA_DEVICE_MEMBER DeltaTile(const BackwardParams& params, const OwnedTile& mine)
      : b(params), p(params.forward), tile(mine), warp(ptx::warp_idx()), lane(ptx::lane_idx()) {}

  /// Element offset of a row of out, dout or q.
  FOVEA_DEVICE_MEMBER std::int64_t row_at(const BshdParam& t, std::int32_t q_idx) const {
    return tile.sequence.q_batch * t.batch_stride + (tile.sequence.q_row + q_idx) * t.row_stride +
           tile.head * t.head_stride;
  }

  /// Of lse or dlse.
  FOVEA_DEVICE_MEMBER float value_at(const float* data, std::int64_t batch, std::int64_t head,
                                     std::int64_t row, std::int32_t q_idx) const {
    return ptx::ld_global(data + tile.sequence.q_batch * batch + tile.head * head +
                          (tile.sequence.q_row + q_idx) * row);
  }

  /// rowsum(dout out), in all lanes of eight.
  FOVEA_DEVICE_MEMBER float product(std::int32_t q_idx) const {
    const bool is_aligned =
        p.is_out_aligned != 0 && b.is_dout_aligned != 0 && p.head_dim_v % 8 == 0;
    float sum = is_aligned ? product_of_lane<true>(q_idx) : product_of_lane<false>(q_idx);
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) sum += ptx::shfl_bfly(sum, mask);
    return sum;
  }

  /// Aligned, four loads are under way at once.
  template <bool is_aligned>
  FOVEA_DEVICE_MEMBER float product_of_lane(std::int32_t q_idx) const {
    const std::int64_t out = row_at(p.out, q_idx);
    const std::int64_t dout = row_at(b.dout, q_idx);
    float sum = 0;
#pragma unroll(is_aligned ? 2 : 1)
    for (int col = lane % 8 * 8; col < p.head_dim_v; col += 64) {
      const int count = is_aligned ? 8 : p.head_dim_v - col;
      const EightFloats x =
          load_eight<spec.out_element>(p.out.data, out + col * p.out.col_stride, p.out.col_stride,
                                       count, is_aligned || p.is_out_aligned != 0);
      const EightFloats y = load_eight<spec.dout_element>(
          b.dout.data, dout + col * b.dout.col_stride, b.dout.col_stride, count,
          is_aligned || b.is_dout_aligned != 0);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = ptx::fma_rn(x.value[i], y.value[i], sum);
    }
    return sum;
  }

  // ---- a row again -----------------------------------------------------------------------------

  struct RowSum {
    float greatest, sum;  // relative to it
    bool sees;            // some key
  };

  /// The score of a row and this lane's key; -inf: hidden.
  FOVEA_DEVICE_MEMBER float score(std::int32_t q_idx, const VisitedTile& keys) const {
    const Sequence& s = tile.sequence;
    const std::int32_t kv_head = tile.head / p.group;
    const std::int32_t kv_idx = keys.idx * kKeysAtOnce + lane;
    if (kv_idx >= s.seqlen_kv) return -infinity();
    const std::int64_t q = row_at(p.q, q_idx);
    const std::int64_t k = s.kv_batch * p.k.batch_stride + (s.kv_row + kv_idx) * p.k.row_stride +
                           kv_head * p.k.head_stride;
    float sum = 0;
#pragma unroll 1
    for (int col = 0; col < p.head_dim_qk; ++col) {
      sum = ptx::fma_rn(load_element(p.q.data, spec.element, q + col * p.q.col_stride),
                        load_element(p.k.data, spec.element, k + col * p.k.col_stride), sum);
    }
    sum *= p.softmax_scale;
    const Position at{s.idx, tile.head, kv_head, q_idx, kv_idx, s.seqlen_q, s.seqlen_kv};
    if constexpr (Mods::has_score) sum = Mods::score(sum, at, p.captures);
    if constexpr (Mods::has_mask) {
      if (!keys.is_full && !Mods::mask(at, p.captures)) return -infinity();
    }
    return sum;
  }

  FOVEA_DEVICE_MEMBER RowSum sum_again(std::int32_t q_idx) const {
    const Sequence& s = tile.sequence;
    const TileSpan row{s.idx, tile.head, tile.head + 1, tile.head / p.group, q_idx, q_idx + 1,
                       0,     0,         s.seqlen_q,    s.seqlen_kv};
    TileWalk<Mods> tiles(row, {0, 0x7fffffff, kKeysAtOnce}, p.captures);
    RowSum mine{-infinity(), 0, false};
    for (VisitedTile keys; tiles.next(keys);) {
      const float x = score(q_idx, keys);
      if (x == -infinity()) continue;
      mine.sees = true;
      const float greatest = ptx::max_ftz(mine.greatest, x);
      const float rescale = ptx::ex2_approx_ftz((mine.greatest - greatest) * kLog2E);
      mine.sum = (mine.greatest == -infinity() ? 0.0F : mine.sum * rescale) +
                 ptx::ex2_approx_ftz((x - greatest) * kLog2E);
      mine.greatest = greatest;
    }
    const float greatest = warp_max(mine.greatest);
    const float part = mine.greatest == -infinity()
                           ? 0.0F
                           : mine.sum * ptx::ex2_approx_ftz((mine.greatest - greatest) * kLog2E);
    return {greatest, warp_sum(part), ptx::vote_any(mine.sees)};
  }

  // ---- all rows --------------------------------------------------------------------------------

  struct RowResult {
    float log_sum, delta, origin;
    bool is_again;
  };

  /// Of a row that exists.
  FOVEA_DEVICE_MEMBER RowResult first_result(std::int32_t q_idx) const {
    const float lse =
        value_at(p.lse, p.lse_batch_stride, p.lse_head_stride, p.lse_row_stride, q_idx);
    const float sum = product(q_idx);
    if (lse == -infinity()) return {infinity(), 0, 0, false};
    const float size = ptx::abs_ftz(lse);
    const bool is_large = spec.has_origins && size > b.largest_lse && size < infinity();
    const bool is_finite = sum - sum == 0;
    return {lse * kLog2E, sum - dlse_of(q_idx), 0, is_large || (b.dsinks != nullptr && !is_finite)};
  }

  FOVEA_DEVICE_MEMBER float dlse_of(std::int32_t q_idx) const {
    if (b.dlse == nullptr) return 0;
    return value_at(b.dlse, b.dlse_batch_stride, b.dlse_head_stride, b.dlse_row_stride, q_idx);
  }

  /// Is lse that of the keys of this call, up to rounding?
  FOVEA_DEVICE_MEMBER static bool is_lse_of(float sum_of_keys, float lse) {
    constexpr float kRounding = 0x1p-20F;
    // Infinities are equal.
    return !(ptx::abs_ftz(sum_of_keys - lse) > kRounding * ptx::abs_ftz(lse));
  }

  /// By the whole warp.
  FOVEA_DEVICE_MEMBER void look_again(std::int32_t q_idx, RowResult& row) const {
    const RowSum all = sum_again(q_idx);
    const float lse = row.log_sum * kLn2;
    const float sink =
        p.sinks == nullptr ? -infinity() : ptx::ld_global(p.sinks + tile.head * p.sinks_stride);
    if (!all.sees && is_lse_of(sink, lse)) row.delta = -dlse_of(q_idx);
    const bool is_number = all.greatest - all.greatest == 0;
    if (!spec.has_origins || !(ptx::abs_ftz(lse) > b.largest_lse) || !is_number) return;
    const float sum = all.sum + ptx::ex2_approx_ftz((sink - all.greatest) * kLog2E);
    const float log_sum = ptx::lg2_approx_ftz(sum);
    if (!is_lse_of(all.greatest + log_sum * kLn2, lse)) return;
    row.origin = all.greatest;
    row.log_sum = log_sum;
  }

  FOVEA_DEVICE_MEMBER void store(std::int32_t q_idx, const RowResult& row) const {
    const std::int64_t at = statistics_at<spec.is_varlen>(b.rows, tile.sequence, tile.head) + q_idx;
    ptx::st_global(b.rows.log_sum + at, row.log_sum);
    ptx::st_global(b.rows.delta + at, row.delta);
    if constexpr (spec.has_origins) ptx::st_global(b.rows.origin + at, row.origin);
  }

  FOVEA_DEVICE_MEMBER void run() const {
#pragma unroll 1
    for (int first = warp * kRowsAtOnce; first < kStatisticsRows; first += kWarps * kRowsAtOnce) {
      const std::int32_t q_idx = tile.begin + first + lane / 8;
      const bool exists = q_idx < tile.sequence.seqlen_q;
      RowResult row{infinity(), 0, 0, false};
      // Rows of other lanes may exist: all of them shuffle.
      const RowResult found = first_result(exists ? q_idx : 0);
      if (exists) row = found;
#pragma unroll 1
      for (std::uint32_t again = ptx::ballot(row.is_again && lane % 8 == 0); again != 0;
           again &= again - 1) {
        const int owner = lowest_bit(again);
        const std::int32_t their_idx = tile.begin + first + owner / 8;
        RowResult theirs{ptx::shfl_idx(row.log_sum, owner), ptx::shfl_idx(row.delta, owner), 0,
                         false};
        look_again(their_idx, theirs);
        if (lane / 8 == owner / 8) row = theirs;
      }
      if (lane % 8 == 0) store(q_idx, row);
    }
  }
};

/// A CTA for kStatisticsRows rows of a head, padding included.
template <DeltaSpec spec, class Mods>
FOVEA_DEVICE void backward_delta(const BackwardParams& b) {
  if constexpr (spec.has_dependents) ptx::griddepcontrol_launch_dependents();
  const OwnedTile tile = find_tile<spec.is_varlen, false>(b, ptx::block_idx().x, kStatisticsRows);
  if (tile.is_nothing || tile.sequence.is_trailing) return;
  DeltaTile<spec, Mods>(b, tile).run();
}

}  // namespace fovea::cuda
