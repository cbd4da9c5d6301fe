// How the keys of a sequence are split among CTAs: a function of its own length alone, so that its bits are too.
#pragma once

#include "shared/types.h"

namespace fovea::cuda {

/// At most so many: a combine reads as many partial rows as there are splits.
inline constexpr int kMostSplits = 64;
/// A partial row is as many bytes as a key and its value; a group of 8 shares the keys: 3 % of 256 keys.
inline constexpr int kFewestKeysPerSplit = 256;

/// Where more rows share the keys, partial rows are more bytes: a spec has fewer splits at most, and longer ones. (Of
/// 64 rows, splits of 1,024 keys are up to 10 % faster yet in large batches, but a sequence of 1,024 keys alone is a
/// fifth slower.)
constexpr int fewest_keys_per_split(int most_splits) {
  if (most_splits == kMostSplits) return kFewestKeysPerSplit;
  // Below 16: rows so wide, or so many, that a partial state is as many bytes as a hundred keys.
  return most_splits < 16 ? 8 * kFewestKeysPerSplit : 2 * kFewestKeysPerSplit;
}

/// most_splits: a spec's, a power of two up to kMostSplits.
constexpr int keys_per_split(int seqlen_kv, int most_splits) {
  const int fewest = fewest_keys_per_split(most_splits);
  const int even = (seqlen_kv + most_splits - 1) / most_splits;
  return (even + fewest - 1) / fewest * fewest;
}

/// At least 1: a row without keys is written too.
constexpr int num_splits(int seqlen_kv, int most_splits) {
  if (seqlen_kv <= 0) return 1;
  const int keys = keys_per_split(seqlen_kv, most_splits);
  return (seqlen_kv + keys - 1) / keys;
}

/// A group is 2,048 keys, where splits are as short as they may be; else a split.
inline constexpr int kSplitsOfGroup = 4;

/// How many splits that follow each other make a group, whose states are made one before groups are joined
/// (common/fold_splits.cuh): by whoever has them all.
constexpr int splits_of_group(int seqlen_kv, int most_splits) {
  const bool are_short =
      keys_per_split(seqlen_kv, most_splits) == fewest_keys_per_split(most_splits);
  return are_short ? kSplitsOfGroup : 1;
}

/// Of a sequence without keys one, too.
constexpr int num_groups(int seqlen_kv, int most_splits) {
  const int size = splits_of_group(seqlen_kv, most_splits);
  return (num_splits(seqlen_kv, most_splits) + size - 1) / size;
}

}  // namespace fovea::cuda
