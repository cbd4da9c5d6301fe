// Values that are not finite. Chapter 7 of sm80/attention_forward.cuh, which is the last one. common/passes.cuh has the
// idea: a team whose sums are not finite computes them again in passes.
#pragma once

#include "common/passes.cuh"
#include "common/sequence.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_spec.h"
#include "team/compute.cuh"
#include "team/store.cuh"
#include "team/team.cuh"

namespace fovea::cuda::team {

template <TeamSpec spec>
FOVEA_DEVICE void rewrite_values(const Team<spec>& team, const typename Traits<spec>::VTile& values,
                                 Pass pass) {
  using T = Traits<spec>;
  constexpr Element kElement = spec.element;
#pragma unroll 1
  for (int at = (team.warp * 32 + team.lane) * 4; at < T::VTile::kBytes; at += T::kThreads * 4) {
    const auto pair = ptx::ld_shared<std::uint32_t>(values.base + at);
    ptx::st_shared(values.base + at, values_of_pass<kElement>(pair, pass));
  }
  team.meet();
}

/// The same answer in every thread of the team.
template <TeamSpec spec, class TileSums>
FOVEA_DEVICE bool is_finite(const Team<spec>& team, const TileSums& sums) {
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
    ptx::st_shared(team.smem + T::kAt.votes + team.warp * 4, static_cast<std::uint32_t>(mine));
  team.meet();
  bool all = true;
#pragma unroll
  for (int i = 0; i < spec.num_warps; ++i)
    all = all && ptx::ld_shared<std::uint32_t>(team.smem + T::kAt.votes + i * 4) != 0;
  return all;
}

/// walk(pass) makes the sums of a pass; what was kept before (Team::keep_work) is there.
template <TeamSpec spec, class TileSums, class Walk>
FOVEA_DEVICE void run_passes(Team<spec>& team, TileSums& sums, Walk&& walk) {
#pragma unroll 1
  for (Pass pass = Pass::all; pass != Pass::end;
       pass = static_cast<Pass>(static_cast<std::int32_t>(pass) + 1)) {
    walk(pass);
    const bool is_done = is_finite(team, sums) || pass != Pass::all;
    const Work kept = team.kept_work();
    team.renew_lane();
    if (is_done) finish(AtEnd<spec>{team, kept}, sums, pass);
    if (is_done && pass == Pass::all) return;
    team.meet();
  }
}

}  // namespace fovea::cuda::team
