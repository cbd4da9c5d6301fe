// What all warps of sm90/attention_forward_short know: what follows from the spec, where things lie in shared memory,
// whose rows are which, and the tiles that a group multiplies one after the other. Read load.cuh next.
#pragma once

#include "common/passes.cuh"
#include "common/row_view.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params_sm90.h"
#include "shared/forward_spec.h"
#include "sm90/role_warp.cuh"
#include "tile/matrix_descriptor.cuh"
#include "tile/shared_tile.cuh"

namespace fovea::cuda::sm90::short_keys {

inline constexpr int kWarpsOfGroup = 4;

template <Sm90ShortSpec spec>
struct Traits {
  static_assert(spec.element != Element::f32, "wgmma multiplies 16-bit elements here");
  static_assert(spec.head_dim_qk % 16 == 0 && spec.head_dim_v % 16 == 0,
                "products have a depth of 16; O is written by matrices of 16 columns");
  static_assert(spec.tile_kv % 16 == 0 && spec.tile_kv <= 256, "keys are columns, then depth");
  static constexpr bool kHasLastRows = has_last_rows(spec);
  static_assert(spec.tile_q % kShortRows == 0 ||
                (kHasLastRows && spec.tile_q % kShortRows == kShortLastRows));
  static_assert(spec.heads_per_tile == 1);
  static_assert(!kHasLastRows || spec.num_warps == kWarpsOfGroup + 1,
                "they are one warp's, beside one group");
  static_assert(spec.stages <= 32, "tiles of keys are bits of a word");
  static_assert(!spec.is_persistent || !spec.is_varlen, "tiles are numbered without looking");
  static_assert(!kHasLastRows || (!spec.is_varlen && !spec.is_persistent && spec.stages == 1),
                "only of equal lengths are they as few; their keys are a product");
  static constexpr int kGroups = spec.num_warps / kWarpsOfGroup;
  /// Do tiles of keys pass through buffers, one after the other?
  static constexpr bool kHasRing = spec.kv_buffers > 0;
  static constexpr int kBuffers = num_kv_buffers(spec);
  static constexpr int kRowTiles = spec.tile_q / kShortRows;
  static constexpr Sm90ShortLayout kAt = sm90_short_layout(spec);
  static_assert(kAt.bytes <= 232448, "an SM has no more");
  /// Is there one product of each kind, of all rows with all keys?
  static constexpr bool kIsOneStep = kRowTiles == kGroups && spec.stages == 1;
  static_assert(!kHasRing || (kRowTiles == kGroups && !kHasLastRows && !spec.keeps_queries &&
                              !spec.is_varlen && spec.stages > 1 && spec.stages <= 24),
                "a group has one row tile, beside which keys come and go");
  static_assert(!spec.is_persistent || kIsOneStep, "what a step has read is free");
  static constexpr ElementTraits kElement = element_traits(spec.element);
  static constexpr ptx::WgmmaType kType = wgmma_type(spec.element);

  static constexpr Swizzle kSwizzle = kAt.panel_bytes == 128 ? Swizzle::bytes128 : Swizzle::bytes64;
  using QTile = SharedTile<kShortRows, kAt.qk_row_bytes, kSwizzle>;
  using OTile = SharedTile<kShortRows, kAt.v_row_bytes, kSwizzle>;
  using KTile = SharedTile<spec.tile_kv, kAt.qk_row_bytes, kSwizzle>;
  using VTile = SharedTile<spec.tile_kv, kAt.v_row_bytes, kSwizzle>;
  /// Has a group more row tiles than buffers of Q?
  static constexpr bool kRefills = kRowTiles > kAt.num_queries;
  static_assert(!spec.keeps_queries || (kRefills && spec.q_stages == 1),
                "kept queries leave their buffer to the next");
};

/// What rows of 64 are to RowView and span_of.
template <Sm90ShortSpec spec>
constexpr Sm90ShortSpec row_tile_spec() {
  Sm90ShortSpec of_rows = spec;
  of_rows.tile_q = kShortRows;
  return of_rows;
}
template <Sm90ShortSpec spec>
using Row = RowView<row_tile_spec<spec>()>;

/// Dense: tiles of one head of a sequence come side by side, from the last one on, which a causal mask leaves the most
/// keys.
template <Sm90ShortSpec spec>
FOVEA_DEVICE Work dense_work(const ForwardParams& p, std::uint32_t id) {
  const auto num_heads = static_cast<std::uint32_t>(p.num_heads_q);
  const auto row_tiles = static_cast<std::uint32_t>(p.num_q_tiles);
  std::uint32_t pair = row_tiles == 1 ? id : id / row_tiles;
  std::uint32_t row_tile = id - pair * row_tiles;
  if constexpr (spec.kv_buffers > 0 && spec.takes_last_first) {
    const std::uint32_t pairs = static_cast<std::uint32_t>(p.num_sequences) * num_heads;
    row_tile = id / pairs;
    pair = id - row_tile * pairs;
  }
  const auto batch = static_cast<std::int32_t>(pair / num_heads);
  Work work{};
  work.sequence = {batch, batch, 0, batch, 0, p.seqlen_q, p.seqlen_kv, false};
  work.q_begin = (p.num_q_tiles - 1 - static_cast<std::int32_t>(row_tile)) * spec.tile_q;
  work.q_head = static_cast<std::int32_t>(pair) - batch * p.num_heads_q;
  work.kv_head = p.group == 1 ? work.q_head : work.q_head / p.group;
  return work;
}

template <Sm90ShortSpec spec>
FOVEA_DEVICE Work work_of_cta(const ForwardParams& p) {
  if constexpr (spec.is_varlen) return find_work<spec>(p);
  return dense_work<spec>(p, static_cast<std::uint32_t>(ptx::block_idx().x));
}

/// Of V, which every pass loads again.
FOVEA_DEVICE std::uint32_t parity_of(Pass pass) { return static_cast<std::uint32_t>(pass) & 1U; }

template <Sm90ShortSpec spec>
struct Cta : RoleWarp {
  using T = Traits<spec>;
  const Sm90ShortParams& p;
  const Work work;

