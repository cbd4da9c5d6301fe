// The end of a row tile: O, lse and row_max of a thread's row, and whether its sums are finite. How O goes to memory:
// row_output.cuh.
#pragma once

#include "common/float_constants.cuh"
#include "common/passes.cuh"
#include "common/row_view.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm100/forward/cta.cuh"
#include "sm100/forward/row.cuh"
#include "sm100/forward/row_output.cuh"

namespace fovea::cuda::sm100 {

template <Sm100ForwardSpec spec, class Mods>
struct Output : RowOutput<spec> {
  using T = Traits<spec>;
  using MyRow = Row<spec, Mods>;
  using View = RowView<spec>;
  using RowOutput<spec>::common;
  using RowOutput<spec>::thread;

  /// `number`: of the row tile in this CTA, from 1 on.
  FOVEA_DEVICE_MEMBER void finish(const RowTile& tile, const MyRow& row, std::uint32_t number,
                                  Pass pass) const {
    const Work work = thread.cta.work_of(tile);
    const View view(common(), work, thread.row());
    const float factor = is_indicator(pass) ? MyRow::kIndicatorFactor : finish_row(view, row);
    const float magnitude = this->store(view, factor, pass);
    report(magnitude, view.exists ? factor : quiet_nan(), number, pass);
  }

 private:
  /// What O is scaled by; writes lse and row_max.
  FOVEA_DEVICE_MEMBER float finish_row(const View& view, const MyRow& row) const {
    const float sum = row.sum[0];
    float factor = sum == 0.0F ? 0.0F : ptx::rcp_approx_ftz(sum);
    float lse = row.lse(0, sum);
    if (!spec.is_split && common().sinks != nullptr && !view.work.sequence.is_trailing) {
      const float sink = ptx::ld_global(common().sinks + view.q_head * common().sinks_stride);
      if (sum == 0.0F) {
        lse = sink;
      } else {
        const RowResult result = with_sink(lse, 1.0F, sink);
        factor *= result.factor;
        lse = result.lse;
      }
    }
    if (view.exists) {
      float greatest = 0;
      if constexpr (spec.wants_row_max) {
        greatest =
            finish_row_max(row.greatest[0], sum, sm90::ScoreUnit<spec, Mods>::natural(common()));
      }
      view.store_values(lse, sum, greatest);
    }
    if constexpr (spec.has_dropout) factor *= common().dropout_keep_scale;
    return factor;
  }

  /// A NaN or infinity among the sums (finite minus itself is 0), or sums that have left the normal range of floats
  /// below. In the first pass the first warp of the CTA to say so puts the row tile at the head of its list. If it is
  /// there still without NaN and infinity among the values, powers were too large, or too small. Rows whose factor is
  /// NaN have no say: they are nobody's, or NaN whatever the values are.
  FOVEA_DEVICE_MEMBER void report(float magnitude, float factor, std::uint32_t number,
                                  Pass pass) const {
    const bool is_large = !(magnitude - magnitude == 0.0F) && factor == factor;
    const bool is_small = magnitude < MyRow::kLeastSum && factor > 0.0F;  // 0: sees nothing
    if (!ptx::vote_any(is_large || is_small) || thread.cta.lane != 0) return;
    if (pass == Pass::all) {
      this->add_to_redo_list(number);
    } else if (pass == Pass::finite) {
      ptx::atom_exch_shared(thread.cta.smem + T::kAt.needs_low, 1U);
    }
  }
};

}  // namespace fovea::cuda::sm100
