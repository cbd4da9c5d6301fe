// From scores of a tile to probabilities, in a thread's two rows of accumulators. Read output.cuh next.
#pragma once

#include "common/float_constants.cuh"
#include "common/online_softmax.cuh"
#include "ptx/math.cuh"
#include "ptx/warp.cuh"
#include "sm90/short/cta.cuh"

namespace fovea::cuda::sm90::short_keys {

/// Keys from `count` of the tile on become -inf: a comparison for each score of the 16 columns that the end cuts, or of
/// those behind it.
template <int n>
FOVEA_DEVICE void cut_keys(float (&s)[n], std::int32_t count, int lane) {
  const std::int32_t last = count - 1 - 2 * (lane % 4);
#pragma unroll
  for (int block = 0; block < n / 8; ++block) {
    if (16 * (block + 1) <= count) continue;
#pragma unroll
    for (int i = 8 * block; i < 8 * (block + 1); ++i)
      if (8 * (i / 4) + i % 2 > last) s[i] = -infinity();
  }
}

/// What a row does not see becomes -inf, whatever it was: two comparisons with constants for each score.
template <class Mods, Sm90ShortSpec spec>
FOVEA_DEVICE void mask(const Cta<spec>& cta, const Step& step, float (&s)[spec.tile_kv / 2]) {
  const std::int32_t first_key = step.kv_tile * spec.tile_kv;
  if constexpr (!Mods::has_mask)
    return cut_keys(s, cta.work.sequence.seqlen_kv - first_key, cta.lane);
  if constexpr (Mods::has_mask) {
    static_assert(Mods::has_kv_limits, "the mask is a range of keys");
    const Work work = cta.work_of(step.row_tile);
    const std::int32_t column = first_key + 2 * (cta.lane % 4);
    std::int32_t first[2], last[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Position at = Row<spec>(cta.p.common, work, cta.my_row(r)).position();
      const std::int32_t mask_last = Mods::kv_last(at, cta.p.common.captures).value;
      const std::int32_t mask_first = Mods::kv_first(at, cta.p.common.captures).value;
      // Relative to this thread's first column, in the range of ints: positions are below 2^28.
      const std::int32_t before_end = least(work.sequence.seqlen_kv - 1, mask_last);
      last[r] = (before_end < -1 ? -1 : before_end) - column;
      first[r] = mask_first > column ? mask_first - column : 0;
    }
#pragma unroll
    for (int i = 0; i < spec.tile_kv / 2; ++i) {
      const std::int32_t offset = 8 * (i / 4) + i % 2;
      if (offset > last[i / 2 % 2] || offset < first[i / 2 % 2]) s[i] = -infinity();
    }
  }
}

/// Equal scores where a row sees the key, NaN too: the softmax then gives 1 there.
template <int n>
FOVEA_DEVICE void shrink(float (&s)[n]) {
#pragma unroll
  for (float& score : s) score = score == -infinity() ? -infinity() : 0.0F;
}

/// Of a quad, which has all scores of a row: what each of its lanes holds, by `join`.
template <class Join>
FOVEA_DEVICE float join_quad(float mine, Join&& join) {
  mine = join(mine, ptx::shfl_bfly(mine, 1));
  return join(mine, ptx::shfl_bfly(mine, 2));
}

template <Element element>
FOVEA_DEVICE std::uint32_t pack(float lo, float hi) {
  return element == Element::bf16 ? ptx::cvt_bf16x2(lo, hi) : ptx::cvt_f16x2(lo, hi);
}

template <Sm90ShortSpec spec>
struct Rows {
  static constexpr int kScores = spec.tile_kv / 2;
  RowState state[2];  // sums of this thread's keys alone
  float rescales[2];  // of what has been summed before the last tile
  float greatest[2];

  FOVEA_DEVICE_MEMBER void begin() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state[r] = empty_row();
      greatest[r] = -infinity();
    }
  }

  /// take(i, lo, hi): pair i of probabilities, which are powers of s.
  template <class Take>
  FOVEA_DEVICE_MEMBER void softmax(const float (&s)[kScores], float softmax_scale_log2,
                                   Take&& take) {
    OriginStep steps[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float of_tile = greatest_of(s, r);
      if constexpr (spec.wants_row_max) greatest[r] = ptx::max_ftz(greatest[r], of_tile);
      steps[r] = move_origin<false>(state[r], of_tile, softmax_scale_log2);
      rescales[r] = steps[r].rescale;
    }
    float sums[4] = {};  // of a row, every other pair: chains of half the length
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const float lo = probability(s[2 * i], steps[i % 2]);
      const float hi = probability(s[2 * i + 1], steps[i % 2]);
      sums[i % 4] += lo + hi;
      take(i, lo, hi);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) state[r].sum += sums[r] + sums[r + 2];
  }

  /// What was summed relative to the origin before.
  template <int n>
  FOVEA_DEVICE_MEMBER void rescale(float (&o)[n]) const {
    if (!ptx::vote_any(rescales[0] != 1.0F || rescales[1] != 1.0F)) return;
#pragma unroll
    for (int i = 0; i < n; ++i) o[i] *= rescales[i / 2 % 2];
  }

 private:
  FOVEA_DEVICE float greatest_of(const float (&s)[kScores], int r) {
    float greatest[2] = {s[2 * r], s[2 * r + 1]};
#pragma unroll
    for (int i = 4; i < kScores; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) greatest[e] = ptx::max_ftz(greatest[e], s[i + 2 * r + e]);
    }
    return join_quad(ptx::max_ftz(greatest[0], greatest[1]),
                     [](float a, float b) { return ptx::max_ftz(a, b); });
  }
};

}  // namespace fovea::cuda::sm90::short_keys
