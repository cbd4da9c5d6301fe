// Which tiles of queries see the keys of the CTA, and all that is loaded: one warp. Read key_gradients.cuh next.
#pragma once

#include "common/backward_work.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "sm90/backward/cta.cuh"

namespace fovea::cuda::sm90 {

/// The tiles of queries that see the keys of the CTA: of one q head of the group after the other, from the last one.
template <auto spec, class Mods>
struct QueryWalk {
  using Tiles = TileWalk<Mods, WalkOrder::falling, WalkAxis::queries>;

  TileSpan& span;  // not its own: what points into itself stays in memory
  Tiles& tiles;
  const std::int32_t last_head;

  FOVEA_DEVICE TileSpan span_of(const ForwardParams& p, const OwnedKeys& keys) {
    TileSpan span{};
    span.batch = keys.batch;
    span.q_head_begin = keys.kv_head * p.group;
    span.q_head_end = span.q_head_begin + 1;
    span.kv_head = keys.kv_head;
    span.kv_begin = keys.kv_begin;
    span.kv_end = least(keys.kv_begin + kSm90BackwardKeys, keys.seqlen_kv);
    span.seqlen_q = keys.seqlen_q;
    span.seqlen_kv = keys.seqlen_kv;
    return span;
  }
  FOVEA_DEVICE Tiles tiles_of(const ForwardParams& p, const TileSpan& span) {
    return Tiles(span, {0, kMostCounted, spec.tile_q}, p.captures);
  }

  /// idx -1: there are no more. A tile is not full where the end of its side cuts it or the keys. (Dense, rows behind
  /// the end are zeros, which need no mask; a program may make anything of them.)
  FOVEA_DEVICE_MEMBER WalkedTile next() {
    for (;;) {
      VisitedTile tile;
      if (tiles.next(tile)) {
        const bool is_cut =
            span.kv_end - span.kv_begin < kSm90BackwardKeys ||
            ((spec.is_varlen || Mods::has_score) && (tile.idx + 1) * spec.tile_q > span.seqlen_q);
        return {tile.idx, span.q_head_begin, tile.is_full && !is_cut};
      }
      if (span.q_head_begin == last_head) return {-1, last_head, false};
      ++span.q_head_begin;
      ++span.q_head_end;
      tiles.restart();
    }
  }
};

/// All tiles of queries, of one q head of the group after the other, from the CTA's own beginning.
template <auto spec, class Mods>
struct StaggeredQueryWalk {
  const std::int32_t num_tiles, last_head;
  const bool is_full;
  std::int32_t q_head, idx, num_left;

  FOVEA_DEVICE_MEMBER StaggeredQueryWalk(const BackwardCta<spec>& cta, const OwnedKeys& keys)
      : num_tiles(ceil_div(keys.seqlen_q, spec.tile_q)),
        last_head((keys.kv_head + 1) * cta.p.common.forward.group - 1),
        is_full(keys.kv_begin + kSm90BackwardKeys <= keys.seqlen_kv),
        q_head(keys.kv_head * cta.p.common.forward.group),
        idx(cta.staggered_walk(keys).begin),
        num_left(num_tiles) {}

  /// idx -1: there are no more.
  FOVEA_DEVICE_MEMBER WalkedTile next() {
    if (num_left == 0) {
      if (q_head == last_head || num_tiles == 0) return {-1, last_head, false};
      ++q_head;
      num_left = num_tiles;
    }
    --num_left;
    const std::int32_t tile = idx;
    idx = (idx == 0 ? num_tiles : idx) - 1;
    // With a program the last one counts as cut (QueryWalk): who does not ask whether it is has a register less.
    if constexpr (Mods::has_score) return {tile, q_head, is_full && tile != num_tiles - 1};
    return {tile, q_head, is_full};
  }
};

/// K and V once, then tiles of Q and dout with what is known of their rows.
template <auto spec, class Walk>
struct BackwardLoad {
  using T = BackwardTraits<spec>;
  const BackwardCta<spec>& cta;
  const OwnedKeys& keys;
  Walk& walk;
  WalkedTile next;
  Ring<T::kStages> stages{1};
  int count = 0;  // tiles that have been loaded

  FOVEA_DEVICE_MEMBER BackwardLoad(const BackwardCta<spec>& of_cta, const OwnedKeys& of_keys,
                                   Walk& of_walk)
      : cta(of_cta), keys(of_keys), walk(of_walk), next(walk.next()) {}

  FOVEA_DEVICE_MEMBER bool has_next() const { return next.idx >= 0; }

