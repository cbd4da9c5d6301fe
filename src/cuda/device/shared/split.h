// How the keys of a sequence are split among CTAs: a function of its own length alone, so that its bits are too.
#pragma once

#include "shared/types.h"

namespace fovea::cuda {

/// At most so many: a combine reads as many partial rows as there are splits.
inline constexpr int kMostSplits = 64;
/// A partial row costs about as many bytes as 16 keys at head_dim 128; a group of 8 shares the keys: 3 % of 256 keys.
inline constexpr int kFewestKeysPerSplit = 256;

constexpr int keys_per_split(int seqlen_kv) {
  const int even = (seqlen_kv + kMostSplits - 1) / kMostSplits;
  return (even + kFewestKeysPerSplit - 1) / kFewestKeysPerSplit * kFewestKeysPerSplit;
}

/// At least 1: a row without keys is written too.
constexpr int num_splits(int seqlen_kv) {
  if (seqlen_kv <= 0) return 1;
  const int keys = keys_per_split(seqlen_kv);
  return (seqlen_kv + keys - 1) / keys;
}

}  // namespace fovea::cuda
