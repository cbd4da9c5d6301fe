// What sm90/attention_backward reads of rows, from what common/backward_delta knows of them; and zeros where it sums
// dq, unless whoever adds first stores. A CTA for each kStatisticsRows rows of a head: bound by the zeros, 4 head_dim
// bytes a row.
#pragma once

#include "common/float_constants.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "shared/backward_params_sm90.h"
#include "shared/backward_spec_sm90.h"
#include "sm90/backward/probabilities.cuh"

namespace fovea::cuda::sm90 {

inline constexpr int kPrepareThreads = 32 * kSm90RowWarps;

/// x as three numbers of 16 bits, x = Σ kDeltaWeights piece to 2^-33 of it (bf16 2^-24), with zeros behind them.
template <Element element>
FOVEA_DEVICE ptx::U32x4 delta_pieces(float x) {
  constexpr float kLarge = element == Element::f16 ? 0x1p12F : 1.0F;
  const auto rounded = [](float value) { return pair_of<element>(value, 0.0F); };
  const std::uint32_t a = rounded(x / kLarge);
  const float behind_a = ptx::fma_rn(-kLarge, low_of<element>(a), x);
  const std::uint32_t b = rounded(behind_a);
  const float behind_b = behind_a - low_of<element>(b);
  const std::uint32_t c = rounded(behind_b * kLarge);
  return {a | b << 16, c, 0, 0};
}

/// In the order of Sm90BackwardRows.log_sum: where row `row` stands.
FOVEA_DEVICE std::int64_t log_sum_place(std::int64_t row) {
  return (row & ~std::int64_t{15}) + (row >> 1 & 3) * 4 + (row >> 3 & 1) * 2 + (row & 1);
}

/// kPrepareThreads threads, a CTA for each kStatisticsRows rows.
template <Sm90BackwardSpec spec, class Mods>
FOVEA_DEVICE void prepare_rows(const PrepareRowsParams& p) {
  ptx::griddepcontrol_launch_dependents();
  const std::int64_t first = static_cast<std::int64_t>(ptx::block_idx().x) * kStatisticsRows;
  const int thread = ptx::thread_idx().x;
  if constexpr (!spec.is_staggered && !spec.finishes_queries) {  // whose first sums are stored
    auto* const sums = reinterpret_cast<ptx::F32x4*>(p.to.dq_sums + first * spec.head_dim_qk);
#pragma unroll 4
    for (int i = thread; i < kStatisticsRows * spec.head_dim_qk / 4; i += kPrepareThreads)
      ptx::st_global(sums + i, ptx::F32x4{});
  }
  const std::int64_t threads = static_cast<std::int64_t>(ptx::grid_dim().x) * kPrepareThreads;
  for (std::int64_t i = ptx::block_idx().x * std::int64_t{kPrepareThreads} + thread;
       i < p.num_words; i += threads)
    ptx::st_global(p.to.progress + i, 0);
  ptx::griddepcontrol_wait();  // for who knows the rows
  if (thread >= kStatisticsRows) return;
  const std::int64_t row = first + thread;
  float log_sum = ptx::ld_global(p.from.log_sum + row);
  // The kernel takes no score less its row's origin: what such a row has a part in is computed again (asks_redo).
  if (spec.has_origins && ptx::ld_global(p.from.origin + row) != 0) log_sum = quiet_nan();
  ptx::st_global(p.to.log_sum + log_sum_place(row), -log_sum);
  const float minus_delta = -ptx::ld_global(p.from.delta + row);
  if constexpr (delta_bytes(spec) == sizeof(float)) {
    ptx::st_global(static_cast<float*>(p.to.delta) + log_sum_place(row), minus_delta);
  } else {
    ptx::st_global(static_cast<ptx::U32x4*>(p.to.delta) + row,
                   delta_pieces<spec.element>(minus_delta));
  }
}

}  // namespace fovea::cuda::sm90
