// What all roles of Blackwell's backward kernel know: what follows from the spec, who is who, where scores, gradients
// and sums lie in tensor memory. What the roles post for each other is Hopper's (sm90/backward/cta.cuh).
// ../attention_backward.cuh has the picture; read multiply.cuh next.
#pragma once

#include "ptx/memory.cuh"
#include "ptx/tcgen05.cuh"
#include "shared/backward_spec_sm100.h"
#include "sm90/backward/cta.cuh"
#include "tile/shared_tile.cuh"
#include "tile/tcgen05_descriptor.cuh"

namespace fovea::cuda::sm90 {

/// As the roles of Hopper's kernel that are roles here, too, have them.
template <auto spec>
requires requires { spec.awaits_keys; }  // of an Sm100BackwardSpec
struct BackwardTraits<spec> {
  static_assert(spec.element != Element::f32, "products are of 16-bit elements here");
  static_assert(spec.dout_element == spec.element, "dout is multiplied with v, and P with dout");
  static_assert(spec.head_dim_qk == spec.head_dim_v &&
                    (spec.head_dim_qk == 64 || spec.head_dim_qk == 128),
                "rows are one panel of 128 bytes or two");
  static_assert(spec.tile_q == kSm100BackwardQueries && spec.num_warps == kSm100BackwardWarps,
                "a lane of tensor memory for each query");
  static_assert(delta_bytes(spec) == 4 && !spec.stores_pairs, "threads subtract deltas");
  static_assert(!spec.is_staggered ||
                    (spec.is_deterministic && !spec.is_varlen && !spec.hides_keys),
                "every tile of queries is visited, by turns");

  static constexpr int kKeys = kSm90BackwardKeys;
  static constexpr int kGroups = 2;  // that compute: half of a tile's queries each
  static constexpr int kQueries = spec.tile_q / kGroups;
  static constexpr int kStages = spec.stages;
  static constexpr Sm100BackwardLayout kAt = sm100_backward_layout(spec);
  static_assert(kAt.bytes <= 232448, "an SM has no more");

  static constexpr int kElementBytes = element_bytes(spec.element);
  using KTile = SharedTile<kKeys, kElementBytes * spec.head_dim_qk, Swizzle::bytes128>;
  using VTile = SharedTile<kKeys, kElementBytes * spec.head_dim_v, Swizzle::bytes128>;
  using QTile = SharedTile<spec.tile_q, kElementBytes * spec.head_dim_qk, Swizzle::bytes128>;
  using DoutTile = SharedTile<spec.tile_q, kElementBytes * spec.head_dim_v, Swizzle::bytes128>;
  /// A panel for each group.
  using DsTile = SharedTile<kKeys, kElementBytes * spec.tile_q, Swizzle::bytes128>;
  static_assert(DsTile::kPanels == kGroups);

  static constexpr int kDeltaTileBytes = spec.tile_q * delta_bytes(spec);
  /// Sums of dq lie in memory as Hopper's products of 64 x 64 leave them: so many to a tile, of so many floats.
  static constexpr int kQueryProducts = spec.tile_q * spec.head_dim_qk / (64 * 64);
  static constexpr int kProductSums = 64 * 64;

  // 65,536 registers: 3 x 152 + 56 = 4 x 128.
  static constexpr int kComputeRegisters = 152;
  static constexpr int kQueryRegisters = 152;
  static constexpr int kServiceRegisters = 56;
};

}  // namespace fovea::cuda::sm90

namespace fovea::cuda::sm100 {

using ptx::SharedAddress;
using sm90::BackwardCta;
using sm90::OwnedKeys;
using sm90::PostedTile;

template <Sm100BackwardSpec spec>
using BackwardTraits = sm90::BackwardTraits<spec>;

/// Warps by what they do: eight compute, four add to dq, then those that load, pass turns on and multiply.
enum class BackwardRole : std::int32_t { compute, add, load, pass, multiply, none };

FOVEA_DEVICE BackwardRole backward_role_of(int warp) {
  constexpr int kComputing = 8, kAdding = 4;
  if (warp < kComputing) return BackwardRole::compute;
  if (warp < kComputing + kAdding) return BackwardRole::add;
  return static_cast<BackwardRole>(warp - kComputing - kAdding +
                                   static_cast<int>(BackwardRole::load));
}

/// The tensor memory of a CTA: cells in lane 0, or in the first lane of a warp's.
template <Sm100BackwardSpec spec>
struct BackwardTensorMemory {
  using T = BackwardTraits<spec>;
  static constexpr Sm100BackwardTensorLayout kAt = sm100_backward_tensor_layout(spec);
  static_assert(kAt.columns <= kSm100Columns, "an SM has no more");
  ptx::TmemAddress base;

  FOVEA_DEVICE_MEMBER BackwardTensorMemory of_warp(int warp) const {
    return {base.plus_lanes(warp % 4 * 32)};
  }

  /// Of a group's queries; P and dS over them.
  FOVEA_DEVICE_MEMBER ptx::TmemAddress s(int group) const {
    return base.plus_columns(kAt.s + group * T::kQueries);
  }
  FOVEA_DEVICE_MEMBER ptx::TmemAddress dp(int group) const {
    return base.plus_columns(kAt.dp + group * T::kQueries);
  }
  FOVEA_DEVICE_MEMBER ptx::TmemAddress dv() const { return base.plus_columns(kAt.dv); }
  FOVEA_DEVICE_MEMBER ptx::TmemAddress dk() const { return base.plus_columns(kAt.dk); }
  FOVEA_DEVICE_MEMBER ptx::TmemAddress dq() const { return base.plus_columns(kAt.dq); }
};

}  // namespace fovea::cuda::sm100
