// The kv tiles that a row of tiles must visit, found on the way: each lane of a warp classifies one tile, a vote
// gathers their answers. No list in memory, nothing to build, any lengths.
//
// Two levels, so that what is far from a window or behind a diagonal costs nothing: a lane first classifies a group of
// as many tiles as a warp has lanes, and only groups that are partial are looked into. With 32, steps of one row of 64k
// keys in tiles of 64: window 2 to 3, causal 2, documents 1 + one for each group that a document's edge cuts; a flat
// scan takes 32. A step is one evaluation of the printed tile kind (about 20 instructions for causal or window) and two
// votes.
//
//   TileWalk<Mods> walk(rows, {.begin = 0, .end = tiles, .keys = 64}, p.captures);
//   for (VisitedTile tile; walk.next(tile);) visit(tile.idx, tile.is_full);
//
// Every warp of a CTA that walks gets the same tiles; all lanes must be converged at next().
//
// The same the other way round, WalkAxis::queries: the tiles of rows that see something of a range of keys.
#pragma once

#include "common/bits.cuh"
#include "common/position.cuh"
#include "ptx/warp.cuh"
#include "shared/captures.h"

namespace fovea::cuda {

/// kv tiles [begin, end) of `keys` keys each; the last may be cut by seqlen_kv. A split of the keys is a part of the
/// range. Of rows: tiles of so many queries, cut by seqlen_q.
struct TileRange {
  std::int32_t begin, end, keys;
};

/// What a walk goes along.
enum class WalkAxis : std::uint8_t { keys, queries };

struct VisitedTile {
  std::int32_t idx;
  bool is_full;  // every existing key of the tile is visible to every existing row
};

enum class WalkOrder : std::uint8_t { rising, falling };

/// The i-th of `count` in the order of a walk: a falling one counts from the last.
template <WalkOrder order>
FOVEA_DEVICE std::int32_t in_order(std::int32_t i, std::int32_t count) {
  return order == WalkOrder::rising ? i : count - 1 - i;
}

/// A warp's tiles from `begin` on, a bit each, in the order of the walk.
struct VisitedGroup {
  std::int32_t begin;
  ptx::LaneMask visible, full;
};

/// The next tile of a group that has one.
template <WalkOrder order>
FOVEA_DEVICE VisitedTile take_tile(VisitedGroup& group) {
  const std::int32_t bit = lowest_bit(group.visible);
  group.visible &= group.visible - 1;
  return {group.begin + in_order<order>(bit, ptx::kWarpLanes), (group.full >> bit & 1U) != 0};
}

template <class Mods, WalkOrder order = WalkOrder::rising, WalkAxis axis = WalkAxis::keys>
class TileWalk {
 public:
  /// `rows` says which rows; its kv range is not read. Along queries: which keys, and its q range is not read.
  FOVEA_DEVICE_MEMBER TileWalk(const TileSpan& rows, const TileRange& tiles,
                               const Captures& captures)
      : rows_(rows), tiles_(tiles), captures_(captures) {
    const std::int32_t end = (length() + tiles.keys - 1) / tiles.keys;
    tiles_.end = end < tiles.end ? end : tiles.end;
    const bool is_empty =
        tiles_.begin >= tiles_.end ||
        (axis == WalkAxis::keys ? rows.q_begin >= rows.q_end : rows.kv_begin >= rows.kv_end);
    num_tops_ = is_empty ? 0 : (tiles_.end - tiles_.begin - 1) / kTilesPerTop + 1;
  }

  /// From its first tile again, where the heads of `rows` have changed.
  FOVEA_DEVICE_MEMBER void restart() {
    next_top_ = 0;
    in_top_ = {};
    in_group_ = {};
  }

  /// The next tile that is not empty; false behind the last one.
  FOVEA_DEVICE_MEMBER bool next(VisitedTile& tile) {
    if (!find_group()) return false;
    VisitedGroup group{group_begin_, in_group_.visible, in_group_.full};
    tile = take_tile<order>(group);
    in_group_.visible = group.visible;
    return true;
  }

  /// What is left of the next group that has a tile: for a warp that hands tiles on to another.
  FOVEA_DEVICE_MEMBER bool next_group(VisitedGroup& group) {
    if (!find_group()) return false;
    group = {group_begin_, in_group_.visible, in_group_.full};
    in_group_.visible = 0;
    return true;
  }