  /// Of a group, one of each round; the groups take turns at who is first, since later rows see more of a causal mask.
  FOVEA_DEVICE_MEMBER int place_of_round(int round) const {
    return round * T::kGroups + (round % 2 == 0 ? group() : T::kGroups - 1 - group());
  }
  /// Row tiles by the order in which they are multiplied, and their places in it.
  FOVEA_DEVICE_MEMBER static constexpr int row_tile_at(int place) {
    return spec.takes_last_first ? T::kRowTiles - 1 - place : place;
  }
  FOVEA_DEVICE_MEMBER static constexpr int place_of(int row_tile) { return row_tile_at(row_tile); }
  FOVEA_DEVICE_MEMBER int row_tile_of_round(int round) const {
    return row_tile_at(place_of_round(round));
  }
  /// Where a group has fewer buffers than rounds it fills them again.
  FOVEA_DEVICE_MEMBER static int buffer_of(int row_tile) {
    if constexpr (!T::kRefills) return row_tile;
    const int round = place_of(row_tile) / T::kGroups;
    const int turn = place_of(row_tile) % T::kGroups;
    const int group = round % 2 == 0 ? turn : T::kGroups - 1 - turn;
    return round % spec.q_stages * T::kGroups + group;
  }
  FOVEA_DEVICE_MEMBER SharedAddress q_at(int row_tile) const {
    return smem + T::kAt.q + buffer_of(row_tile) * T::kAt.q_bytes;
  }
  FOVEA_DEVICE_MEMBER SharedAddress q_full(int row_tile) const {
    return barrier(T::kAt.q_full, buffer_of(row_tile));
  }
  FOVEA_DEVICE_MEMBER SharedAddress q_empty(int row_tile) const {
    return barrier(T::kAt.q_empty, buffer_of(row_tile));
  }
  /// Of a buffer.
  FOVEA_DEVICE_MEMBER SharedAddress k_at(int buffer) const {
    return smem + T::kAt.k + buffer * T::KTile::kBytes;
  }
  FOVEA_DEVICE_MEMBER SharedAddress v_at(int buffer) const {
    return smem + T::kAt.v + buffer * T::VTile::kBytes;
  }

  FOVEA_DEVICE_MEMBER int first_query(int row_tile) const {
    return work.q_begin + kShortRows * row_tile;
  }
  /// A row tile of a group's: all of it where the last rows are another's.
  FOVEA_DEVICE_MEMBER bool has_rows(int row_tile) const {
    constexpr int kFewest = T::kHasLastRows ? kShortRows : 1;
    return first_query(row_tile) + kFewest <= work.sequence.seqlen_q;
  }
  /// Of the CTA, whole ones.
  FOVEA_DEVICE_MEMBER int num_whole_row_tiles() const {
    return least(work.sequence.seqlen_q - work.q_begin, spec.tile_q) / kShortRows;
  }
  /// All that have rows.
  FOVEA_DEVICE_MEMBER int num_row_tiles() const {
    return ceil_div(least(work.sequence.seqlen_q - work.q_begin, spec.tile_q), kShortRows);
  }
  /// Is this the warp of the last rows?
  FOVEA_DEVICE_MEMBER bool has_last_rows() const {
    return T::kHasLastRows && warp == spec.num_warps - 1;
  }
  FOVEA_DEVICE_MEMBER bool warp_has_rows(int row_tile) const {
    return first_query(row_tile) + first_row_of_warp() < work.sequence.seqlen_q;
  }