  /// K, the first tile of queries, V. Where no query sees the keys there is nothing to load, and idx is -1.
  FOVEA_DEVICE_MEMBER WalkedTile begin() {
    const WalkedTile first = next;
    const SharedAddress k_full = cta.barrier(T::kAt.k_full, 0);
    const SharedAddress v_full = cta.barrier(T::kAt.v_full, 0);
    const std::int32_t row = keys.kv_row + keys.kv_begin;
    if (!has_next()) {
      if (cta.lane == 0) {
        post(PostedTile::none());
        ptx::mbarrier_arrive(k_full);
      }
      return first;
    }
    next = walk.next();
    if (ptx::elect_one()) {
      post(PostedTile::make(first, !has_next()));
      copy<typename T::KTile>(cta.smem + T::kAt.k, cta.p.k, k_full, row, keys.kv_head,
                              ptx::CachePolicy::evict_first);
      load(first);
      copy<typename T::VTile>(cta.smem + T::kAt.v, cta.p.v, v_full, row, keys.kv_head,
                              ptx::CachePolicy::evict_first);
    }
    done();
    return first;
  }

  /// The next tile of queries, when its stage is empty.
  FOVEA_DEVICE_MEMBER WalkedTile load_next() {
    const WalkedTile tile = next;
    next = walk.next();
    cta.await(cta.barrier(T::kAt.stage_empty, stages.stage), stages.parity);
    if (ptx::elect_one()) {
      post(PostedTile::make(tile, !has_next()));
      load(tile);
    }
    done();
    return tile;
  }

 private:
  FOVEA_DEVICE_MEMBER void done() {
    ptx::sync_warp();
    stages.advance();
    ++count;
  }

  FOVEA_DEVICE_MEMBER void post(const PostedTile& tile) const {
    ptx::st_shared(cta.posted_at(count),
                   ptx::U32x2{tile.word, static_cast<std::uint32_t>(tile.q_head)});
  }

  FOVEA_DEVICE_MEMBER void load(const WalkedTile& tile) const {
    const SharedAddress q_full = cta.barrier(T::kAt.q_full, stages.stage);
    const SharedAddress dout_full = cta.barrier(T::kAt.dout_full, stages.stage);
    const std::int32_t row = tile.idx * spec.tile_q;
    const std::int64_t prepared = cta.first_row(keys, tile.q_head) + row;
    const Sm90BackwardRows& rows = cta.p.rows;
    copy<typename T::QTile>(cta.q_at(stages.stage), cta.p.q, q_full, keys.q_row + row, tile.q_head,
                            ptx::CachePolicy::evict_normal, 4 * spec.tile_q);
    ptx::cp_async_bulk_load(cta.log_sum_at(stages.stage), rows.log_sum + prepared, 4 * spec.tile_q,
                            q_full, ptx::CachePolicy::evict_normal);
    copy<typename T::DoutTile>(cta.dout_at(stages.stage), cta.p.dout, dout_full, keys.q_row + row,
                               tile.q_head, ptx::CachePolicy::evict_normal, T::kDeltaTileBytes);
    ptx::cp_async_bulk_load(
        cta.delta_at(stages.stage),
        static_cast<const unsigned char*>(rows.delta) + prepared * delta_bytes(spec),
        T::kDeltaTileBytes, dout_full, ptx::CachePolicy::evict_normal);
  }

  /// A box for each panel of 64 elements; what lies outside the tensor arrives as zeros. `more`: bytes that the barrier
  /// expects besides.
  template <class Tile>
  FOVEA_DEVICE_MEMBER void copy(SharedAddress to, const TensorMapParam& map, SharedAddress full,
                                std::int32_t row, std::int32_t head, ptx::CachePolicy policy,
                                std::uint32_t more = 0) const {
    ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes + more);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const std::int32_t at[4] = {64 * panel, row, head, spec.is_varlen ? 0 : keys.batch};
      ptx::cp_async_bulk_tensor_load<4>(to + panel * Tile::kPanelBytes, tensor_map(map), at, full,
                                        policy);
    }
  }
};

/// visit(load) for the CTA's keys.
template <auto spec, class Mods, class Visit>
FOVEA_DEVICE void with_load(const BackwardCta<spec>& cta, Visit&& visit) {
  const OwnedKeys keys = cta.owned();
  if constexpr (spec.is_staggered) {
    using Walk = StaggeredQueryWalk<spec, Mods>;
    Walk walk(cta, keys);
    BackwardLoad<spec, Walk> load(cta, keys, walk);
    visit(load);
  } else {
    using Walk = QueryWalk<spec, Mods>;
    const ForwardParams& p = cta.p.common.forward;
    TileSpan span = Walk::span_of(p, keys);
    auto tiles = Walk::tiles_of(p, span);
    Walk walk{span, tiles, (keys.kv_head + 1) * p.group - 1};
    BackwardLoad<spec, Walk> load(cta, keys, walk);
    visit(load);
  }
}

}  // namespace fovea::cuda::sm90
