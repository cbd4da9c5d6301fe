// What the softmax keeps of the rows whose scores scores.cuh makes.
#pragma once

#include "common/optimistic_softmax.cuh"
#include "shared/forward_spec.h"
#include "sm90/forward/scores.cuh"

namespace fovea::cuda::sm90 {

/// Of a thread that computes: two rows. Where a program's last fma makes logarithms anyway, it takes the reference off
/// as well.
template <Sm90ForwardSpec spec, class Mods>
using RowsOf = OptimisticRows<spec.element, spec.tile_kv, spec.head_dim_v, spec.wants_row_max,
                              ScoreUnit<spec, Mods>::kIsLog2 && !spec.wants_row_max,
                              Mods::has_score && !ScoreUnit<spec, Mods>::kIsLog2,
                              ScoreUnit<spec, Mods>::kKeepsCodes>;

}  // namespace fovea::cuda::sm90
