// What attention in four bits keeps of a thread's row, and the end of a row tile: O, lse and row_max.
#pragma once

#include "common/float_constants.cuh"
#include "common/online_softmax.cuh"
#include "common/passes.cuh"
#include "common/row_view.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "shared/fp4_sm100.h"
#include "sm100/forward/row_output.cuh"
#include "sm100/fp4/cta.cuh"
#include "sm90/forward/score_unit.cuh"

namespace fovea::cuda::sm100 {

struct Fp4Row {
  float reference;  // the greatest score so far
  float sum;        // of p, whose greatest is fp4_p_max

  /// References follow the row's maximum, as the recipe says; a row that has seen no key subtracts 0.
  template <int group, bool can_be_huge>
  FOVEA_DEVICE_MEMBER OriginStep move_reference(float greatest, float c) {
    constexpr float kLog2PMax = group == 16 ? 11.392317422778761F : 2.584962500721156F;
    const float before = reference;
    reference = ptx::max_ftz(before, greatest);
    const float origin = reference == -infinity() ? 0.0F : reference;
    OriginStep step{1.0F, 0, c};
    if (reference != before) step.rescale = ptx::ex2_approx_ftz((before - origin) * c);
    if constexpr (can_be_huge) step.c = unit_of(origin, c);
    step.minus_origin_c = ptx::fma_rn(-origin, step.c, kLog2PMax);
    return step;
  }
};

template <Sm100Fp4Spec spec, class Mods>
struct Fp4Output : RowOutput<spec> {
  using View = RowView<spec>;
  using RowOutput<spec>::common;
  using RowOutput<spec>::thread;

  /// of_mean: q · μ of the row.
  FOVEA_DEVICE_MEMBER void finish(const RowTile& tile, const Fp4Row& row, float of_mean,
                                  Pass pass) const {
    const Work work = thread.cta.work_of(tile);
    const View view(common(), work, thread.row());
    const float factor = is_indicator(pass) ? 1.0F : finish_row(view, row, of_mean);
    this->store(view, factor, pass);
  }

 private:
  /// What O is scaled by; writes lse and row_max. Scores lack q · μ where no program has read them.
  FOVEA_DEVICE_MEMBER float finish_row(const View& view, const Fp4Row& row, float of_mean) const {
    constexpr float kUnit = 1.0F / fp4_p_max(spec.scale_group);  // of sums
    const float natural = sm90::ScoreUnit<spec, Mods>::natural(common());
    const float greatest = spec.is_prescaled ? row.reference : row.reference + of_mean;
    float sink = -infinity();
    if (common().sinks != nullptr && !view.work.sequence.is_trailing)
      sink = ptx::ld_global(common().sinks + view.q_head * common().sinks_stride);
    const float sum = row.sum * kUnit;
    const RowResult result = fovea::cuda::finish_row(RowState{greatest, sum}, natural, sink);
    if (view.exists) view.store_values(result.lse, sum, finish_row_max(greatest, sum, natural));
    return result.factor * kUnit;
  }
};

}  // namespace fovea::cuda::sm100