 private:
  static constexpr std::int32_t kTilesPerGroup = ptx::kWarpLanes;
  static constexpr std::int32_t kTilesPerTop = ptx::kWarpLanes * kTilesPerGroup;

  /// Answers of a warp's lanes, in the order of the walk.
  struct Answers {
    ptx::LaneMask visible = 0, full = 0;
    FOVEA_DEVICE_MEMBER bool is_done() const { return visible == 0; }
    FOVEA_DEVICE_MEMBER bool is_full(std::int32_t lane) const { return (full >> lane & 1U) != 0; }
    FOVEA_DEVICE_MEMBER std::int32_t take() {
      const std::int32_t lane = lowest_bit(visible);
      visible &= visible - 1;
      return lane;
    }
  };

  /// Of the sequence, along the walk.
  FOVEA_DEVICE_MEMBER std::int32_t length() const {
    return axis == WalkAxis::keys ? rows_.seqlen_kv : rows_.seqlen_q;
  }

  /// Opens groups until one has a tile; false where there is none any more.
  FOVEA_DEVICE_MEMBER bool find_group() {
    while (in_group_.is_done()) {
      if (in_top_.is_done() && next_top_ == num_tops_) return false;
      descend();
    }
    return true;
  }

  /// Each lane answers for `width` tiles.
  FOVEA_DEVICE_MEMBER Answers classify(std::int32_t begin, std::int32_t width) const {
    const std::int32_t first = begin + in_order<order>(ptx::lane_idx(), ptx::kWarpLanes) * width;
    const std::int32_t last = first + width < tiles_.end ? first + width : tiles_.end;
    TileKind kind = TileKind::empty;
    if (first < last) {
      TileSpan span = rows_;
      std::int32_t& span_begin = axis == WalkAxis::keys ? span.kv_begin : span.q_begin;
      std::int32_t& span_end = axis == WalkAxis::keys ? span.kv_end : span.q_end;
      span_begin = first * tiles_.keys;
      const std::int64_t end = static_cast<std::int64_t>(last) * tiles_.keys;
      span_end = end < length() ? static_cast<std::int32_t>(end) : length();
      kind = Mods::tile_kind(span, captures_);
    }
    return {ptx::ballot(kind != TileKind::empty), ptx::ballot(kind == TileKind::full)};
  }

  /// A top of one group, which is not known to be full; or a group of full tiles.
  FOVEA_DEVICE_MEMBER Answers existing(bool is_top) const {
    if (is_top) return {ptx::LaneMask{1} << in_order<order>(0, ptx::kWarpLanes), 0};
    const ptx::LaneMask tiles =
        ptx::ballot(group_begin_ + in_order<order>(ptx::lane_idx(), ptx::kWarpLanes) < tiles_.end);
    return {tiles, tiles};
  }

  /// Opens the next group of tiles, or where there is none the next groups, one for each lane. One place calls the
  /// printed code, for its size.
  FOVEA_DEVICE_MEMBER void descend() {
    const bool is_top = in_top_.is_done();
    bool is_known = false;
    if (is_top) {
      top_begin_ = tiles_.begin + in_order<order>(next_top_++, num_tops_) * kTilesPerTop;
      group_begin_ = top_begin_;
      is_known = tiles_.end - top_begin_ <= kTilesPerGroup;  // its tiles say more than one group
    } else {
      const std::int32_t lane = in_top_.take();
      group_begin_ = top_begin_ + in_order<order>(lane, ptx::kWarpLanes) * kTilesPerGroup;
      is_known = in_top_.is_full(lane);
    }
    const Answers answers =
        is_known ? existing(is_top) : classify(group_begin_, is_top ? kTilesPerGroup : 1);
    (is_top ? in_top_ : in_group_) = answers;
  }

  const TileSpan& rows_;
  TileRange tiles_;
  const Captures& captures_;
  std::int32_t num_tops_;
  std::int32_t next_top_ = 0;
  std::int32_t top_begin_ = 0;
  std::int32_t group_begin_ = 0;
  Answers in_top_;
  Answers in_group_;
};

}  // namespace fovea::cuda
