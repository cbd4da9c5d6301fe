// Softmax of one row with a tangent beside it, tile by tile.
//
//   r = the mean of S' over the keys so far, by their probabilities
//   c = Σ P (S' - r), which only rounding keeps from 0
//   a tile moves r by m:   c = c rescale - m l + Σ P (S' - r);   T = (T - m O) rescale + (P (S' - r)) V + P V'
//   out' = T / l - (c / l) out;   lse' = r + c / l
//
// r is what the tangents of a row have in common. It would cancel in out', and is taken out before it costs digits: P
// (S' - r) is rounded to the element of the products. A mean of the first tile alone would not do, since a later tile
// may outweigh it.
#pragma once

#include "common/float_constants.cuh"
#include "common/online_softmax.cuh"
#include "common/position.cuh"
#include "common/row_view.cuh"
#include "common/score.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "shared/jvp_params.h"

namespace fovea::cuda {

/// A score and its tangent.
struct Dual {
  float value, tangent;
};

/// Scale and score program of a product and its tangent. has_products: q or k has a tangent.
template <class Mods, bool has_products>
FOVEA_DEVICE Dual dual_score(Dual product, const Position& at, const ForwardParams& p) {
  const float scaled = product.value * p.softmax_scale;
  Dual score{scaled, 0.0F};
  if constexpr (has_products) {
    score.tangent = product.tangent * p.softmax_scale;
    if constexpr (Mods::has_score_derivative)
      score.tangent *= Mods::score_derivative(scaled, at, p.captures);
  }
  if constexpr (Mods::has_score_tangent)
    score.tangent += Mods::score_tangent(scaled, at, p.captures);
  if constexpr (Mods::has_score) score.value = Mods::score(scaled, at, p.captures);
  return score;
}

/// A row in each of its four threads: all sums are whole.
struct TangentRow {
  RowState state;
  float centre;   // r
  float tangent;  // c
};

FOVEA_DEVICE TangentRow empty_tangent_row() { return {empty_row(), 0.0F, 0.0F}; }

/// What a tile does to the row's O and T.
struct TangentStep {
  OriginStep origin;
  float sum_before;  // l of the keys before, relative to the new origin
  float shift;       // m
};

/// Moves the origin to scores up to `greatest`, of the whole row.
template <bool can_be_huge>
FOVEA_DEVICE TangentStep begin_tile(TangentRow& row, float greatest) {
  TangentStep step{};
  step.origin = move_origin<can_be_huge>(row.state, greatest, kLog2E);
  step.sum_before = row.state.sum;
  row.tangent *= step.origin.rescale;
  return step;
}

/// sum: Σ P of the tile; moments: Σ P (S' - r). Moves r.
FOVEA_DEVICE void move_centre(TangentRow& row, TangentStep& step, float sum, float moments) {
  row.state.sum += sum;
  // Of a sum of NaN there is no mean; what follows is NaN all the same.
  step.shift =
      row.state.sum > 0 ? (row.tangent + moments) * ptx::rcp_approx_ftz(row.state.sum) : 0.0F;
  row.centre += step.shift;
  row.tangent = ptx::fma_rn(-step.shift, step.sum_before, row.tangent);
}

/// T of the keys before.
FOVEA_DEVICE float moved(float out_tangent, float out, const TangentStep& step) {
  return ptx::fma_rn(-step.shift, out, out_tangent) * step.origin.rescale;
}

/// A row at its end.
struct TangentResult {
  float factor;  // of O and T
  float mean;    // lse' - r: what is left to subtract, times out
  Dual lse;
};

/// Which share of the denominator the sink has.
FOVEA_DEVICE float sink_share(float sink, float lse) {
  if (sink == -infinity()) return 0.0F;
  return sink == lse ? 1.0F : ptx::ex2_approx_ftz((sink - lse) * kLog2E);
}

/// keep_scale: of dropout.
FOVEA_DEVICE TangentResult finish_tangent_row(const TangentRow& row, Dual sink, float keep_scale) {
  const RowResult result = finish_row(row.state, 1.0F, sink.value);
  const float share = sink_share(sink.value, result.lse);
  // The tangent of the sink is not centred.
  const float mean = result.factor * row.tangent + share * (sink.tangent - row.centre);
  return {result.factor * keep_scale, mean, {result.lse, row.centre + mean}};
}

/// Of the row of this thread; -inf: none.
FOVEA_DEVICE Dual sink_of(const JvpParams& p, std::int32_t q_head, bool is_trailing) {
  Dual sink{-infinity(), 0.0F};
  if (p.forward.sinks == nullptr || is_trailing) return sink;
  sink.value = ptx::ld_global(p.forward.sinks + q_head * p.forward.sinks_stride);
  if (p.tangent.sinks != nullptr)
    sink.tangent = ptx::ld_global(p.tangent.sinks + q_head * p.tangent.sinks_stride);
  return sink;
}

/// The end of O and T of one column.
FOVEA_DEVICE Dual finish_column(float out, float out_tangent, const TangentResult& row) {
  const float value = scaled_sum(out, row.factor);
  const float tangent = out_tangent * row.factor;
  return {value, value == 0 ? tangent : ptx::fma_rn(-row.mean, value, tangent)};
}

}  // namespace fovea::cuda
