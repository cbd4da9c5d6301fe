// In which unit scores come to the softmax. Read scores.cuh for how they are made.
#pragma once

#include "common/float_constants.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"

namespace fovea::cuda::sm90 {

/// In what whoever asks gets scores.
template <auto spec, class Mods>
struct ScoreUnit {
  static constexpr bool kIsLog2 = Mods::has_score_slope || Mods::has_softcap;
  /// Codes that no program reads stay codes: the softmax scales them.
  static constexpr bool kKeepsCodes = spec.multiplies_codes && !spec.is_prescaled;
  /// What the softmax knows of rows is less what scores of all their keys have in common (CodeScores): lse, and the
  /// greatest score.
  static constexpr bool kLseLacksMean = kKeepsCodes || spec.sums_codes;
  static constexpr bool kMaxLacksMean = kKeepsCodes || (spec.sums_codes && kIsLog2);

  /// What makes scores logarithms to base 2.
  FOVEA_DEVICE float log2(const ForwardParams& common) {
    if constexpr (kIsLog2) return 1.0F;
    return spec.is_prescaled ? kLog2E : common.softmax_scale_log2;
  }

  FOVEA_DEVICE float natural(const ForwardParams& common) {
    if constexpr (kIsLog2 || kKeepsCodes) return kLn2;
    return spec.is_prescaled ? 1.0F : common.softmax_scale;
  }
};

}  // namespace fovea::cuda::sm90
