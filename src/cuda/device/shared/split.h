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

/// So many splits that follow each other make a group, whose states are made one before those of groups are
/// (common/fold_splits.cuh): by whoever has them all.
inline constexpr int kSplitsOfGroup = 4;

/// Of a sequence without keys one, too.
constexpr int num_groups(int seqlen_kv, int most_splits) {
  return (num_splits(seqlen_kv, most_splits) + kSplitsOfGroup - 1) / kSplitsOfGroup;
}

// ---- what a CTA takes at a time ------------------------------------------------------------------
//
// A split, a group, or all of a sequence: the bits are the same. The more the fewer partial states, as long as all CTAs
// have as much to do.

enum class Unit : int { split, group, sequence };

/// What CTAs have, if all have as much.
struct KeyShare {
  float keys;    // of a kv head; 0: each unit is a split
  bool is_even;  // all sequences are about as long
};

/// Of equal units: has the busiest CTA at most a sixteenth more than its share?
constexpr bool is_balanced(float keys, float share) {
  float taken = keys;
  while (taken < share && 16 * keys > share) taken += keys;
  return 16 * keys <= share || 16 * taken <= 17 * share;
}

/// Where lengths differ, a CTA that gets many long sequences keeps the others waiting: a unit is no longer than a group
/// there, and a CTA has about two or more.
constexpr bool can_take(float keys, const KeyShare& share) {
  return share.is_even ? is_balanced(keys, share.keys) : 1.8F * keys <= share.keys;
}

/// (With no division: CTAs wait for this before their first key.)
constexpr Unit unit_of(int seqlen_kv, int most_splits, const KeyShare& share) {
  if (share.keys == 0) return Unit::split;
  const int of_split = keys_per_split(seqlen_kv, most_splits);
  if (seqlen_kv <= of_split) return Unit::sequence;
  const int of_group = kSplitsOfGroup * of_split;
  const bool has_groups = seqlen_kv > of_group;
  if ((share.is_even || !has_groups) && can_take(static_cast<float>(seqlen_kv), share))
    return Unit::sequence;
  return has_groups && can_take(static_cast<float>(of_group), share) ? Unit::group : Unit::split;
}

constexpr int num_units(int seqlen_kv, int most_splits, Unit unit) {
  if (unit == Unit::sequence || seqlen_kv <= 0) return 1;
  const int splits = unit == Unit::group ? kSplitsOfGroup : 1;
  const int keys = splits * keys_per_split(seqlen_kv, most_splits);
  return (seqlen_kv + keys - 1) / keys;
}

}  // namespace fovea::cuda
