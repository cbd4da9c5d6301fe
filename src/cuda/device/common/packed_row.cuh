// Which sequence a row of a packed tensor belongs to: a warp asks 32 of them at once.
#pragma once

#include "common/bits.cuh"
#include "common/sequence.cuh"
#include "ptx/warp.cuh"

namespace fovea::cuda {

/// The last of sequences [first, first + 32 step), `step` apart, that begins at `row` or before. Lanes ask one each.
FOVEA_DEVICE std::int32_t last_before(const IndexParam& cu_seqlens, std::int32_t batch,
                                      std::int32_t first, std::int32_t step, std::int32_t row) {
  const std::int64_t mine = first + std::int64_t{step} * ptx::lane_idx();
  const bool begins = mine < batch && index_at(cu_seqlens, mine) <= row;
  const std::uint32_t found = ptx::ballot(begins);
  return found == 0 ? first : first + step * lowest_bit(found ^ found >> 1U);  // of a run of ones
}

/// The sequence that a packed row belongs to, if there is one. Offsets that decrease give some sequence.
FOVEA_DEVICE std::int32_t sequence_of(const IndexParam& cu_seqlens, std::int32_t batch,
                                      std::int32_t row) {
  std::int32_t step = 1;
  while (step <= batch / 32) step *= 32;
  std::int32_t first = 0;
  for (; step >= 1; step /= 32) first = last_before(cu_seqlens, batch, first, step, row);
  return first;
}

}  // namespace fovea::cuda
