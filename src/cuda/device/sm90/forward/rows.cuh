// What the softmax keeps of the rows whose scores scores.cuh makes.
#pragma once

#include "common/coded_softmax.cuh"
#include "common/optimistic_softmax.cuh"
#include "shared/forward_spec.h"
#include "sm90/forward/scores.cuh"

namespace fovea::cuda::sm90 {

/// Of a thread that computes: two rows. Where a program's last fma makes logarithms anyway, it takes the reference off
/// as well.
template <Sm90ForwardSpec spec, class Mods, bool sums_codes = spec.sums_codes>
struct RowsOfKernel {
  using Type = OptimisticRows<spec.element, spec.tile_kv, spec.head_dim_v, spec.wants_row_max,
                              ScoreUnit<spec, Mods>::kIsLog2 && !spec.wants_row_max,
                              Mods::has_score && !ScoreUnit<spec, Mods>::kIsLog2,
                              ScoreUnit<spec, Mods>::kKeepsCodes>;
};
template <Sm90ForwardSpec spec, class Mods>
struct RowsOfKernel<spec, Mods, true> {
  using Unit = ScoreUnit<spec, Mods>;
  static constexpr ScoreKind kKind = Unit::kKeepsCodes   ? ScoreKind::codes
                                     : Unit::kIsArgument ? ScoreKind::arguments
                                     : Unit::kIsLog2     ? ScoreKind::logarithms
                                                         : ScoreKind::natural;
  using Type = CodedRows<spec.tile_kv, spec.head_dim_v, spec.wants_row_max, kKind, false,
                         Unit::kKeepsCodes || Mods::has_softcap>;
};
template <Sm90ForwardSpec spec, class Mods>
using RowsOf = typename RowsOfKernel<spec, Mods>::Type;

}  // namespace fovea::cuda::sm90
