// Which sequence a row or a tile of a packed tensor belongs to: each lane of a warp asks one at once.
#pragma once

#include "common/bits.cuh"
#include "common/sequence.cuh"
#include "ptx/warp.cuh"

namespace fovea::cuda {

/// The last of `batch` sequences that begins(its number) says yes of; it says so of none behind one that it denies. The
/// first where there is none. Lanes ask one each.
template <class Begins>
FOVEA_DEVICE std::int32_t last_sequence(std::int32_t batch, const Begins& begins) {
  std::int32_t step = 1;
  while (step <= batch / ptx::kWarpLanes) step *= ptx::kWarpLanes;
  std::int32_t first = 0;
  for (; step >= 1; step /= ptx::kWarpLanes) {
    const std::int64_t mine = first + std::int64_t{step} * ptx::lane_idx();
    const ptx::LaneMask found = ptx::ballot(mine < batch && begins(mine));
    if (found != 0) first += step * lowest_bit(found ^ found >> 1U);  // of a run of ones
  }
  return first;
}

/// The sequence that a packed row belongs to, if there is one. Offsets that decrease give some sequence.
FOVEA_DEVICE std::int32_t sequence_of(const IndexParam& cu_seqlens, std::int32_t batch,
                                      std::int32_t row) {
  return last_sequence(batch, [&](std::int64_t idx) { return index_at(cu_seqlens, idx) <= row; });
}

}  // namespace fovea::cuda
