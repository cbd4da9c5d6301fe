// Values that are not finite. Chapter 4 of sm80/attention_backward.cuh; common/passes.cuh has the idea: owners
// whose sums are not finite compute them again in passes.
//
// In the products of rows, NaN and infinity need nothing: what is hidden is replaced. In the sums they would meet
// weights of 0. So such elements are taken out of the walked rows; P and dS of pairs that see them are not finite
// by themselves, but for dv, whose infinities come from dout alone: indicators of these are multiplied, once for
// each sign.
#pragma once

#include "common/passes.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm80/backward/owner.cuh"
#include "sm80/backward/sums.cuh"

namespace fovea::cuda::sm80 {

/// Of a tile that all warps have multiplied.
template <Sm80BackwardSpec spec>
FOVEA_DEVICE void rewrite_walked(const Owner<spec>& owner, SharedAddress walked, Pass pass) {
  using T = BackwardTraits<spec>;
  ptx::sync_threads();
  const int begin = is_indicator(pass) ? T::kWalkedVAt : 0;
#pragma unroll 1
  for (int at = begin + (owner.warp * 32 + owner.lane) * 4; at < T::kStatisticsAt;
       at += T::kThreads * 4) {
    const auto pair = ptx::ld_shared<std::uint32_t>(walked + at);
    ptx::st_shared(walked + at, values_of_pass<spec.element>(pair, pass));
  }
  ptx::sync_threads();
}

template <int num_rows, int num_blocks>
FOVEA_DEVICE float zero_of(const float (&sums)[num_rows][num_blocks][4]) {
  float zero = 0;
#pragma unroll
  for (int i = 0; i < num_rows; ++i)
#pragma unroll
    for (int j = 0; j < num_blocks; ++j) zero += zero_if_finite(sums[i][j]);
  return zero;
}

/// The same answer in every thread of the CTA.
template <Sm80BackwardSpec spec, class Mods>
FOVEA_DEVICE bool is_finite(const Owner<spec>& owner, const BackwardSums<spec, Mods>& sums) {
  using T = BackwardTraits<spec>;
  float zero = 0;
  if constexpr (spec.sums_scores) zero += zero_of(sums.by_score);
  if constexpr (spec.sums_values) zero += zero_of(sums.by_value);
  const bool mine = ptx::vote_all(!is_nan(zero));
  if (owner.lane == 0)
    ptx::st_shared(owner.smem + T::kVotesAt + owner.warp * 4, static_cast<std::uint32_t>(mine));
  ptx::sync_threads();
  bool all = true;
#pragma unroll
  for (int i = 0; i < spec.num_warps; ++i)
    all = all && ptx::ld_shared<std::uint32_t>(owner.smem + T::kVotesAt + i * 4) != 0;
  return all;
}

}  // namespace fovea::cuda::sm80
