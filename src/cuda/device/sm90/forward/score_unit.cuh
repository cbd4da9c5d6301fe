// In which unit scores come to the softmax. Read scores.cuh for how they are made.
#pragma once

#include "common/coded_softmax.cuh"
#include "common/float_constants.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"

namespace fovea::cuda::sm90 {

/// In what whoever asks gets scores.
template <auto spec, class Mods>
struct ScoreUnit {
  static constexpr bool kHasLine = Mods::has_score_slope || Mods::has_score_bend;
  static constexpr bool kIsLog2 = kHasLine || Mods::has_softcap;
  /// Logarithms that are rounded to codes as they come, but where the greatest is kept: in eighths of an octave, from
  /// the one that code 0 stands for.
  static constexpr bool kIsArgument = kIsLog2 && spec.sums_codes && !spec.wants_row_max;
  static constexpr float kOctave = kIsArgument ? kCodesOfOctave : 1.0F;
  static constexpr float kNone = kIsArgument ? kCodeOfOne : 0.0F;
  /// Where scores hold what those of a row have in common, the softmax of codes is told.
  static constexpr bool kHasCommonPart =
      spec.sums_codes && spec.is_prescaled && !(kIsArgument && kHasLine);
  /// A cap by the special function unit, right to 2^-11 of the score, an eighth of what rounding q and k to eight bits
  /// moves one by. Not where somebody reads the score itself.
  static constexpr bool kApproximatesCap = Mods::has_softcap && kIsArgument;
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
