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

/// So many columns of a tile, of which a warp sees some or none: where a mask leaves out many of a product with all
/// keys, their powers are spared. Branches would cost smaller products more.
inline constexpr int kSpanColumns = 64;
template <class Mods, int n>
inline constexpr bool kLeavesOutSpans = Mods::has_mask&& n > kSpanColumns;

/// Scores [kBegin, kEnd) of a thread's n: all that it has of its two rows in a span.
template <int begin, int end>
struct Span {
  static constexpr int kBegin = begin, kEnd = end;
};

template <bool leaves_out>
struct Spans {
  std::uint32_t seen = ~0U;   // a bit each: some rows see some of it
  std::uint32_t whole = ~0U;  // all see all

  /// visit(span) of those that are seen, leave_out(span) of the others.
  template <int n, int i = 0, class Visit, class LeaveOut>
  FOVEA_DEVICE_MEMBER void for_each(Visit&& visit, LeaveOut&& leave_out) const {
    constexpr int kScores = leaves_out ? kSpanColumns / 2 : n;
    if constexpr (i < n) {
      const Span<i, (i + kScores < n ? i + kScores : n)> span{};
      if (!leaves_out || (seen >> (i / kScores) & 1U) != 0)
        visit(span);
      else
        leave_out(span);
      for_each<n, i + kScores>(visit, leave_out);
    }
  }
  template <int n, class Visit>
  FOVEA_DEVICE_MEMBER void for_each(Visit&& visit) const {
    for_each<n>(visit, [](auto) {});
  }
};

/// What this warp's rows see of them: a lane's columns lie 8 apart, from 0 on and in pairs.
template <int n>
FOVEA_DEVICE Spans<true> spans_seen(const std::int32_t (&first)[2], const std::int32_t (&last)[2]) {
  Spans<true> spans{0, 0};
  Spans<true>{}.for_each<n>([&](auto span) {
    constexpr int kBegin = 2 * decltype(span)::kBegin, kEnd = 2 * decltype(span)::kEnd;
    constexpr int kLast = kEnd - 7;  // of the lane's columns
    const auto sees = [&](int r) { return last[r] >= kBegin && first[r] <= kLast; };
    const auto sees_all = [&](int r) { return last[r] >= kLast && first[r] <= kBegin; };
    const std::uint32_t some = ptx::vote_any(sees(0) || sees(1));
    const std::uint32_t all = ptx::vote_all(sees_all(0) && sees_all(1));
    spans.seen |= some << kBegin / kSpanColumns;
    spans.whole |= all << kBegin / kSpanColumns;
  });
  return spans;
}

/// What a row does not see of the keys from `first_key` on becomes -inf, whatever it was, in the spans that are neither
/// left out nor whole: two comparisons with constants for each score.
template <class Mods, Sm90ShortSpec spec, int n>
FOVEA_DEVICE auto mask(const Cta<spec>& cta, int row_tile, std::int32_t first_key, float (&s)[n]) {
  Spans<kLeavesOutSpans<Mods, n>> spans;
  if constexpr (!Mods::has_mask) cut_keys(s, cta.work.sequence.seqlen_kv - first_key, cta.lane);
  if constexpr (Mods::has_mask) {
    static_assert(Mods::has_kv_limits, "the mask is a range of keys");
    const Work work = cta.work_of(row_tile);
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
    if constexpr (kLeavesOutSpans<Mods, n>) spans = spans_seen<n>(first, last);
    spans.template for_each<n>([&](auto span) {
      if (kLeavesOutSpans<Mods, n> && (spans.whole >> (2 * span.kBegin / kSpanColumns) & 1U) != 0)
        return;
#pragma unroll
      for (int i = span.kBegin; i < span.kEnd; ++i) {
        const std::int32_t offset = 8 * (i / 4) + i % 2;
        if (offset > last[i / 2 % 2] || offset < first[i / 2 % 2]) s[i] = -infinity();
      }
    });
  }
  return spans;
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

  /// take(i, lo, hi): pair i of probabilities, which are powers of s; 0 in spans that are left out.
  template <int n, bool leaves_out, class Take>
  FOVEA_DEVICE_MEMBER void softmax(const float (&s)[n], const Spans<leaves_out>& spans,
                                   float softmax_scale_log2, Take&& take) {
    OriginStep steps[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float of_tile = greatest_of(s, spans, r);
      if constexpr (spec.wants_row_max) greatest[r] = ptx::max_ftz(greatest[r], of_tile);
      steps[r] = move_origin<false>(state[r], of_tile, softmax_scale_log2);
      rescales[r] = steps[r].rescale;
    }
    float sums[4] = {};  // of a row, every other pair: chains of half the length
    spans.template for_each<n>(
        [&](auto span) {
#pragma unroll
          for (int i = span.kBegin / 2; i < span.kEnd / 2; ++i) {
            const float lo = probability(s[2 * i], steps[i % 2]);
            const float hi = probability(s[2 * i + 1], steps[i % 2]);
            sums[i % 4] += lo + hi;
            take(i, lo, hi);
          }
        },
        [&](auto span) {
          // Of constants ptxas would make P ahead of the wait for S (compute.cuh).
          const float none = probability(-infinity(), steps[0]);
#pragma unroll
          for (int i = span.kBegin / 2; i < span.kEnd / 2; ++i) take(i, none, none);
        });
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
  template <int n, bool leaves_out>
  FOVEA_DEVICE float greatest_of(const float (&s)[n], const Spans<leaves_out>& spans, int r) {
    float greatest[2] = {-infinity(), -infinity()};
    spans.template for_each<n>([&](auto span) {
#pragma unroll
      for (int i = span.kBegin; i < span.kEnd; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) greatest[e] = ptx::max_ftz(greatest[e], s[i + 2 * r + e]);
      }
    });
    return join_quad(ptx::max_ftz(greatest[0], greatest[1]),
                     [](float a, float b) { return ptx::max_ftz(a, b); });
  }
};

}  // namespace fovea::cuda::sm90::short_keys
