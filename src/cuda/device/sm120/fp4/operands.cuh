// Operands of the kernels that round to four bits: their tiles, as HeadTiles counts them, and means of keys. Read
// sm120/round_to_fp4.cuh first.
#pragma once

#include "common/head_tiles.cuh"
#include "common/sequence.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/fp4.h"

namespace fovea::cuda::sm120 {

using ptx::F32x4;
using ptx::SharedAddress;
using ptx::U32x4;

template <Fp4RoundingSpec spec>
struct Operands {
  static_assert(spec.element != Element::f32, "elements have 16 bits");
  static constexpr int kHeadDim = spec.head_dim_qk;
  using Tiles = HeadTiles<spec.is_packed>;

  const Fp4RoundingParams& p;

  FOVEA_DEVICE_MEMBER Tiles queries() const { return tiles_of<spec.is_packed>(p.q); }
  FOVEA_DEVICE_MEMBER Tiles keys() const { return tiles_of<spec.is_packed>(p.k); }
  FOVEA_DEVICE_MEMBER Tiles values() const { return tiles_of<spec.is_packed>(p.v); }

  FOVEA_DEVICE U32x4 eight(const HeadRows<>& rows, const RowsToRound& of, std::int64_t row,
                           int channel) {
    return rows.eight<true>(row, channel, of.head_dim, of.is_aligned != 0);
  }

  FOVEA_DEVICE_MEMBER std::int64_t first_tile(const Tiles& tiles, std::int32_t sequence,
                                              std::int32_t head) const {
    if constexpr (spec.is_packed) {
      const std::int64_t row = packed_rows(tiles.cu_seqlens, sequence, tiles.total).begin;
      return std::int64_t{head} * tiles.num_tiles + first_packed_tile(sequence, row);
    }
    return (std::int64_t{sequence} * tiles.num_heads + head) * tiles.num_tiles;
  }
  FOVEA_DEVICE_MEMBER std::int64_t first_key_tile(std::int32_t sequence, std::int32_t head) const {
    return first_tile(keys(), sequence, head);
  }
  FOVEA_DEVICE_MEMBER std::int64_t first_query_tile(std::int32_t sequence,
                                                    std::int32_t head) const {
    return first_tile(queries(), sequence, head);
  }

  FOVEA_DEVICE_MEMBER float* mean_of(std::int32_t sequence, std::int32_t kv_head) const {
    return p.key_means + (std::int64_t{sequence} * p.k.num_heads_kv + kv_head) * kHeadDim;
  }

  /// Has one of the lanes that hold this lane's row found NaN or infinity? `lanes` hold a row, a power of two.
  template <int lanes>
  FOVEA_DEVICE bool is_row_marked(bool is_mine) {
    constexpr std::uint32_t kRow = lanes == 32 ? ~0U : (1U << lanes) - 1;
    return (ptx::ballot(is_mine) >> (ptx::lane_idx() / lanes * lanes) & kRow) != 0;
  }
};

}  // namespace fovea::cuda::sm120
