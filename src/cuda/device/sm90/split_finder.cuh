// Which splits a CTA computes, where lengths are only known on the device: found by counting. Read common/sequence.cuh
// for what a split is.
#pragma once

#include "common/bits.cuh"
#include "common/key_share.cuh"
#include "common/row_view.cuh"
#include "common/sequence.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"
#include "shared/split.h"

namespace fovea::cuda::sm90 {

/// Counts the splits of all sequences, one after the other, and of each all row tiles, which share its keys or are
/// those of neighbouring kv heads. Each lane has one of 32 sequences. Indices that are asked for rise. has_q_tiles: a
/// sequence may have more queries than a tile. by_units: counts what CTAs take at a time (shared/split.h), and finds
/// the first split of it.
template <auto spec, bool has_q_tiles, bool by_units = false>
class SplitFinder {
 public:
  FOVEA_DEVICE_MEMBER explicit SplitFinder(const ForwardParams& p)
      : p_(p), head_units_(p.num_heads_q / spec.heads_per_tile) {}

  /// by_units, before anything is found: what CTAs have (common/key_share.cuh). Those of the first 32 sequences stay.
  /// Instructions come from memory, and the first key waits for them: what reads a length is there once.
  FOVEA_DEVICE_MEMBER void count_keys(float tiles_of_cta) {
    CountedKeys counted;
    std::int32_t first = 0;
#pragma unroll 1
    for (bool is_counting = true;; first += 32) {
      if (first >= p_.num_sequences) {
        if (p_.num_sequences <= 32) break;
        first = 0, is_counting = false;
      }
      read(first);
      if (!is_counting) break;
      counted.add(spec.has_packed_q && seqlen_q_ == 0 ? 0 : seqlen_kv_);
    }
    share_ = counted.share(tiles_of_cta);
  }

  /// Of a split.
  FOVEA_DEVICE_MEMBER std::int32_t row_tiles() const {
    return has_q_tiles ? head_units_ * p_.num_q_tiles : head_units_;
  }

  FOVEA_DEVICE_MEMBER Work find(std::int32_t idx) {
    for (std::int32_t counted; idx >= (counted = ptx::shfl_idx(end_, 31));) {
      first_ += 32;
      if (first_ >= p_.num_sequences) return nothing();
      if (!by_units || __builtin_expect(first_ > 0, 0)) read(first_);
      count(counted);
    }
    const int owner = lowest_bit(ptx::ballot(begin_ <= idx && idx < end_));
    const std::int32_t inside = idx - ptx::shfl_idx(begin_, owner);
    Work work{};
    Sequence& s = work.sequence;
    s.idx = first_ + owner;
    s.q_batch = s.idx;
    s.kv_batch = ptx::shfl_idx(kv_batch_, owner);
    s.kv_row = ptx::shfl_idx(kv_row_, owner);
    if constexpr (spec.has_packed_q) {
      s.q_row = ptx::shfl_idx(q_row_, owner);
      s.seqlen_q = ptx::shfl_idx(seqlen_q_, owner);
    } else {
      s.seqlen_q = p_.seqlen_q;
    }
    s.seqlen_kv = ptx::shfl_idx(seqlen_kv_, owner);
    const std::int32_t row_tile = inside % row_tiles();
    work.q_head = (has_q_tiles ? row_tile % head_units_ : row_tile) * spec.heads_per_tile;
    if constexpr (has_q_tiles) work.q_begin = row_tile / head_units_ * kQueriesOfTile<spec>;
    work.kv_head = work.q_head / p_.group;
    const std::int32_t unit = inside / row_tiles();
    if constexpr (by_units)
      found_ = static_cast<Unit>(ptx::shfl_idx(static_cast<int>(unit_), owner));
    take_split<spec>(work, found_ == Unit::group ? unit * kSplitsOfGroup : unit);
    return work;
  }

  /// Of what was found last.
  FOVEA_DEVICE_MEMBER Unit unit() const { return found_; }

 private:
  FOVEA_DEVICE_MEMBER static Work nothing() {
    Work work{};
    work.is_nothing = true;
    return work;
  }

  /// This lane's of 32 sequences. Of one that is not there no keys.
  FOVEA_DEVICE_MEMBER void read(std::int32_t first) {
    const std::int32_t idx = first + ptx::lane_idx();
    seqlen_kv_ = 0;
    if (idx >= p_.num_sequences) return;
    const Sequence s = dense_sequence<spec>(p_, idx);
    kv_batch_ = static_cast<std::int32_t>(s.kv_batch);
    kv_row_ = static_cast<std::int32_t>(s.kv_row);
    seqlen_kv_ = s.seqlen_kv;
    if constexpr (spec.has_packed_q) {
      q_row_ = static_cast<std::int32_t>(s.q_row);
      seqlen_q_ = s.seqlen_q;
    }
  }

  /// The splits of those from first_ on, times row tiles; so many are before them.
  FOVEA_DEVICE_MEMBER void count(std::int32_t counted) {
    const int lane = ptx::lane_idx();
    if constexpr (by_units) unit_ = unit_of(seqlen_kv_, spec.most_splits, share_);
    std::int32_t splits = num_units(seqlen_kv_, spec.most_splits, unit_) * row_tiles();
    if (first_ + lane >= p_.num_sequences || (spec.has_packed_q && seqlen_q_ == 0)) splits = 0;
    end_ = splits;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const std::int32_t before = ptx::shfl_idx(end_, lane - distance & 31);
      if (lane >= distance) end_ += before;
    }
    end_ += counted;
    begin_ = end_ - splits;
  }

  const ForwardParams& p_;
  KeyShare share_{0, false};
  const std::int32_t head_units_;
  std::int32_t first_ = -32;  // sequence of lane 0; before the first 32 are counted there are none
  std::int32_t kv_batch_ = 0, kv_row_ = 0, seqlen_kv_ = 0;
  std::int32_t q_row_ = 0, seqlen_q_ = 0;  // of packed queries
  std::int32_t begin_ = 0, end_ = 0;       // units of this lane's sequence
  Unit unit_ = Unit::split, found_ = Unit::split;
};

}  // namespace fovea::cuda::sm90
