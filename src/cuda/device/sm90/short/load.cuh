// Q, K and V into shared memory, all of it at once; and again for passes over values that are not finite. Read
// softmax.cuh next.
#pragma once

#include "common/bits.cuh"
#include "common/passes.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/short/cta.cuh"
#include "sm90/values_of_pass.cuh"

namespace fovea::cuda::sm90::short_keys {

/// Rows from at[1] on: a box for each panel; what lies outside the tensor arrives as zeros.
template <class Tile>
FOVEA_DEVICE void copy(SharedAddress to, const TensorMapParam& map, SharedAddress full,
                       const std::int32_t (&at)[4], ptx::CachePolicy policy) {
  constexpr int kPanelElements = Tile::kSpan / 2;
  ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes);
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    const std::int32_t coordinates[4] = {kPanelElements * panel, at[1], at[2], at[3]};
    ptx::cp_async_bulk_tensor_load<4>(to + panel * Tile::kPanelBytes, tensor_map(map), coordinates,
                                      full, policy);
  }
}

template <Sm90ShortSpec spec>
FOVEA_DEVICE void copy_queries(const Cta<spec>& cta, int row_tile) {
  using T = Traits<spec>;
  const Sequence& sequence = cta.work.sequence;
  const auto row = static_cast<std::int32_t>(sequence.q_row) + cta.first_query(row_tile);
  copy<typename T::QTile>(cta.q_at(row_tile), cta.p.q, cta.q_full(row_tile),
                          {0, row, cta.work.q_head, static_cast<std::int32_t>(sequence.q_batch)},
                          ptx::CachePolicy::evict_first);
}

/// Row tiles at places [begin, end).
template <Sm90ShortSpec spec>
FOVEA_DEVICE void copy_queries(const Cta<spec>& cta, int begin, int end) {
#pragma unroll 1
  for (int i = begin; i < end && cta.has_rows(cta.row_tile_at(i)); ++i)
    copy_queries(cta, cta.row_tile_at(i));
}

/// Do rows of a head lie in lines of their own, of 128 bytes? Then keys may leave L2 first: one CTA reads them, or some
/// that run side by side. Other rows share lines with a neighbour, which may come later.
template <Sm90ShortSpec spec>
inline constexpr ptx::CachePolicy kPolicyOfKeys =
    spec.head_dim_qk % 64 == 0 && spec.head_dim_v % 64 == 0 && !spec.has_padded_head_dim
        ? ptx::CachePolicy::evict_first
        : ptx::CachePolicy::evict_normal;

template <class Tile, Sm90ShortSpec spec>
FOVEA_DEVICE void copy_tile(const Cta<spec>& cta, int kv_tile, SharedAddress to,
                            const TensorMapParam& map, SharedAddress full) {
  const Sequence& sequence = cta.work.sequence;
  copy<Tile>(to, map, full,
             {0, static_cast<std::int32_t>(sequence.kv_row) + kv_tile * spec.tile_kv,
              cta.work.kv_head, static_cast<std::int32_t>(sequence.kv_batch)},
             kPolicyOfKeys<spec>);
}
template <Sm90ShortSpec spec>
FOVEA_DEVICE void copy_keys(const Cta<spec>& cta, int kv_tile, int buffer) {
  using T = Traits<spec>;
  copy_tile<typename T::KTile>(cta, kv_tile, cta.k_at(buffer), cta.p.k,
                               cta.barrier(T::kAt.k_full, buffer));
}
template <Sm90ShortSpec spec>
FOVEA_DEVICE void copy_values(const Cta<spec>& cta, int kv_tile, int buffer) {
  using T = Traits<spec>;
  copy_tile<typename T::VTile>(cta, kv_tile, cta.v_at(buffer), cta.p.v,
                               cta.barrier(T::kAt.v_full, buffer));
}

/// Keys and values of these tiles, a bit each, in the order in which they are multiplied.
template <Sm90ShortSpec spec>
FOVEA_DEVICE void copy_tiles(const Cta<spec>& cta, std::uint32_t tiles) {
#pragma unroll 1
  for (; tiles != 0; tiles &= tiles - 1) {
    copy_keys(cta, lowest_bit(tiles), lowest_bit(tiles));
    copy_values(cta, lowest_bit(tiles), lowest_bit(tiles));
  }
}

/// Barriers that copies land on, side by side from q_full on.
template <Sm90ShortSpec spec>
inline constexpr int kLanding = Traits<spec>::kAt.num_queries + 2 * Traits<spec>::kBuffers;

/// Do all barriers end, to begin again (end_barriers)?
template <Sm90ShortSpec spec>
inline constexpr bool kEndsBarriers = spec.is_persistent || Traits<spec>::kHasRing;

