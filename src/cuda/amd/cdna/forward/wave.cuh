// A wave of the workgroup: which row is whose, where its things lie. Chapter 2 of cdna/attention_forward.cuh; read
// load.cuh next.
#pragma once

#include "cdna/forward/tiles.cuh"
#include "common/row_view.cuh"
#include "common/sequence.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mfma.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec_cdna.h"

namespace fovea::cuda::cdna {

using ptx::SharedAddress;
using ptx::U32x4;

/// How values of a tile lie in LDS.
template <CdnaForwardSpec spec, bool reads_transposed>
struct ValuesOf {
  using Tile = ValueTile<spec.tile_kv, spec.head_dim_v>;
};
template <CdnaForwardSpec spec>
struct ValuesOf<spec, true> {
  using Tile = TransposedTile<spec.tile_kv, element_bytes(spec.element) * spec.head_dim_v,
                              cdna_traits(spec.gfx).line_bytes>;
};

template <CdnaForwardSpec spec>
struct Traits {
  static_assert(spec.element != Element::f32, "v_mfma multiplies elements of 16 bits here");
  static_assert(spec.tile_q == kCdnaWaveRows * spec.num_warps, "a wave owns 32 rows");
  static constexpr CdnaTraits kCdna = cdna_traits(spec.gfx);
  static constexpr int kBytes = element_bytes(spec.element);
  static constexpr int kThreads = spec.num_warps * ptx::kWarpLanes;
  static constexpr int kBlock = 32;  // rows and columns of a product
  static constexpr int kStep = 16;   // its depth: of one, or of two halves (multiply)
  static constexpr int kKeyBlocks = spec.tile_kv / kBlock;
  static constexpr int kColBlocks = spec.head_dim_v / kBlock;
  static constexpr int kQkSteps = spec.head_dim_qk / kStep;
  static constexpr int kStepsOfBlock = kBlock / kStep;
  using Keys = KeyTile<spec.tile_kv, kBytes * spec.head_dim_qk, kCdna.line_bytes>;
  using Values = typename ValuesOf<spec, kCdna.reads_transposed>::Tile;
  static_assert(spec.stages == (kCdna.reads_transposed ? 2 : 1), "values in registers are a stage");

  static constexpr CdnaForwardLayout kAt = cdna_forward_layout(spec);
};

/// A lane's part of a block of 32 x 32: of Sᵀ (keys, rows) or of Oᵀ (columns, rows). Its row is lane % 32.
using Block = float[ptx::kMfmaSums];

/// Where in its block sum g of a lane stands, whose half of the wave is lane / 32.
FOVEA_DEVICE constexpr int place_of_sum(int g, int half) { return 8 * (g / 4) + 4 * half + g % 4; }

/// Of two pairs: their first elements as a pair, their second ones.
FOVEA_DEVICE std::uint32_t lower_halves(std::uint32_t a, std::uint32_t b) {
  return ptx::byte_perm(a, b, 0x05040100U);
}
FOVEA_DEVICE std::uint32_t upper_halves(std::uint32_t a, std::uint32_t b) {
  return ptx::byte_perm(a, b, 0x07060302U);
}

/// D += A B over a depth of 16, of which a lane has eight elements.
template <CdnaForwardSpec spec>
FOVEA_DEVICE void multiply(Block& d, const U32x4& a, const U32x4& b) {
  if constexpr (Traits<spec>::kCdna.product_depth == 16) {
    ptx::mfma_32x32x16<spec.element>(d, a, b);
  } else {
    ptx::mfma_32x32x8<spec.element>(d, {a.x, a.y}, {b.x, b.y});
    ptx::mfma_32x32x8<spec.element>(d, {a.z, a.w}, {b.z, b.w});
  }
}

template <CdnaForwardSpec spec>
struct Wave {
  using T = Traits<spec>;

  const ForwardParams& p;
  const Work& work;
  const SharedAddress smem;
  const int warp, lane;

  /// Its row in a block, and which of the two lanes that share it.
  FOVEA_DEVICE_MEMBER int column() const { return lane % T::kBlock; }
  FOVEA_DEVICE_MEMBER int half() const { return lane / T::kBlock; }

  FOVEA_DEVICE_MEMBER RowView<spec> row_of(int of_lane) const {
    return {p, work, warp * kCdnaWaveRows + of_lane % T::kBlock};
  }
  FOVEA_DEVICE_MEMBER RowView<spec> row() const { return row_of(lane); }
  FOVEA_DEVICE_MEMBER bool has_rows() const {
    return RowView<spec>(p, work, warp * kCdnaWaveRows).exists;
  }

  /// Of a row of the problem: of Q and K, of V. The tile's may be wider.
  FOVEA_DEVICE_MEMBER std::int32_t key_bytes() const {
    return T::kBytes * (spec.has_padded_head_dim ? p.head_dim_qk : spec.head_dim_qk);
  }
  FOVEA_DEVICE_MEMBER std::int32_t value_bytes() const {
    return T::kBytes * (spec.has_padded_head_dim ? p.head_dim_v : spec.head_dim_v);
  }

  FOVEA_DEVICE_MEMBER typename T::Keys keys(int stage) const {
    return {smem + T::kAt.keys + stage * T::kAt.key_bytes};
  }
  FOVEA_DEVICE_MEMBER typename T::Values values(int stage) const {
    return {smem + T::kAt.values + stage * T::kAt.value_bytes};
  }
};

}  // namespace fovea::cuda::cdna
