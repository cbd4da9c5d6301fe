// How the keys of a sequence are split among CTAs: a function of its own length alone, so that its bits are too.
#pragma once

#include "shared/types.h"

#if defined(__CUDACC_RTC__)
#define FOVEA_SHARED_FUNCTION static __device__ __forceinline__
#else
#define FOVEA_SHARED_FUNCTION inline
#endif

namespace fovea::cuda {

/// At most so many: a combine reads as many partial rows as there are splits.
inline constexpr int kMostSplits = 64;
/// A split's partial row costs about 16 keys' bytes at head_dim 128: 3 % of 256 keys of a group of 8.
inline constexpr int kFewestKeysPerSplit = 256;

FOVEA_SHARED_FUNCTION int keys_per_split(int seqlen_kv) {
  const int even = (seqlen_kv + kMostSplits - 1) / kMostSplits;
  return (even + kFewestKeysPerSplit - 1) / kFewestKeysPerSplit * kFewestKeysPerSplit;
}

/// At least 1: a row without keys is written too.
FOVEA_SHARED_FUNCTION int num_splits(int seqlen_kv) {
  if (seqlen_kv <= 0) return 1;
  const int keys = keys_per_split(seqlen_kv);
  return (seqlen_kv + keys - 1) / keys;
}

}  // namespace fovea::cuda
