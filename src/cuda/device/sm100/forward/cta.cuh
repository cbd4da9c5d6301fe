// What all roles of Blackwell's forward kernel know: what follows from the spec, who is who, where a group's scores,
// probabilities and sums lie in tensor memory. What the roles post for each other is Hopper's (sm90/forward/cta.cuh).
// ../attention_forward.cuh has the picture; read multiply.cuh next.
#pragma once

#include "ptx/memory.cuh"
#include "ptx/ordered.cuh"
#include "ptx/tcgen05.cuh"
#include "shared/forward_spec_sm100.h"
#include "sm90/forward/cta.cuh"
#include "tile/shared_tile.cuh"
#include "tile/tcgen05_descriptor.cuh"

namespace fovea::cuda::sm90 {

/// As the roles of Hopper's kernel that are roles here, too, have them.
template <auto spec>
requires requires { spec.polynomial_keys; }  // of an Sm100ForwardSpec
struct Traits<spec> {
  static_assert(spec.element != Element::f32, "products are of 16-bit elements here");
  static_assert(!spec.multiplies_codes && !spec.sums_codes, "products of codes are not written");
  static_assert(!spec.loads_by_cp_async, "what TMA cannot read is other kernels'");
  static_assert(!spec.is_split || kFewestKeysPerSplit % spec.tile_kv == 0,
                "splits are whole tiles");
  static constexpr ElementTraits kElement = element_traits(spec.element);
  static constexpr int kPanelElements = sm90_panel_elements(spec);
  static_assert(spec.head_dim_qk % kPanelElements == 0 && spec.head_dim_v % kPanelElements == 0,
                "rows are whole panels, of 128 or of 64 bytes");
  static constexpr int kGroups = sm100_groups(spec);
  static constexpr int kGroupRows = kSm100GroupRows;
  static_assert(spec.tile_q == kGroups * kGroupRows && spec.num_warps == 4 * (kGroups + 1),
                "a thread has a row, and four warps serve them");
  static_assert(kGroups >= 1 && kGroups <= kSm100MostGroups, "there are columns for two");
  static_assert(spec.tile_kv == 128, "a thread's scores of a tile are four loads of 32 columns");
  static_assert(spec.heads_per_tile == 1 || kGroups == 1, "heads share the rows of one group");
  /// Of each head that a tile packs, and of all of them: the rest of the tile's rows are zeros, and belong to nobody.
  static constexpr int kQueries = kQueriesOfTile<spec>;
  static constexpr int kBoxRows =
      spec.heads_per_tile == 1 ? kGroupRows : kQueries * spec.heads_per_tile;
  static constexpr int kQStages = spec.q_stages;
  static_assert(kQStages == 1, "Q is given back before its row tile is done: one buffer suffices");
  static constexpr int kStages = spec.stages;
  /// Values of a row tile's last keys come before the next row tile's queries.
  static constexpr bool kOverlapsTiles = false;
  static constexpr Sm100ForwardLayout kAt = sm100_forward_layout(spec);
  static_assert(kAt.bytes <= 232448, "an SM has no more");
  static constexpr int kSlots = kAt.num_slots;
  static constexpr bool kPostsPlace = sm90_posts_place(spec);
  static constexpr int kLoaders = 1;
  static constexpr WalkOrder kWalkOrder = WalkOrder::falling;
  static constexpr bool kHasRoundedTiles = false;
  static constexpr bool kHasRoundedCache = false;
  static constexpr bool kCopiesPages = spec.is_paged;
  /// Whoever finds row tiles in sequences of all lengths has more to keep.
  static constexpr int kServiceRegisters = kPostsPlace ? 56 : 40;
  static constexpr int kRowRegisters = kPostsPlace ? 224 : 232;
  /// Else each group has a place for its scores.
  static constexpr bool kGroupsShareScores = false;
  /// Softmax reads more beside the keys than which tile they are, and gives their buffer back itself.
  static constexpr bool kReadsBesideKeys = false;
  static constexpr int kReaders = 4 * kGroups;  // warps that compute
  /// Where values end inside a tile, what lies behind them is cleared: packed it is a neighbour's, and may not be.
  static constexpr bool kClearsValues = spec.is_cached || spec.is_split;

  static constexpr Swizzle kSwizzle = widest_swizzle(kElement.bytes * kPanelElements);
  static constexpr int kQkRowBytes = kElement.bytes * spec.head_dim_qk;
  static constexpr int kQkSteps = kQkRowBytes / 32;
  using QTile = SharedTile<kGroupRows, kQkRowBytes, kSwizzle>;
  using GivenQTile = QTile;
  using KTile = SharedTile<spec.tile_kv, kQkRowBytes, kSwizzle>;
  using VTile = SharedTile<spec.tile_kv, kElement.bytes * spec.head_dim_v, kSwizzle>;
};

}  // namespace fovea::cuda::sm90

namespace fovea::cuda::sm100 {

using ptx::SharedAddress;
using sm90::Cta;
using sm90::KvTile;
using sm90::RowTile;
using sm90::SequencePlace;

template <auto spec>
using Traits = sm90::Traits<spec>;

/// Warps by what they do; those behind them compute, four of a group.
enum class Role : std::int32_t { load, multiply, schedule, none, compute };

/// The tensor memory of a CTA: cells in lane 0.
template <auto spec>
struct TensorMemory {
  static constexpr auto kAt = sm100_tensor_layout(spec);
  static_assert(kAt.columns <= kSm100Columns, "an SM has no more");
  ptx::TmemAddress base;

  FOVEA_DEVICE_MEMBER ptx::TmemAddress s(int group) const {
    return base.plus_columns(kAt.s + group * kAt.s_step);
  }
  FOVEA_DEVICE_MEMBER ptx::TmemAddress p(int group) const {
    return base.plus_columns(kAt.p + group * kAt.p_step);
  }
  FOVEA_DEVICE_MEMBER ptx::TmemAddress o(int group) const {
    return base.plus_columns(kAt.o + group * kAt.o_step);
  }
};

/// A thread that computes: one row of its group, in the lane of tensor memory that is its own.
template <auto spec>
struct RowThread {
  const Cta<spec>& cta;
  const int group, quarter;  // of the lanes: a warp reaches no other
  const TensorMemory<spec> lanes;

  FOVEA_DEVICE_MEMBER RowThread(const Cta<spec>& of_cta, const TensorMemory<spec>& memory)
      : cta(of_cta),
        group(of_cta.warp / 4 - 1),
        quarter(of_cta.warp % 4),
        lanes{memory.base.plus_lanes(32 * (of_cta.warp % 4))} {}

  FOVEA_DEVICE_MEMBER ptx::TmemAddress s() const { return lanes.s(group); }
  FOVEA_DEVICE_MEMBER ptx::TmemAddress p() const { return lanes.p(group); }
  FOVEA_DEVICE_MEMBER ptx::TmemAddress o() const { return lanes.o(group); }

  /// Of the tile's rows. For the compiler another number at each place: it is made again there, where held from row
  /// tile to row tile it would take a register that scores need.
  FOVEA_DEVICE_MEMBER int row() const {
    const auto first = static_cast<std::uint32_t>(kSm100GroupRows * group + 32 * quarter);
    const auto zero = ptx::bit_cast<std::uint32_t>(cta.p.zero);
    return static_cast<int>(ptx::ordered_and_or(first, zero, first)) + cta.lane;
  }
};

}  // namespace fovea::cuda::sm100