  /// The CTA's work as RowView has it, of one row tile.
  FOVEA_DEVICE_MEMBER Work work_of(int row_tile) const {
    Work of_rows = work;
    of_rows.q_begin = first_query(row_tile);
    return of_rows;
  }

  FOVEA_DEVICE_MEMBER int group() const { return warp / kWarpsOfGroup; }
  /// In a row tile.
  FOVEA_DEVICE_MEMBER int first_row_of_warp() const { return warp % kWarpsOfGroup * 16; }
  /// Row r of this thread's two.
  FOVEA_DEVICE_MEMBER int my_row(int r) const { return first_row_of_warp() + lane / 4 + 8 * r; }
};

/// kv tiles that some of these rows see, and those that are full. Lengths in memory may say more than the plan was made
/// for.
template <class Mods, Sm90ShortSpec spec>
FOVEA_DEVICE VisitedGroup visible_tiles(const Cta<spec>& cta, const TileSpan& rows) {
  if constexpr (spec.stages == 1)
    return {0, 1, !Mods::has_mask && rows.seqlen_kv >= spec.tile_kv ? 1U : 0U};
  const int whole = least(rows.seqlen_kv / spec.tile_kv, spec.stages);
  const int all = least(ceil_div(rows.seqlen_kv, spec.tile_kv), spec.stages);
  VisitedGroup tiles{0, (1U << all) - 1U, (1U << whole) - 1U};
  if constexpr (Mods::has_mask) {
    TileWalk<Mods> walk(rows, {0, all, spec.tile_kv}, cta.p.common.captures);
    VisitedGroup seen{};
    if (!walk.next_group(seen)) seen = {};
    tiles.visible = seen.visible;
    tiles.full &= seen.full;
  }
  return tiles;
}

/// Rows that see nothing multiply a tile all the same, masked: one way for all.
template <class Mods, Sm90ShortSpec spec>
FOVEA_DEVICE std::uint32_t tiles_to_load(const Cta<spec>& cta) {
  const std::uint32_t visible = visible_tiles<Mods>(cta, span_of<spec>(cta.work)).visible;
  return visible != 0 ? visible : 1U;
}

/// Keys and values are asked for so many tiles before they are multiplied. All at once they arrive together, and late:
/// measured, docs/kernels/attention_short_sm90.md.
inline constexpr int kTilesAhead = 2;

/// Bits of the tiles up to this one.
FOVEA_DEVICE std::uint32_t up_to_tile(int kv_tile) { return (2U << least(kv_tile, 31)) - 1U; }

/// A product of 64 rows with a tile of keys; the first of its rows, the last of them.
struct Step {
  std::int32_t row_tile, kv_tile;
  bool is_full, is_first, is_last;
};

/// Of a group that has one.
template <class Mods, Sm90ShortSpec spec>
FOVEA_DEVICE Step only_step(const Cta<spec>& cta) {
  static_assert(Traits<spec>::kIsOneStep);
  const int row_tile = cta.row_tile_of_round(0);
  const TileSpan rows = span_of<row_tile_spec<spec>()>(cta.work_of(row_tile));
  return {row_tile, 0, visible_tiles<Mods>(cta, rows).full != 0, true, true};
}

/// Those of a group.
template <Sm90ShortSpec spec, class Mods>
class Steps {
 public:
  using T = Traits<spec>;

  FOVEA_DEVICE_MEMBER explicit Steps(const Cta<spec>& cta) : cta_(cta) {}

  FOVEA_DEVICE_MEMBER bool next(Step& step) {
    const bool is_first = tiles_.visible == 0;
    if (is_first) {
      const int place = cta_.place_of_round(round_++);
      row_tile_ = cta_.row_tile_at(place);
      if (place >= T::kRowTiles || !cta_.has_rows(row_tile_)) return false;
      tiles_ = visible_tiles<Mods>(cta_, span_of<row_tile_spec<spec>()>(cta_.work_of(row_tile_)));
      if (tiles_.visible == 0) tiles_ = {0, tiles_to_load<Mods>(cta_), 0};
    }
    const VisitedTile tile = take_tile<WalkOrder::rising>(tiles_);
    step = {row_tile_, tile.idx, tile.is_full, is_first, tiles_.visible == 0};
    return true;
  }

 private:
  const Cta<spec>& cta_;
  std::int32_t round_ = 0, row_tile_ = 0;
  VisitedGroup tiles_{};
};

}  // namespace fovea::cuda::sm90::short_keys
