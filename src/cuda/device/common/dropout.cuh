// Which probabilities are dropped: Philox4x32-10 by position (Salmon et al. 2011), bit for bit as core/philox.hpp. The
// counter of a decision is (kv_idx / 4, q_idx, q_head, batch), its word kv_idx % 4, so one evaluation serves four
// neighbouring keys.
#pragma once

#include "ptx/base.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"

namespace fovea::cuda {

/// Of the generator.
struct DropoutKey {
  std::uint32_t lo, hi;
};

/// And where a part of a problem stands in the whole that is drawn for.
struct PlacedDropoutKey : DropoutKey {
  const std::int32_t* places;  // of batch entries, query heads, queries and keys
  std::int32_t num_sequences, num_heads_q, seqlen_q, seqlen_kv;
};

namespace detail {
template <bool has_places>
struct KeyOfPart {
  using Type = DropoutKey;
};
template <>
struct KeyOfPart<true> {
  using Type = PlacedDropoutKey;
};
}  // namespace detail

template <auto spec>
using DropoutKeyOf = typename detail::KeyOfPart<spec.has_dropout_places>::Type;

FOVEA_DEVICE ptx::U32x4 philox4x32(ptx::U32x4 c, DropoutKey key) {
  constexpr std::uint32_t kMultiplier0 = 0xD2511F53U, kMultiplier1 = 0xCD9E8D57U;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9U, kWeyl1 = 0xBB67AE85U;
  constexpr int kRounds = 10;
  std::uint32_t key0 = key.lo, key1 = key.hi;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    // Both halves of one product: asked for apart, each would be a multiplication.
    const std::uint64_t a = std::uint64_t{kMultiplier1} * c.z;
    const std::uint64_t b = std::uint64_t{kMultiplier0} * c.x;
    c = {static_cast<std::uint32_t>(a >> 32U) ^ c.y ^ key0, static_cast<std::uint32_t>(a),
         static_cast<std::uint32_t>(b >> 32U) ^ c.w ^ key1, static_cast<std::uint32_t>(b)};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return c;
}

/// Where it is mixed from memory, that is one more evaluation of the generator: asked for once for many keys of a row.
template <bool reads_seed>
FOVEA_DEVICE DropoutKey mixed_dropout_key(const ForwardParams& p) {
  if constexpr (!reads_seed) {
    return {p.dropout_key[0], p.dropout_key[1]};
  } else {
    const std::uint64_t seed = p.dropout_seed + ptx::ld_global(p.dropout_seed_at);
    const std::uint64_t offset = p.dropout_offset + ptx::ld_global(p.dropout_offset_at);
    const auto low = [](std::uint64_t word) { return static_cast<std::uint32_t>(word); };
    const ptx::U32x4 mixed =
        philox4x32({low(offset), low(offset >> 32U), 0, 0}, {low(seed), low(seed >> 32U)});
    return {mixed.x, mixed.y};
  }
}

/// Of the call.
template <auto spec>
FOVEA_DEVICE DropoutKeyOf<spec> dropout_key(const ForwardParams& p) {
  const DropoutKey mixed = mixed_dropout_key<spec.reads_dropout_seed>(p);
  if constexpr (spec.has_dropout_places) {
    return {mixed, p.dropout_places, p.num_sequences, p.num_heads_q, p.seqlen_q, p.seqlen_kv};
  } else {
    return mixed;
  }
}

/// The words of keys 4 group .. 4 group + 3.
FOVEA_DEVICE ptx::U32x4 random_words(DropoutKey key, std::int32_t batch, std::int32_t q_head,
                                     std::int32_t q_idx, std::int32_t group) {
  return philox4x32({static_cast<std::uint32_t>(group), static_cast<std::uint32_t>(q_idx),
                     static_cast<std::uint32_t>(q_head), static_cast<std::uint32_t>(batch)},
                    key);
}

/// The same of a part. Rows and keys of a tile beyond the last ones are drawn for as these are.
FOVEA_DEVICE ptx::U32x4 random_words(const PlacedDropoutKey& key, std::int32_t batch,
                                     std::int32_t q_head, std::int32_t q_idx, std::int32_t group) {
  const std::int32_t* const of_heads = key.places + key.num_sequences;
  const std::int32_t* const of_queries = of_heads + key.num_heads_q;
  const std::int32_t* const of_keys = of_queries + key.seqlen_q;
  const auto at = [](const std::int32_t* places, std::int32_t index, std::int32_t count) {
    return ptx::ld_global(places + (index < count ? index : count - 1));
  };
  return random_words(static_cast<const DropoutKey&>(key), ptx::ld_global(key.places + batch),
                      at(of_heads, q_head, key.num_heads_q), at(of_queries, q_idx, key.seqlen_q),
                      at(of_keys, 4 * group, key.seqlen_kv) / 4);
}

FOVEA_DEVICE bool is_dropped(const ForwardParams& p, std::uint32_t word) {
  return word < p.dropout_threshold;
}

/// The probability of one key, by an evaluation of its own.
template <class Key>
FOVEA_DEVICE bool is_dropped(const ForwardParams& p, const Key& key, std::int32_t batch,
                             std::int32_t q_head, std::int32_t q_idx, std::int32_t kv_idx) {
  const ptx::U32x4 words = random_words(key, batch, q_head, q_idx, kv_idx / 4);
  const std::uint32_t word = kv_idx % 4 < 2 ? (kv_idx % 4 == 0 ? words.x : words.y)
                                            : (kv_idx % 4 == 2 ? words.z : words.w);
  return is_dropped(p, word);
}

/// Of a pair of 16-bit probabilities, by their words: the bits that stay.
FOVEA_DEVICE std::uint32_t kept_pair(const ForwardParams& p, std::uint32_t lo, std::uint32_t hi) {
  return (is_dropped(p, lo) ? 0U : 0xffffU) | (is_dropped(p, hi) ? 0U : 0xffff0000U);
}

/// The words of a thread's part of a fragment of eight keys from kv_begin on: of its first row and its two keys x and
/// y, of its second z and w. A lane draws four words of one row, of the second one where the lane is odd, and its
/// neighbour those of the other: half of each is exchanged. q_head and q_idx are those of the row that this lane draws.
template <class Key>
FOVEA_DEVICE ptx::U32x4 fragment_words(const Key& key, std::int32_t batch, std::int32_t q_head,
                                       std::int32_t q_idx, std::int32_t kv_begin) {
  const int lane = ptx::lane_idx();
  const bool is_odd = lane % 2 != 0;
  const ptx::U32x4 own = random_words(key, batch, q_head, q_idx, kv_begin / 4 + lane % 4 / 2);
  const std::uint32_t lo = ptx::shfl_bfly(is_odd ? own.x : own.z, 1);
  const std::uint32_t hi = ptx::shfl_bfly(is_odd ? own.y : own.w, 1);
  if (is_odd) return {lo, hi, own.z, own.w};
  return {own.x, own.y, lo, hi};
}

/// One bit for each of a thread's four scores in a fragment of 16 queries and eight keys, from the first of its first
/// row on: it is dropped.
template <class Key>
FOVEA_DEVICE std::uint32_t dropped_of_queries(const ForwardParams& p, const Key& key,
                                              std::int32_t batch, std::int32_t q_head,
                                              std::int32_t first_query, std::int32_t first_key) {
  const int lane = ptx::lane_idx();
  const ptx::U32x4 words =
      fragment_words(key, batch, q_head, first_query + lane / 4 + lane % 2 * 8, first_key);
  return (is_dropped(p, words.x) ? 1U : 0U) | (is_dropped(p, words.y) ? 2U : 0U) |
         (is_dropped(p, words.z) ? 4U : 0U) | (is_dropped(p, words.w) ? 8U : 0U);
}

/// The same of 16 keys and eight queries. Four lanes, 4 apart, have four neighbouring keys of the same four (query,
/// half): each draws one of these.
template <class Key>
FOVEA_DEVICE std::uint32_t dropped_of_keys(const ForwardParams& p, const Key& key,
                                           std::int32_t batch, std::int32_t q_head,
                                           std::int32_t first_query, std::int32_t first_key) {
  const int lane = ptx::lane_idx();
  const int turn = lane / 4 % 4;
  const ptx::U32x4 words = random_words(key, batch, q_head, first_query + lane % 4 * 2 + turn % 2,
                                        (first_key + turn / 2 * 8) / 4 + lane / 16);
  const std::uint32_t own = (is_dropped(p, words.x) ? 1U : 0U) |
                            (is_dropped(p, words.y) ? 2U : 0U) |
                            (is_dropped(p, words.z) ? 4U : 0U) | (is_dropped(p, words.w) ? 8U : 0U);
  std::uint32_t mine = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const std::uint32_t theirs = ptx::shfl_idx(own, lane / 16 * 16 + e * 4 + lane % 4);
    mine |= (theirs >> static_cast<std::uint32_t>(turn) & 1U) << static_cast<std::uint32_t>(e);
  }
  return mine;
}

