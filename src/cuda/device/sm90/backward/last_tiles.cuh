// dq of the tiles of queries to which nobody adds any more, written by the CTA that added last: from f32 sums that the
// L2 cache still holds, when dk and dv are on their way. Read turns.cuh for the order of sums.
//
// Who is last follows from the walks. Where walks are staggered a tile has two sums: one ends with the last walk that
// has gone round to it, one with the highest keys, which come to it early in their walk. So whoever ends the former
// writes dq, if the progress of the highest keys has passed the tile; if not (they were launched much later), the two
// count who has ended, and the second writes. Nobody waits.
//
// Under a causal mask the last keys that see a tile are those behind which no others do; it is their turn when all
// others have added.
#pragma once

#include "common/bits.cuh"
#include "common/float_constants.cuh"
#include "common/store_eight.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm90/backward/cta.cuh"
#include "sm90/backward/load.cuh"

namespace fovea::cuda::sm90 {

/// By both groups that own keys, when their products have been read and dk and dv stored: what was dout is theirs.
template <auto spec, class Mods>
struct LastTiles {
  using T = BackwardTraits<spec>;
  // A group turns a product round there: 64 rows of 64 floats, no two of which that are stored at once share a bank.
  static constexpr int kRowBytes = 4 * (64 + 8);
  static_assert(T::kGroups * 64 * kRowBytes <= T::kAt.delta - T::kAt.dout,
                "rows lie where dout and dS did");

  const BackwardCta<spec>& cta;
  const int group, warp;  // of the CTA, of the group
  const OwnedKeys keys;
  const std::int32_t num_tiles;  // of queries
  const std::int32_t key_tile, num_key_tiles;
  const bool is_aligned;
  const int last;  // number of the last tile that the CTA has visited

  FOVEA_DEVICE_MEMBER LastTiles(const BackwardCta<spec>& of_cta, int of_group, int of_warp,
                                int of_last)
      : cta(of_cta),
        group(of_group),
        warp(of_warp),
        keys(of_cta.owned()),
        num_tiles(ceil_div(keys.seqlen_q, spec.tile_q)),
        key_tile(keys.kv_begin / T::kKeys),
        num_key_tiles(ceil_div(keys.seqlen_kv, T::kKeys)),
        is_aligned(has_aligned_rows(of_cta.p.common.dq.tensor)),
        last(of_last) {}

  FOVEA_DEVICE_MEMBER void run() const {
    const std::int32_t heads = cta.p.common.forward.group;
    const Tiles tiles = own_tiles();
    int chunk = 0;
    for (std::int32_t q_head = keys.kv_head * heads; q_head < (keys.kv_head + 1) * heads;
         ++q_head) {
      for (std::int32_t first = tiles.begin; first < tiles.end; first += 32) {
        std::uint32_t mine = shared(q_head, first, tiles.end, chunk++ % 2);
        for (int i = 0; mine != 0; ++i, mine &= mine - 1) {
          // A group for each of the two products that a tile is, or for two of four; where it is one, for every other
          // tile.
          if constexpr (T::kQueryProducts > T::kGroups) {
            for (int product = 2 * group; product < 2 * group + 2; ++product)
              finish(q_head, first + lowest_bit(mine), product);
          } else if (T::kQueryProducts == 2 || i % 2 == group) {
            finish(q_head, first + lowest_bit(mine), T::kQueryProducts == 2 ? group : 0);
          }
        }
      }
    }
  }

 private:
  struct Tiles {
    std::int32_t begin, end;
  };

  // ---- which tiles ----

  /// All that may be its own lie in between.
  FOVEA_DEVICE_MEMBER Tiles own_tiles() const {
    if constexpr (!spec.is_staggered) return {0, num_tiles};
    if (is_highest()) return {0, num_tiles};
    return {begin_of(key_tile) + 1, begin_of(key_tile + 1) + 1};
  }

  FOVEA_DEVICE_MEMBER bool is_highest() const { return key_tile == num_key_tiles - 1; }
  FOVEA_DEVICE_MEMBER std::int32_t begin_of(std::int32_t tile) const {
    return StaggeredWalk::of(tile, num_key_tiles, num_tiles).begin;
  }

