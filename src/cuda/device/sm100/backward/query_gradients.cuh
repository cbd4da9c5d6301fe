// dq of a tile of queries, from tensor memory to f32 sums in memory: one warpgroup. Read sm90/backward/turns.cuh for
// the order of the sums, sm90/backward/query_gradients.cuh for what they look like: fragments of products of 64 x 64,
// which loads of 16 lanes x 256 bits give as they are.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/red.cuh"
#include "ptx/tcgen05_ld_st.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/cta.cuh"

namespace fovea::cuda::sm100 {

template <Sm100BackwardSpec spec>
struct QueryGradients {
  using T = BackwardTraits<spec>;
  static constexpr int kSideBySide = spec.head_dim_qk / 64;  // products
  static constexpr int kHalves = 2;                          // of a warp's lanes, 16 each
  /// Of a product, a lane's.
  using Fragment = float[32];

  const BackwardCta<spec>& cta;
  const BackwardTensorMemory<spec> lanes;
  const int warp;  // of the group
  Ring<1> tiles{0};
  Ring<kSm90BackwardTurns> turns{0};
  Fragment sums[kSideBySide][kHalves];

  FOVEA_DEVICE_MEMBER QueryGradients(const BackwardCta<spec>& of_cta,
                                     const BackwardTensorMemory<spec>& memory)
      : cta(of_cta), lanes(memory.of_warp(of_cta.warp)), warp(of_cta.warp % 4) {}

  FOVEA_DEVICE_MEMBER void run() {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.k_full, 0), 0);
    if (!ptx::vote_any(cta.posted(0).is_none())) sum();
    ptx::tcgen05_fence_before_thread_sync();
    cta.release(cta.barrier(T::kAt.memory_read, 0));
  }

 private:
  FOVEA_DEVICE_MEMBER void sum() {
    const OwnedKeys keys = cta.owned();
    for (int i = 0;; ++i) {
      ptx::mbarrier_wait_parity(cta.barrier(T::kAt.dq_full, 0), tiles.parity);
      tiles.advance();
      take();
      const PostedTile tile = cta.posted(i);
      const bool is_last = ptx::vote_any(tile.is_last());
      // Behind that tensor memory is given back: a turn may be long in coming, and products go on meanwhile.
      if constexpr (spec.is_deterministic)
        ptx::mbarrier_wait_parity(cta.barrier(T::kAt.turn, turns.stage), turns.parity);
      add(keys, tile);
      if constexpr (spec.is_deterministic) {
        cta.release(cta.barrier(T::kAt.added, turns.stage));
        turns.advance();
      }
      if (is_last) return;
    }
  }

  FOVEA_DEVICE_MEMBER void take() {
    ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
    for (int column = 0; column < kSideBySide; ++column) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        ptx::tcgen05_ld_16x256b(sums[column][half],
                                lanes.dq().plus_columns(64 * column).plus_lanes(16 * half));
      }
    }
    ptx::tcgen05_wait_ld(sums[0][0], sums[0][1]);
#pragma unroll
    for (int column = 1; column < kSideBySide; ++column) {
      ptx::known_from_here(sums[column][0]);
      ptx::known_from_here(sums[column][1]);
    }
    ptx::tcgen05_fence_before_thread_sync();
    cta.release(cta.barrier(T::kAt.dq_empty, 0));
  }

  /// Rows 32 warp + 16 half are those of warp 2 (warp % 2) + half of a product of number warp / 2 from above.
  FOVEA_DEVICE_MEMBER void add(const OwnedKeys& keys, const PostedTile& tile) const {
    const std::int64_t row = cta.first_row(keys, tile.q_head) + tile.idx() * spec.tile_q;
    float* const to = cta.dq_sums_of(keys, tile.idx()) + row * spec.head_dim_qk +
                      warp / 2 * (kSideBySide * T::kProductSums) + 4 * (warp % 2 * 64 + cta.lane);
    const bool is_first = cta.is_first_sum(keys, tile.idx());
#pragma unroll
    for (int column = 0; column < kSideBySide; ++column) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
        add(to + column * T::kProductSums + half * 128, sums[column][half], is_first);
    }
  }

  FOVEA_DEVICE void add(float* to, const Fragment& sums, bool is_first) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const ptx::F32x4 four{sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
      if (is_first)
        ptx::st_global(reinterpret_cast<ptx::F32x4*>(to + 512 * j), four);
      else
        ptx::red_add_global_v4(to + 512 * j, four);
    }
  }
};

}  // namespace fovea::cuda::sm100
