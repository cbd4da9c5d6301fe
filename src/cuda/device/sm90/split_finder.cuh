// Which splits a CTA computes, where lengths are only known on the device: found by counting. Read common/sequence.cuh
// for what a split is.
#pragma once

#include "common/bits.cuh"
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
  FOVEA_DEVICE_MEMBER explicit SplitFinder(const ForwardParams& p,
                                           const KeyShare& share = {0, false})
      : p_(p), share_(share), head_units_(p.num_heads_q / spec.heads_per_tile) {}

  /// Of a split.
  FOVEA_DEVICE_MEMBER std::int32_t row_tiles() const {
    return has_q_tiles ? head_units_ * p_.num_q_tiles : head_units_;
  }

  FOVEA_DEVICE_MEMBER Work find(std::int32_t idx) {
    for (std::int32_t counted; idx >= (counted = ptx::shfl_idx(end_, 31));) {
      first_ += 32;
      if (first_ >= p_.num_sequences) return nothing();
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

  /// The splits of 32 sequences from first_ on, times row tiles; so many are before them.
  FOVEA_DEVICE_MEMBER void count(std::int32_t counted) {
    const int lane = ptx::lane_idx();
    std::int32_t splits = 0;
    if (first_ + lane < p_.num_sequences) {
      const Sequence s = dense_sequence<spec>(p_, first_ + lane);
      kv_batch_ = static_cast<std::int32_t>(s.kv_batch);
      kv_row_ = static_cast<std::int32_t>(s.kv_row);
      seqlen_kv_ = s.seqlen_kv;
      if constexpr (by_units) unit_ = unit_of(seqlen_kv_, spec.most_splits, share_);
      splits = num_units(seqlen_kv_, spec.most_splits, unit_) * row_tiles();
      if constexpr (spec.has_packed_q) {
        q_row_ = static_cast<std::int32_t>(s.q_row);
        seqlen_q_ = s.seqlen_q;
        if (seqlen_q_ == 0) splits = 0;
      }
    }
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
  const KeyShare share_;
  const std::int32_t head_units_;
  std::int32_t first_ = -32;  // sequence of lane 0; before the first 32 are counted there are none
  std::int32_t kv_batch_ = 0, kv_row_ = 0, seqlen_kv_ = 0;
  std::int32_t q_row_ = 0, seqlen_q_ = 0;  // of packed queries
  std::int32_t begin_ = 0, end_ = 0;       // units of this lane's sequence
  Unit unit_ = Unit::split, found_ = Unit::split;
};

}  // namespace fovea::cuda::sm90
