// The softmax of one row, taken in pieces: the one place where its numerical choices are made.
//
//   m = largest score so far, l = Σ exp(score - m), O = Σ exp(score - m) v         Milakov & Gimelshein 2018, algorithm
//                                                                                  3
//
// - Base 2 inside: exp(score - m) = 2^(score c - m c), c = log2 e or, where scores are still unscaled, scale log2 e.
//   One fma and one ex2 for each score. Natural units outside: lse, row_max.
// - The origin m follows the row's maximum only when that has grown by more than 2^8 of probability: sums stay far from
//   the limits of f32 and P of f16 (2^8 of 65504), and rows are rarely scaled again. Dao et al. 2026
//   (FlashAttention-4), section 3. Each row decides for itself: its bits do not depend on the rows beside it.
// - A row that has seen no key has m = -inf, l = 0: subtracting from the origin 0 instead gives 2^-inf = 0, never NaN.
// - NaN: maxima pass over it, sums do not. l is NaN where a visible score was.
// - A score program may give the lowest finite number, which others add to hide keys; here it is a score. Times log2 e
//   it is no float. A row whose origin is that far from 0 takes its scores times a power of two instead (unit_of).
#pragma once

#include "common/float_constants.cuh"
#include "ptx/base.cuh"
#include "ptx/math.cuh"

namespace fovea::cuda {

/// Growth of the maximum that the origin does not follow, as an exponent of 2.
inline constexpr float kOriginSlack = 8.0F;

/// Above this, a score times log2 e may be no float.
inline constexpr float kHugeScore = 0x1.6p127F;
/// Scores of such a size differ by 2^103 at least, or not at all. So any power of two that keeps both tells them apart
/// as exp does: equal ones have a difference of exactly 0, others one that no exponent has.
inline constexpr float kHugeUnit = 0x1p-20F;

FOVEA_DEVICE bool is_huge(float score) {
  const float size = ptx::abs_ftz(score);
  return size > kHugeScore && size < infinity();
}

/// What makes scores logarithms to base 2 in a row with this origin.
FOVEA_DEVICE float unit_of(float origin, float c) { return is_huge(origin) ? kHugeUnit : c; }

/// One row, or its part in one thread: `sum` may still be a part.
struct RowState {
  float origin;  // m, in the units of scores
  float sum;     // l
};

FOVEA_DEVICE RowState empty_row() { return {-infinity(), 0.0F}; }

/// What an update does to the row's sums, and what its probabilities are relative to.
struct OriginStep {
  float rescale;         // of sums so far; exactly 1 where the origin stays
  float minus_origin_c;  // -m c, 0 for a row that has seen nothing
  float c;
};

/// Moves the origin for scores up to `tile_max`. c > 0. can_be_huge: a score program makes them.
template <bool can_be_huge>
FOVEA_DEVICE OriginStep move_origin(RowState& row, float tile_max, float c) {
  const float greatest = ptx::max_ftz(row.origin, tile_max);
  const float growth = (greatest - row.origin) * c;
  OriginStep step{1.0F, 0.0F, c};
  const float old_origin = row.origin;
  // Written so that NaN (from -inf minus -inf) moves.
  if (!(growth <= kOriginSlack)) row.origin = greatest;
  const float origin = row.origin == -infinity() ? 0.0F : row.origin;
  if (!(growth <= kOriginSlack)) step.rescale = ptx::ex2_approx_ftz((old_origin - origin) * c);
  if constexpr (can_be_huge) step.c = unit_of(origin, c);
  step.minus_origin_c = -(origin * step.c);
  row.sum *= step.rescale;
  return step;
}

/// exp(score - m).
FOVEA_DEVICE float probability(float score, const OriginStep& step) {
  return ptx::ex2_approx_ftz(ptx::fma_rn_ftz(score, step.c, step.minus_origin_c));
}

/// A row at its end.
struct RowResult {
  float factor;  // of O
  float lse;     // natural
};

/// A row that saw something, whose sum is relative to `origin` in natural units, and a sink beside it in the
/// denominator. (A row whose lse is known is a sum of 1 relative to it.)
FOVEA_DEVICE RowResult with_sink(float origin, float sum, float sink) {
  const float top = ptx::max_ftz(origin, sink);
  const float own = ptx::ex2_approx_ftz((origin - top) * kLog2E);
  // A sink of +inf takes all the weight: infinity minus itself would be NaN.
  const float below_top = sink == top ? 0.0F : sink - top;
  const float total = sum * own + ptx::ex2_approx_ftz(below_top * kLog2E);
  return {own * ptx::rcp_approx_ftz(total), top + kLn2 * ptx::lg2_approx_ftz(total)};
}

/// `sum` is whole. unit: natural units of a score (1, or the scale where scores are unscaled). The sink joins the
/// denominator; -inf is none, NaN makes NaN. A row that saw nothing: factor 0, lse the sink.
FOVEA_DEVICE RowResult finish_row(const RowState& row, float unit, float sink) {
  const bool is_empty = row.origin == -infinity() && !is_nan(row.sum);
  const float origin = is_empty ? -infinity() : row.origin * unit;
  if (sink == -infinity()) {
    if (is_empty) return {0.0F, -infinity()};
    return {ptx::rcp_approx_ftz(row.sum), origin + kLn2 * ptx::lg2_approx_ftz(row.sum)};
  }
  if (is_empty) return {0.0F, sink};
  return with_sink(origin, row.sum, sink);
}

/// What a split leaves beside lse: its row_max; or, where lse is so large that log l is nothing beside it and lse is
/// the maximum itself, log l.
FOVEA_DEVICE float beside_lse(float lse, float sum, float row_max) {
  return is_huge(lse) ? kLn2 * ptx::lg2_approx_ftz(sum) : row_max;
}

/// The largest score as callers get it: natural units; a NaN in sight wins over every number.
FOVEA_DEVICE float finish_row_max(float row_max, float sum, float unit) {
  if (is_nan(sum) && row_max != infinity()) return quiet_nan();
  return row_max == -infinity() ? row_max : row_max * unit;
}

}  // namespace fovea::cuda