  /// The first warp says to all which of 32 tiles are the CTA's own, when what it has added is there.
  FOVEA_DEVICE_MEMBER std::uint32_t shared(std::int32_t q_head, std::int32_t first,
                                           std::int32_t end, int slot) const {
    const SharedAddress word = cta.smem + T::kAt.last_tiles + 4 * slot;
    if (cta.warp == 0) {
      const std::int32_t tile = first + cta.lane;
      const bool is_known = tile < end && is_own(q_head, tile);
      await_sums();
      const bool is_left = tile < end && !is_known && take_or_leave(q_head, tile);
      const std::uint32_t mine = ptx::ballot(is_known || is_left);
      if (cta.lane == 0) ptx::st_shared(word, mine);
    }
    ptx::bar_sync(1, 256);
    return ptx::ld_shared<std::uint32_t>(word);
  }

  /// The additions of this CTA.
  FOVEA_DEVICE_MEMBER void await_sums() const {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.added, last % kSm90BackwardTurns),
                              static_cast<std::uint32_t>(last / kSm90BackwardTurns) % 2);
  }

  /// Does it add last, with all that others add in its sight?
  FOVEA_DEVICE_MEMBER bool is_own(std::int32_t q_head, std::int32_t tile) const {
    if constexpr (spec.is_staggered) {
      if (!has_two_sums(tile)) return true;  // of the highest keys
      return !is_highest() && have_highest_added(q_head, tile);
    }
    return sees(q_head, tile, 0) && (is_highest() || !sees(q_head, tile, T::kKeys));
  }

  /// Do the keys, or those so many further on, see something of the tile?
  FOVEA_DEVICE_MEMBER bool sees(std::int32_t q_head, std::int32_t tile,
                                std::int32_t further) const {
    TileSpan span = QueryWalk<spec, Mods>::span_of(cta.p.common.forward, keys);
    span.q_head_begin = q_head;
    span.q_head_end = q_head + 1;
    span.q_begin = tile * spec.tile_q;
    span.q_end = least(span.q_begin + spec.tile_q, keys.seqlen_q);
    span.kv_begin += further;
    span.kv_end = least(span.kv_end + further, keys.seqlen_kv);
    return Mods::tile_kind(span, cta.p.common.forward.captures) != TileKind::empty;
  }

  FOVEA_DEVICE_MEMBER bool has_two_sums(std::int32_t tile) const {
    return has_round_sum(tile) && has_first_sum(tile, num_key_tiles, num_tiles);
  }

  FOVEA_DEVICE_MEMBER bool have_highest_added(std::int32_t q_head, std::int32_t tile) const {
    const ForwardParams& f = cta.p.common.forward;
    const std::int32_t position =
        (q_head - keys.kv_head * f.group) * num_tiles + begin_of(num_key_tiles - 1) - tile;
    const std::int64_t highest = tile_place<spec.is_varlen, true>(
        f, BackwardCta<spec>::sequence_of(keys), keys.kv_head, (num_key_tiles - 1) * T::kKeys);
    return ptx::ld_acquire_global(cta.p.rows.progress + highest) > position;
  }

  /// Of the two CTAs that end the sums of a tile the one that says so second takes it.
  FOVEA_DEVICE_MEMBER bool take_or_leave(std::int32_t q_head, std::int32_t tile) const {
    if constexpr (!spec.is_staggered) return false;
    const ForwardParams& f = cta.p.common.forward;
    std::int32_t* const word = cta.p.rows.sum_ends + tile +
                               (keys.batch * std::int64_t{f.num_heads_q} + q_head) * num_tiles;
    return ptx::atom_add_acq_rel_global(word, 1) == 1;
  }

  // ---- what becomes of them ----

  FOVEA_DEVICE_MEMBER void finish(std::int32_t q_head, std::int32_t tile, int product) const {
    const Sums sums = load(q_head, tile, product);
    sync_group();  // the rows before have been read
    turn(sums, spec.is_staggered && has_two_sums(tile));
    sync_group();
    store(q_head, first_row(tile, product), first_column(product));
  }

  /// Fragments of a product, and those of its other sum.
  struct Sums {
    ptx::F32x4 one[8], other[8];
  };

  FOVEA_DEVICE_MEMBER Sums load(std::int32_t q_head, std::int32_t tile, int product) const {
    const Sm90BackwardRows& rows = cta.p.rows;
    const std::int64_t at = (cta.first_row(keys, q_head) + tile * spec.tile_q) * spec.head_dim_qk +
                            product * T::kProductSums + 4 * (32 * warp + cta.lane);
    const auto four = [at](const float* sums, int j) {
      return ptx::ld_global(reinterpret_cast<const ptx::F32x4*>(sums + at + 512 * j));
    };
    Sums sums{};
    const bool has_first = !spec.is_staggered || has_first_sum(tile, num_key_tiles, num_tiles);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      sums.one[j] = four(has_first ? rows.dq_sums : rows.dq_round_sums, j);
    if constexpr (spec.is_staggered) {
      // A branch would wait for the loads ahead of it: the first sum is read again where it is the only one.
#pragma unroll
      for (int j = 0; j < 8; ++j)
        sums.other[j] = four(has_round_sum(tile) ? rows.dq_round_sums : rows.dq_sums, j);
    }
    return sums;
  }

  /// Products of 64 rows each stand side by side, then those of the next rows.
  static constexpr int kSideBySide = spec.head_dim_qk / 64;
  static constexpr bool kAreInOneRow = spec.tile_q == 64;
  FOVEA_DEVICE std::int32_t first_column(int product) {
    return kAreInOneRow ? 64 * product : product % kSideBySide * 64;
  }
  FOVEA_DEVICE std::int32_t first_row(std::int32_t tile, int product) {
    return tile * spec.tile_q + (kAreInOneRow ? 0 : product / kSideBySide * 64);
  }

  FOVEA_DEVICE_MEMBER SharedAddress row_at(int row) const {
    return cta.smem + T::kAt.dout + static_cast<SharedAddress>((64 * group + row) * kRowBytes);
  }

  /// From fragments to rows.
  FOVEA_DEVICE_MEMBER void turn(const Sums& sums, bool has_two) const {
    const SharedAddress mine = row_at(16 * warp + cta.lane / 4) + 8 * (cta.lane % 4);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      ptx::F32x4 x = sums.one[j];
      const ptx::F32x4& y = sums.other[j];
      if (has_two) x = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
      ptx::st_shared(mine + 32 * j, ptx::F32x2{x.x, x.y});
      ptx::st_shared(mine + 8 * kRowBytes + 32 * j, ptx::F32x2{x.z, x.w});
    }
  }

  /// Eight lanes write a row.
  FOVEA_DEVICE_MEMBER void store(std::int32_t q_head, std::int32_t first, int column) const {
    const GradientParam& to = cta.p.common.dq;
    const int first_of_lane = 8 * (cta.lane % 8);
    const std::int32_t count = least(8, cta.p.common.forward.head_dim_qk - column - first_of_lane);
    const std::int64_t head = keys.batch * to.tensor.batch_stride + q_head * to.tensor.head_stride +
                              (column + first_of_lane) * to.tensor.col_stride;
    float zero = 0;  // NaN where a number is not finite
#pragma unroll
    for (int row = 4 * warp + cta.lane / 8; row < 64; row += 16) {
      if (first + row >= keys.seqlen_q) continue;
      const SharedAddress from = row_at(row) + 4 * static_cast<SharedAddress>(first_of_lane);
      float x[8];
      load_scaled(from, x);
      if constexpr (spec.asks_redo) {
#pragma unroll
        for (const float each : x) zero = ptx::fma_rn(each, 0.0F, zero);
      }
      store_eight<spec.element>(to, head + (first + row) * to.tensor.row_stride, is_aligned, count,
                                x);
    }
    if (spec.asks_redo && ptx::vote_any(is_nan(zero)) && cta.lane == 0)
      ask_redo<spec.is_varlen, false>(cta.p.common, cta.sequence_of(keys), q_head, first);
  }

  FOVEA_DEVICE_MEMBER void load_scaled(SharedAddress from, float (&x)[8]) const {
    const float c = cta.p.common.forward.softmax_scale;
    const auto lo = ptx::ld_shared<ptx::F32x4>(from);
    const auto hi = ptx::ld_shared<ptx::F32x4>(from + 16);
    x[0] = lo.x * c, x[1] = lo.y * c, x[2] = lo.z * c, x[3] = lo.w * c;
    x[4] = hi.x * c, x[5] = hi.y * c, x[6] = hi.z * c, x[7] = hi.w * c;
  }

  FOVEA_DEVICE_MEMBER void sync_group() const {
    // The number of a barrier is a constant.
    group == 0 ? ptx::bar_sync(2, 128) : ptx::bar_sync(3, 128);
  }
};

}  // namespace fovea::cuda::sm90