/// Of each 4 bits those whose number has not the bit `distance` that the lane has, for those of the lane that differs
/// by it, where neighbours are `step` lanes apart: one of two rounds by which four lanes transpose 4 x 4 bits.
FOVEA_DEVICE std::uint32_t transposed_bits(std::uint32_t own, std::uint32_t distance, int lane,
                                           int step) {
  const std::uint32_t low = distance == 2 ? 0x33333333U : 0x55555555U;
  const std::uint32_t other = ptx::shfl_bfly(own, step * static_cast<int>(distance));
  if ((static_cast<std::uint32_t>(lane) / static_cast<std::uint32_t>(step) & distance) != 0)
    return (other >> distance & low) | (own & ~low);
  return (own & low) | (other << distance & ~low);
}

/// The same as bits, 4 of a fragment: x, y, z, w from the lowest on. What lanes draw is exchanged for eight fragments
/// at once.
struct DroppedBits {
  std::uint32_t own = 0;

  /// Of the next fragment, given this lane's group of four keys in it. q_head and q_idx as above.
  template <class Key>
  FOVEA_DEVICE_MEMBER void draw(const ForwardParams& p, const Key& key, std::int32_t batch,
                                std::int32_t q_head, std::int32_t q_idx, std::int32_t group) {
    const ptx::U32x4 words = random_words(key, batch, q_head, q_idx, group);
    const std::uint32_t lo =
        (is_dropped(p, words.x) ? 1U : 0U) | (is_dropped(p, words.y) ? 2U : 0U);
    const std::uint32_t hi =
        (is_dropped(p, words.z) ? 4U : 0U) | (is_dropped(p, words.w) ? 8U : 0U);
    own = own >> 4U | (lo | hi) << 28U;
  }

  /// Of the last eight fragments, the last one in the highest bits.
  FOVEA_DEVICE_MEMBER std::uint32_t exchanged() const {
    constexpr std::uint32_t kFirstRows = 0x33333333U;
    const std::uint32_t other = ptx::shfl_bfly(own, 1);
    if (ptx::lane_idx() % 2 != 0) return (other >> 2U & kFirstRows) | (own & ~kFirstRows);
    return (own & kFirstRows) | (other << 2U & ~kFirstRows);
  }
};

}  // namespace fovea::cuda
