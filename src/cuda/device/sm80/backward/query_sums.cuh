// dq of a tile of queries in one walk: which warp and lane holds which of its numbers, and where they are added up in
// memory. Read sm80/attention_backward_one_walk.cuh for the walk, finish_queries.cuh for what becomes of the sums.
#pragma once

#include "ptx/memory.cuh"
#include "shared/backward_spec.h"
#include "sm80/backward/owner.cuh"

namespace fovea::cuda::sm80 {

/// Warps stand side by side along the tile's columns, of which each takes pairs of blocks of 8 in turn, and below each
/// other along its rows. Numbers lie in memory as lanes hold them, those of a warp's lanes side by side, so that
/// additions need no exchange. (Four numbers of a lane at once, as sm_90 can, are no faster.)
template <Sm80BackwardSpec spec>
struct QuerySums {
  static constexpr int kColumnWarps = sm80_query_column_warps(spec);
  static constexpr int kRowWarps = spec.num_warps / kColumnWarps;
  static constexpr int kWarpRows = spec.tile_walked / kRowWarps;
  static_assert(kWarpRows % 16 == 0, "a warp sums whole blocks of 16 rows");
  static constexpr int kRowBlocks = kWarpRows / 16;
  static constexpr int kBlocks = spec.head_dim_qk / kColumnWarps / 8;
  static_assert(spec.head_dim_qk % (16 * kColumnWarps) == 0, "and pairs of blocks of 8 columns");
  static constexpr int kTileFloats = spec.tile_walked * spec.head_dim_qk;

  /// Four numbers of a lane: rows lane / 4 and 8 below, columns lane % 4 * 2 and its neighbour.
  struct Place {
    int warp, row_block, block;

    FOVEA_DEVICE_MEMBER constexpr int row() const {
      return warp / kColumnWarps * kWarpRows + row_block * 16;
    }
    FOVEA_DEVICE_MEMBER constexpr int column() const {
      return (block / 2 * kColumnWarps + warp % kColumnWarps) * 16 + block % 2 * 8;
    }
    /// Of a tile's floats, the 128 of the warp.
    FOVEA_DEVICE_MEMBER constexpr int at() const {
      return ((warp * kRowBlocks + row_block) * kBlocks + block) * 128;
    }
  };

  FOVEA_DEVICE_MEMBER static void store(float* to, int lane, const float (&sums)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) ptx::st_global(to + e * 32 + lane, sums[e]);
  }

  FOVEA_DEVICE_MEMBER static void add(float* to, int lane, const float (&sums)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) ptx::red_add_global(to + e * 32 + lane, sums[e]);
  }

  /// Adds what the four lanes of rows `row` and 8 below have: [half][column].
  FOVEA_DEVICE_MEMBER static void gather(const float* from, int row, float (&sums)[2][8]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const auto lanes =
          ptx::ld_global(reinterpret_cast<const ptx::F32x4*>(from + e * 32 + row * 4));
      const float four[4] = {lanes.x, lanes.y, lanes.z, lanes.w};
#pragma unroll
      for (int lane = 0; lane < 4; ++lane) sums[e / 2][lane * 2 + e % 2] += four[lane];
    }
  }
};

}  // namespace fovea::cuda::sm80
