// Values that are not finite. Chapter 5 of sm80/attention_forward.cuh; read store.cuh next.
//
// In Q and K, NaN and infinity need nothing: masked scores are replaced, so keys that a row does not see are harmless. In V they are
// not (0 * NaN). A team whose sums are not finite computes them again in passes: with such elements taken out, then once for each sign
// with indicators (1 where V holds it, 1 where a row sees the key), whose products say which sums it reaches. The common path pays
// one fma for each output.
#pragma once

#include "common/online_softmax.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_spec.h"
#include "sm80/forward/compute.cuh"
#include "sm80/forward/team.cuh"

namespace fovea::cuda::sm80 {

/// How often a CTA computes its rows, and of which values: all; then, where sums were not finite, the finite ones, and indicators of
/// the others.
enum class Pass : std::int32_t { all, finite, positive, negative, end };

/// One element's bits, as this pass wants it.
template <Element element>
FOVEA_DEVICE std::uint32_t value_of_pass(std::uint32_t bits, Pass pass) {
  constexpr std::uint32_t kInfinityBits = element == Element::bf16 ? 0x7f80U : 0x7c00U;
  constexpr std::uint32_t kOneBits = element == Element::bf16 ? 0x3f80U : 0x3c00U;
  const std::uint32_t magnitude = bits & 0x7fffU;
  if (pass == Pass::finite) return magnitude >= kInfinityBits ? 0 : bits;
  const bool is_negative = (bits & 0x8000U) != 0;
  const bool is_meant = magnitude > kInfinityBits ||
                        (magnitude == kInfinityBits && is_negative == (pass == Pass::negative));
  return is_meant ? kOneBits : 0;
}

template <ForwardSpec spec>
FOVEA_DEVICE void rewrite_values(const Team<spec>& team, SharedAddress values, Pass pass) {
  using T = Traits<spec>;
  constexpr Element kElement = spec.element;
  constexpr int kBytes = T::kStageBytes - T::kKeyBytes;
#pragma unroll 1
  for (int at = (team.warp * 32 + team.lane) * 4; at < kBytes; at += T::kThreads * 4) {
    const auto pair = ptx::ld_shared<std::uint32_t>(values + at);
    ptx::st_shared(values + at, value_of_pass<kElement>(pair & 0xffffU, pass) |
                                    value_of_pass<kElement>(pair >> 16U, pass) << 16U);
  }
  team.meet();
}

/// The same answer in every thread of the team.
template <ForwardSpec spec, class Mods>
FOVEA_DEVICE bool is_finite(const Team<spec>& team, const Sums<spec, Mods>& sums) {
  using T = Traits<spec>;
  float zero = 0;
#pragma unroll
  for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
    for (int j = 0; j < T::kColBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) zero = ptx::fma_rn(sums.out[i][j][e], 0.0F, zero);
  const bool mine = ptx::vote_all(!is_nan(zero));
  if (team.lane == 0)
    ptx::st_shared(team.smem + T::kVotesAt + team.warp * 4, static_cast<std::uint32_t>(mine));
  team.meet();
  bool all = true;
#pragma unroll
  for (int i = 0; i < spec.num_warps; ++i)
    all = all && ptx::ld_shared<std::uint32_t>(team.smem + T::kVotesAt + i * 4) != 0;
  return all;
}

}  // namespace fovea::cuda::sm80
