// How many keys each CTA has, if all have as many: from the lengths of all sequences, on the device. Who computes
// splits and who joins them ask alike, and get the same answer.
#pragma once

#include "common/sequence.cuh"
#include "common/warp_reduce.cuh"
#include "ptx/warp.cuh"
#include "shared/split.h"

namespace fovea::cuda {

/// Keys of a sequence that has rows.
template <CacheKind kind, class Params>
FOVEA_DEVICE std::int32_t shared_keys(const Params& p, std::int32_t idx) {
  if constexpr (kind.has_packed_q) {
    if (few_queries(p, idx).count == 0) return 0;
  }
  return cached_rows<kind>(p, idx).count;
}

/// Keys of sequences so far, of which each lane counts every 32nd.
struct CountedKeys {
  float keys = 0, most = 0, fewest = infinity();

  FOVEA_DEVICE_MEMBER void add(std::int32_t of_sequence) {
    const auto count = static_cast<float>(of_sequence);
    keys += count;
    most = ptx::max_ftz(most, count);
    if (count > 0) fewest = -ptx::max_ftz(-fewest, -count);
  }

  /// Of a warp, all lanes together. tiles_of_cta: row tiles of a sequence, for each CTA; 0: CTAs take splits.
  FOVEA_DEVICE_MEMBER KeyShare share(float tiles_of_cta) const {
    if (tiles_of_cta == 0) return {0, false};
    const float longest = warp_max(most), shortest = -warp_max(-fewest);
    return {warp_sum(keys) * tiles_of_cta, 16 * shortest >= 15 * longest};
  }
};

/// Params: ForwardParams or CombineParams.
template <CacheKind kind, class Params>
FOVEA_DEVICE KeyShare key_share(const Params& p, float tiles_of_cta) {
  CountedKeys counted;
#pragma unroll 1
  for (std::int32_t idx = ptx::lane_idx(); idx < p.num_sequences; idx += ptx::kWarpLanes)
    counted.add(shared_keys<kind>(p, idx));
  return counted.share(tiles_of_cta);
}

}  // namespace fovea::cuda
