// Rows whose sums were not finite: which row tiles have such. They go the same way as all others, behind them, a round
// for each pass (common/passes.cuh; what it makes of values and of output: ../values_of_pass.cuh). Read load.cuh next.
#pragma once

#include "common/passes.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm90/forward/cta.cuh"

namespace fovea::cuda::sm90 {

/// What the CTA computes again, by the scheduling warp. Numbers of row tiles to be computed again are in two lists:
/// shared memory holds the one found last (Cta::redo_list_at), `next_redo` behind each the one before, or -1.
template <auto spec>
struct RedoList {
  using T = Traits<spec>;
  const Cta<spec>& cta;
  Pass pass = Pass::all;  // of the round that is over
  std::int32_t id = -1;
  int parity = 0;

  FOVEA_DEVICE_MEMBER explicit RedoList(const Cta<spec>& of_cta) : cta(of_cta) {}

  /// The row tile of the next round, whose pass is posted; num_tiles where there is none any more.
  FOVEA_DEVICE_MEMBER std::int32_t next() {
    if (pass == Pass::all) {
      take(head(0));
    } else if (pass == Pass::negative) {
      take(ptx::ld_global(cta.p.next_redo + id));
    } else if (pass == Pass::positive) {
      pass = Pass::negative;
    } else {
      pass = pass == Pass::finite && needs_low() ? Pass::low : Pass::positive;
    }
    if (cta.lane == 0) ptx::st_shared(cta.smem + T::kAt.pass, static_cast<std::uint32_t>(pass));
    ptx::sync_warp();
    return id;
  }

 private:
  FOVEA_DEVICE_MEMBER std::int32_t head(int of_parity) const {
    return static_cast<std::int32_t>(cta.word_at(cta.redo_list_at(of_parity)));
  }

  FOVEA_DEVICE_MEMBER bool needs_low() const {
    return cta.word_at(cta.smem + T::kAt.needs_low) != 0;
  }

  FOVEA_DEVICE_MEMBER void take(std::int32_t found) {
    if (found < 0 && parity == 0) {
      parity = 1;
      found = head(1);
    }
    id = found < 0 ? cta.p.num_tiles : found;
    pass = Pass::finite;
    if (cta.lane == 0) ptx::st_shared(cta.smem + T::kAt.needs_low, 0U);
  }
};

}  // namespace fovea::cuda::sm90
