// O of a row tile, and the product that adds to it. Called by compute.cuh.
//
// Values of 16 bits: wgmma adds to O itself. Codes of e4m3: sums of those keep some 14 bits beside the largest product,
// so each tile has sums of its own, which are added to O in f32 by the scale of the tile's values (DeepSeek-AI
// 2024, section 3.3). Their last columns are sums of P: rows of ones lie below the values.
#pragma once

#include "common/passes.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/wgmma.cuh"
#include "shared/quantize_v.h"
#include "sm90/forward/cta.cuh"
#include "sm90/forward/rows.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::sm90 {

/// Of one thread: two rows.
template <Sm90ForwardSpec spec, class Rows, bool sums_codes = spec.sums_codes>
struct ValueSums {
  using T = Traits<spec>;

  typename Rows::Sums o;
  bool has_sums = false;  // o holds something: the next product adds to it

  FOVEA_DEVICE_MEMBER explicit ValueSums(const ComputingWarp<spec>&) {}

  FOVEA_DEVICE_MEMBER void begin() { has_sums = false; }

  /// O += P V, under way then; values of this stage.
  FOVEA_DEVICE_MEMBER void issue(const typename Rows::Probabilities& p, SharedAddress values) {
    using VTile = typename T::VTile;
    const auto b = mn_major_descriptor(VTile{values});
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < spec.tile_kv / T::kElement.k_step; ++i) {
      ptx::wgmma_rs<T::kType, T::kType, spec.head_dim_v, ptx::Major::mn>(
          o, p[i], advanced(b, mn_major_offset<VTile>(i)), i > 0 || has_sums);
    }
    ptx::wgmma_commit_group();
    has_sums = true;
  }

  /// When the product is there.
  FOVEA_DEVICE_MEMBER void take(Rows&) const {}
};

template <Sm90ForwardSpec spec, class Rows>
struct ValueSums<spec, Rows, true> {
  using T = Traits<spec>;
  static constexpr int kColumns = spec.head_dim_v + kRowsOfOnes;

  const ComputingWarp<spec> warp;
  typename Rows::Sums o;
  float of_tile[kColumns / 2];
  float scale;  // of the values that are multiplied

  FOVEA_DEVICE_MEMBER explicit ValueSums(const ComputingWarp<spec>& of_warp) : warp(of_warp) {}

  FOVEA_DEVICE_MEMBER void begin() {
#pragma unroll
    for (float& sum : o) sum = 0.0F;
  }

  /// While a tile of them is multiplied; below 0: there are none. Indicators are codes of 1, and have no scale.
  FOVEA_DEVICE_MEMBER void look_at_values(std::int32_t tile, KvTile of) {
    scale = 1.0F;
    if (tile < 0 || is_indicator(of.pass())) return;
    if constexpr (spec.head_dim_v > 64)
      look_at_values_late(tile);
    else
      look_at_values(tile);
  }

  /// Where there are values, and it is their pass.
  FOVEA_DEVICE_MEMBER void look_at_values(std::int32_t tile) {
    scale = ptx::ld_global(warp.cta.p.values.scales + tile);
  }

  /// The same behind the issue of products. Note: an address put together of the halves of a parameter, as uniform
  /// registers are; of the whole of it ptxas loads 64 bits of constant memory, for which a step at head_dim 128 waits
  /// (3 % of its time on an H200).
  FOVEA_DEVICE_MEMBER void look_at_values_late(std::int32_t tile) {
    const auto scales = ptx::bit_cast<std::uint64_t>(warp.cta.p.values.scales);
    const auto low = static_cast<std::uint32_t>(scales);
    const auto high = static_cast<std::uint32_t>(scales >> 32U);
    const std::uint32_t at = low + 4U * static_cast<std::uint32_t>(tile);
    const std::uint64_t carried = high + (at < low ? 1U : 0U);
    scale = ptx::ld_global(ptx::bit_cast<const float*>(carried << 32U | at));
  }

  FOVEA_DEVICE_MEMBER void issue(const typename Rows::Probabilities& p, SharedAddress values) {
    using VTile = typename T::VTile;
    const auto b = k_major_descriptor(VTile{values});
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < spec.tile_kv / 32; ++i) {
      ptx::wgmma_rs<ptx::WgmmaType::e4m3, ptx::WgmmaType::e4m3, kColumns>(
          of_tile, p[i], advanced(b, k_major_offset<VTile>(i)), i > 0);
    }
    ptx::wgmma_commit_group();
  }

  /// `rows` are as they were for this P.
  FOVEA_DEVICE_MEMBER void take(Rows& rows) {
#pragma unroll
    for (int i = 0; i < Rows::kSums; ++i) o[i] = ptx::fma_rn(of_tile[i], scale, o[i]);
    rows.sum[0] += of_tile[Rows::kSums];
    rows.sum[1] += of_tile[Rows::kSums + 2];
  }
};

}  // namespace fovea::cuda::sm90