/// By one thread.
template <Sm90ShortSpec spec>
FOVEA_DEVICE void begin_barriers(const Cta<spec>& cta) {
  using T = Traits<spec>;
  for (const TensorMapParam* map : {&cta.p.q, &cta.p.k, &cta.p.v})
    ptx::prefetch_tensormap(tensor_map(*map));
  for (int i = 0; i < kLanding<spec>; ++i) ptx::mbarrier_init(cta.barrier(T::kAt.q_full, i), 1);
  if constexpr (T::kRefills || kEndsBarriers<spec>) {
    for (int i = 0; i < T::kAt.num_queries; ++i)
      ptx::mbarrier_init(cta.barrier(T::kAt.q_empty, i), kWarpsOfGroup);
  }
  if constexpr (spec.is_persistent) {
    for (int i = 0; i < 2; ++i) ptx::mbarrier_init(cta.barrier(T::kAt.kv_empty, i), spec.num_warps);
  }
  if constexpr (T::kHasRing) {
    const int readers = cta.num_row_tiles() * kWarpsOfGroup;
    for (int i = 0; i < 2 * T::kBuffers; ++i)
      ptx::mbarrier_init(cta.barrier(T::kAt.kv_empty, i), readers);
  }
  ptx::fence_mbarrier_init_release_cluster();
}

/// Barriers and the first copies, by one thread: the others meet it behind them.
template <Sm90ShortSpec spec>
FOVEA_DEVICE void start(const Cta<spec>& cta, std::uint32_t tiles) {
  using T = Traits<spec>;
  if (cta.warp != 0 || !ptx::elect_one()) return;
  begin_barriers(cta);
  copy_queries(cta, 0, T::kGroups);
  copy_tiles(cta, tiles);
}

/// The first tile of a persistent CTA. Groups without rows go the same way as others, with queries that are zeros.
template <Sm90ShortSpec spec>
FOVEA_DEVICE void start_persistent(const Cta<spec>& cta) {
  if (cta.warp != 0 || !ptx::elect_one()) return;
  begin_barriers(cta);
  for (int i = 0; i < Traits<spec>::kGroups; ++i) copy_queries(cta, i);
  copy_tiles(cta, 1U);
}

/// Behind its last tile, by all: nothing is under way, and barriers can begin again.
template <Sm90ShortSpec spec>
FOVEA_DEVICE void end_barriers(const Cta<spec>& cta) {
  using T = Traits<spec>;
  constexpr int kAll = (T::kAt.votes - T::kAt.q_full) / 8;
  ptx::fence_proxy_async_shared_cta();
  ptx::sync_threads();
  if (cta.warp == 0 && ptx::elect_one()) {
    for (int i = 0; i < kAll; ++i) ptx::mbarrier_inval(cta.barrier(T::kAt.q_full, i));
  }
  ptx::sync_warp();
}

template <Sm90ShortSpec spec>
FOVEA_DEVICE void await_tiles(const Cta<spec>& cta, int full, std::uint32_t tiles,
                              std::uint32_t parity) {
#pragma unroll 1
  for (; tiles != 0; tiles &= tiles - 1)
    ptx::mbarrier_wait_parity(cta.barrier(full, lowest_bit(tiles)), parity);
}

/// Before the CTA ends, or loads again: no copy may still be on its way, not of a tile that no row turned out to see.
template <Sm90ShortSpec spec>
FOVEA_DEVICE void await_all(const Cta<spec>& cta, std::uint32_t tiles) {
  using T = Traits<spec>;
  if (spec.stages == 1 || cta.warp != 0) return;  // rows have waited for the only one
  await_tiles(cta, T::kAt.k_full, tiles, 0);
  await_tiles(cta, T::kAt.v_full, tiles, 0);
}

/// For another pass: the first queries, and values as the pass wants them.
template <Sm90ShortSpec spec>
FOVEA_DEVICE void load_again(const Cta<spec>& cta, std::uint32_t tiles, Pass pass) {
  using T = Traits<spec>;
  constexpr int kUnitBytes = 1024;
  static_assert(T::VTile::kBytes % kUnitBytes == 0);
  ptx::fence_proxy_async_shared_cta();
  ptx::sync_threads();
  if (cta.warp == 0 && ptx::elect_one()) {
#pragma unroll 1
    for (std::uint32_t left = tiles; left != 0; left &= left - 1)
      copy_values(cta, lowest_bit(left), lowest_bit(left));
    copy_queries(cta, 0, T::kAt.num_queries);
  }
  ptx::sync_warp();
  await_tiles(cta, T::kAt.v_full, tiles, parity_of(pass));
#pragma unroll 1
  for (std::uint32_t left = tiles; left != 0; left &= left - 1) {
    const SharedAddress values = cta.v_at(lowest_bit(left));
#pragma unroll 1
    for (int at = cta.warp * kUnitBytes; at < T::VTile::kBytes; at += spec.num_warps * kUnitBytes)
      rewrite_values<spec.element, kUnitBytes>(values + at, cta.lane, pass);
  }
  ptx::fence_proxy_async_shared_cta();
  ptx::sync_threads();
}

/// The same answer in all threads of the CTA.
template <Sm90ShortSpec spec>
FOVEA_DEVICE bool are_all_finite(const Cta<spec>& cta, bool is_finite) {
  using T = Traits<spec>;
  const SharedAddress votes = cta.smem + T::kAt.votes;
  const bool mine = ptx::vote_all(is_finite);
  if (cta.lane == 0) ptx::st_shared(votes + 4 * cta.warp, static_cast<std::uint32_t>(mine));
  ptx::sync_threads();
  const bool is_one =
      cta.lane >= spec.num_warps || ptx::ld_shared<std::uint32_t>(votes + 4 * cta.lane) != 0;
  return ptx::vote_all(is_one);
}

}  // namespace fovea::cuda::sm90::short_keys
