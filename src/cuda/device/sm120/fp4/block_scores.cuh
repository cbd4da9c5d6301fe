// What smoothing of Q takes out of scores: q̄_b · (k_j - μ) for every block of queries and every key. A CTA takes the
// keys of a tile and walks the blocks of all heads that read them, 64 at a time; a thread has four blocks times eight
// keys, so three loads of 16 bytes feed 32 fmas. Read sm120/round_to_fp4.cuh first.
#pragma once

#include "common/round_to_codes.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "shared/fp4.h"
#include "sm120/fp4/operands.cuh"

namespace fovea::cuda::sm120 {

template <Fp4RoundingSpec spec>
struct BlockScores {
  static constexpr int kHeadDim = spec.head_dim_qk;

  const Fp4RoundingParams& p;
  const Operands<spec> operands{p};
  const SharedAddress smem = ptx::dynamic_shared();
  const int thread = ptx::thread_idx().x;

  /// Keys of a tile times the means of all blocks of its queries, of all heads that read it.
  FOVEA_DEVICE_MEMBER void run() const {
    const auto tiles = operands.keys();
    const HeadTile tile = tiles.tile(ptx::block_idx().x);
    const HeadRows<> rows = tiles.rows(tile.sequence, tile.head);
    const std::int32_t of_sequence = tile.begin / kQuantizedTile;
    if (tile.begin >= rows.count || of_sequence >= p.results.tiles_of_longest) return;
    put_keys(rows, tile);
    const std::int32_t blocks = ceil_div(operands.queries().length(tile.sequence), kQuantizedTile);
    const std::int32_t pairs = blocks * p.group;  // of a head and a block of its queries
#pragma unroll 1
    for (std::int32_t first = 0; first < pairs; first += kFp4BlocksAtOnce) {
      const auto row_of = [&](int i) {  // among all tiles of queries; -1: there is none
        const std::int32_t pair = first + i, head = pair / blocks;
        return pair < pairs ? operands.first_query_tile(tile.sequence, tile.head * p.group + head) +
                                  (pair - head * blocks)
                            : -1;
      };
      put_means(row_of);
      ptx::sync_threads();
      multiply_means(row_of, of_sequence);
      ptx::sync_threads();
    }
  }

 private:
  FOVEA_DEVICE_MEMBER SharedAddress key_at(int channel, int key) const {
    return smem + 4 * (channel * kQuantizedTile + key);
  }
  FOVEA_DEVICE_MEMBER SharedAddress block_at(int channel, int block) const {
    return smem + 4 * (kHeadDim * kQuantizedTile + channel * kFp4BlocksAtOnce + block);
  }

  /// Less their mean. Of a key that is not finite all products are NaN, which attention replaces. Lanes take
  /// neighbouring keys, so that what they write lies in different banks.
  FOVEA_DEVICE_MEMBER void put_keys(const HeadRows<>& rows, const HeadTile& tile) const {
    constexpr int kAtOnce = kFp4Threads / kQuantizedTile;
    const float* const mean = operands.mean_of(tile.sequence, tile.head);
    const int key = thread % kQuantizedTile;
#pragma unroll 2
    for (int octet = thread / kQuantizedTile; octet < kHeadDim / 8; octet += kAtOnce) {
      const U32x4 chunk = operands.eight(rows, p.k, std::int64_t{tile.begin} + key, 8 * octet);
      EightNumbers x;
      unpack<spec.element>(chunk, x);
#pragma unroll
      for (int d = 0; d < 8; ++d)
        ptx::st_shared(key_at(8 * octet + d, key),
                       ptx::add_rn(x[d], -ptx::ld_global(mean + 8 * octet + d)));
    }
  }

  template <class RowOf>
  FOVEA_DEVICE_MEMBER void put_means(const RowOf& row_of) const {
    constexpr int kAtOnce = kFp4Threads / kFp4BlocksAtOnce;
    const int block = thread % kFp4BlocksAtOnce;
    const std::int64_t row = row_of(block);
#pragma unroll 2
    for (int four = thread / kFp4BlocksAtOnce; four < kHeadDim / 4; four += kAtOnce) {
      F32x4 mean{};
      if (row >= 0)
        mean =
            ptx::ld_global(reinterpret_cast<const F32x4*>(p.block_means + row * kHeadDim) + four);
      ptx::st_shared(block_at(4 * four, block), mean.x);
      ptx::st_shared(block_at(4 * four + 1, block), mean.y);
      ptx::st_shared(block_at(4 * four + 2, block), mean.z);
      ptx::st_shared(block_at(4 * four + 3, block), mean.w);
    }
  }

  /// Four blocks times eight keys, the second four 64 behind the first, so that lanes read neighbours.
  template <class RowOf>
  FOVEA_DEVICE_MEMBER void multiply_means(const RowOf& row_of, std::int32_t key_tile) const {
    constexpr int kLanes = kQuantizedTile / 8;  // of a tile's keys
    static_assert(kFp4Threads / kLanes * 4 == kFp4BlocksAtOnce, "a thread has four blocks");
    const int keys_of = thread % kLanes * 4, blocks_of = thread / kLanes * 4;
    float sum[4][8] = {};
#pragma unroll 4
    for (int d = 0; d < kHeadDim; ++d) {
      const auto low = ptx::ld_shared<F32x4>(key_at(d, keys_of));
      const auto high = ptx::ld_shared<F32x4>(key_at(d, keys_of + kQuantizedTile / 2));
      const auto means = ptx::ld_shared<F32x4>(block_at(d, blocks_of));
      const float k[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      const float m[4] = {means.x, means.y, means.z, means.w};
#pragma unroll
      for (int b = 0; b < 4; ++b)
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[b][j] = ptx::fma_rn(m[b], k[j], sum[b][j]);
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const std::int64_t row = row_of(blocks_of + b);
      if (row < 0) continue;
      float* const to = const_cast<float*>(p.results.block_scores) +
                        (row * p.results.tiles_of_longest + key_tile) * kQuantizedTile + keys_of;
      ptx::st_global(reinterpret_cast<F32x4*>(to),
                     F32x4{sum[b][0], sum[b][1], sum[b][2], sum[b][3]});
      ptx::st_global(reinterpret_cast<F32x4*>(to + kQuantizedTile / 2),
                     F32x4{sum[b][4], sum[b][5], sum[b][6], sum[b][7]});
    }
  }
};

template <Fp4RoundingSpec spec>
FOVEA_DEVICE void block_scores(const Fp4RoundingParams& p) {
  BlockScores<spec>{p}.run();
}

}  // namespace fovea::cuda::sm120
