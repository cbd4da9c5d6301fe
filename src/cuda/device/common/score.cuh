// One score behind the product q.k: what programs make of it, how steeply, and whether its row sees its key. What
// follows, a softmax or its gradient, is the caller's affair.
#pragma once

#include "common/float_constants.cuh"
#include "common/position.cuh"
#include "shared/captures.h"
#include "shared/forward_params.h"

namespace fovea::cuda {

/// A product: scaled, and what the score program makes of that.
template <class Mods>
FOVEA_DEVICE void modify_score(float& score, const Position& at, const ForwardParams& p) {
  score *= p.softmax_scale;
  if constexpr (Mods::has_score) score = Mods::score(score, at, p.captures);
}

/// Of the scores that follow from a product: the score as the softmax has it, and its slope by the scaled product.
struct Score {
  float value, slope;
};

template <class Mods>
FOVEA_DEVICE Score score_of(float scaled, const Position& at, const Captures& captures) {
  Score score{scaled, 1.0F};
  if constexpr (Mods::has_score) score.value = Mods::score(scaled, at, captures);
  if constexpr (Mods::has_score_derivative)
    score.slope = Mods::score_derivative(scaled, at, captures);
  return score;
}

/// -inf, whatever it was, where the row does not see the key, or there is none: keys end at kv_end.
template <class Mods>
FOVEA_DEVICE void mask_score(float& score, const Position& at, std::int32_t kv_end,
                             const Captures& captures) {
  bool is_visible = at.kv_idx < kv_end;
  if constexpr (Mods::has_mask) is_visible = is_visible && Mods::mask(at, captures);
  if (!is_visible) score = -infinity();
}

}  // namespace fovea::cuda
