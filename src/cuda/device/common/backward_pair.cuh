// One score on its way back: from q·k and dout·v of a pair (query, key) to its probability and the gradient of its
// score. What kernels that own rows share; sm80/attention_backward_f32.cuh is the plainest of them.
#pragma once

#include "common/backward_work.cuh"
#include "common/online_softmax.cuh"
#include "common/score.cuh"
#include "ptx/math.cuh"
#include "shared/backward_params.h"
#include "shared/backward_spec.h"

namespace fovea::cuda {

/// A pair that its query does not see has weight and gradient of exactly 0, whatever it holds.
struct Pair {
  float weight;    // P
  float gradient;  // dS, before the softmax scale
};

/// exp(score - lse). c: log2(e), or with the softmax scale in it.
template <bool has_origins>
FOVEA_DEVICE float weight_of(float score, const RowStatistic& row, float c) {
  if constexpr (has_origins)
    return ptx::ex2_approx_ftz(ptx::fma_rn_ftz(score - row.origin, c, -row.log_sum));
  return ptx::ex2_approx_ftz(ptx::fma_rn_ftz(score, c, -row.log_sum));
}

/// The slope of what has no gradient may be anything.
FOVEA_DEVICE float through_slope(float gradient, float slope) {
  return gradient == 0 ? 0.0F : gradient * slope;
}

}  // namespace fovea::cuda
