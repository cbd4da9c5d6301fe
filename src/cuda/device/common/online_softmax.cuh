// The softmax of one row, taken in pieces: the one place where its numerical choices are made.
//
//   m = largest score so far, l = Σ exp(score - m), O = Σ exp(score - m) v         Milakov & Gimelshein 2018, algorithm 3
//
// - Base 2 inside: exp(score - m) = 2^(score c - m c), c = log2 e or, where scores are still unscaled, scale log2 e. One fma and one
//   ex2 for each score. Natural units outside: lse, row_max.
// - The origin m follows the row's maximum only when that has grown by more than 2^8 of probability: sums stay far from the limits
//   of f32 and P of f16 (2^8 of 65504), and rows are rarely scaled again. Dao et al. 2026 (FlashAttention-4), section 3.
//   Each row decides for itself: its bits do not depend on the rows beside it.
// - A row that has seen no key has m = -inf, l = 0: subtracting from the origin 0 instead gives 2^-inf = 0, never NaN.
// - NaN: maxima pass over it, sums do not. l is NaN where a visible score was.
#pragma once

#include "ptx/base.cuh"
#include "ptx/math.cuh"

namespace fovea::cuda {

FOVEA_DEVICE float infinity() { return ptx::bit_cast<float>(0x7f800000U); }
FOVEA_DEVICE float quiet_nan() { return ptx::bit_cast<float>(0x7fc00000U); }
FOVEA_DEVICE bool is_nan(float x) { return x != x; }

inline constexpr float kLog2E = 0x1.715476p+0F;
inline constexpr float kLn2 = 0x1.62e43p-1F;

/// Growth of the maximum that the origin does not follow, as an exponent of 2.
inline constexpr float kOriginSlack = 8.0F;

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
};

/// Moves the origin for scores up to `tile_max`. c > 0.
FOVEA_DEVICE OriginStep move_origin(RowState& row, float tile_max, float c) {
  const float greatest = ptx::max_ftz(row.origin, tile_max);
  const float growth = (greatest - row.origin) * c;
  OriginStep step{1.0F, 0.0F};
  const float old_origin = row.origin;
  // Written so that NaN (from -inf minus -inf) moves.
  if (!(growth <= kOriginSlack)) row.origin = greatest;
  const float origin = row.origin == -infinity() ? 0.0F : row.origin;
  if (!(growth <= kOriginSlack)) step.rescale = ptx::ex2_approx_ftz((old_origin - origin) * c);
  step.minus_origin_c = -(origin * c);
  row.sum *= step.rescale;
  return step;
}

/// exp(score - m).
FOVEA_DEVICE float probability(float score, float c, const OriginStep& step) {
  return ptx::ex2_approx_ftz(ptx::fma_rn_ftz(score, c, step.minus_origin_c));
}

/// A row at its end.
struct RowResult {
  float factor;  // of O
  float lse;     // natural
};

/// `sum` is whole. unit: natural units of a score (1, or the scale where scores are unscaled). The sink joins the denominator;
/// -inf is none. A row that saw nothing: factor 0, lse the sink.
FOVEA_DEVICE RowResult finish_row(const RowState& row, float unit, float sink) {
  const bool is_empty = row.origin == -infinity() && !is_nan(row.sum);
  const float origin = is_empty ? -infinity() : row.origin * unit;
  if (sink == -infinity()) {
    if (is_empty) return {0.0F, -infinity()};
    return {ptx::rcp_approx_ftz(row.sum), origin + kLn2 * ptx::lg2_approx_ftz(row.sum)};
  }
  if (is_empty) return {0.0F, sink};
  const float top = ptx::max_ftz(origin, sink);
  const float own = ptx::ex2_approx_ftz((origin - top) * kLog2E);
  const float total = row.sum * own + ptx::ex2_approx_ftz((sink - top) * kLog2E);
  return {own * ptx::rcp_approx_ftz(total), top + kLn2 * ptx::lg2_approx_ftz(total)};
}

/// The largest score as told outside: natural units; a NaN in sight wins over every number.
FOVEA_DEVICE float finish_row_max(float row_max, float sum, float unit) {
  if (is_nan(sum) && row_max != infinity()) return quiet_nan();
  return row_max == -infinity() ? row_max : row_max * unit;
}

}  // namespace fovea::cuda
