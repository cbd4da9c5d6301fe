#include "cuda/backward/turns.hpp"

#include <algorithm>

#include "core/ceil_div.hpp"
#include "cuda/backward/redo.hpp"
#include "cuda/device/shared/staggered_walk.h"

namespace fovea::cuda {

bool is_staggered(const ForwardProblem& f, std::int64_t tile_kv, std::int64_t tile_q) {
  if (!f.problem.is_deterministic || hides_keys(f)) return false;
  const std::int64_t key_tiles = ceil_div(f.seqlen_kv, tile_kv);
  return key_tiles > 1 && key_tiles * ceil_div(f.seqlen_q, tile_q) < kMostStaggeredPairs;
}

std::int32_t pairs_of_section(std::int32_t fitting, bool is_deterministic, bool has_mask) {
  constexpr std::int32_t kFewPairs = 4, kManyPairs = 16;
  constexpr std::int32_t kLeastMaskedPairs = 8, kMostMaskedPairs = 32;
  const std::int32_t with_sums = std::max(1, fitting / 2);
  if (!is_deterministic)
    return std::max(has_mask ? kLeastMaskedPairs : 1, std::min(kManyPairs, with_sums));
  // By turns, few CTAs of a head are to follow behind each other, even where its rows then come from memory.
  if (with_sums < kFewPairs) return kManyPairs;
  return has_mask ? std::min(fitting, kMostMaskedPairs) : with_sums;
}

}  // namespace fovea::cuda
