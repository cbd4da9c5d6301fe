// Attention forward by v_mfma for AMD's CDNA: gfx942 (MI300) and gfx950 (MI350), one text. It compiles for both and
// runs in the emulator; no such GPU has run it.
//
//   S = Q Kᵀ;  P = exp(mask(program(scale S)) - m);  O = Σ P V / l         Dao 2023 (FlashAttention-2), algorithm 1
//
// A workgroup owns tile_q rows, and each of its waves of 64 lanes 32 of them, all along: scores, softmax and sums stay
// in registers. Both products are taken transposed, Sᵀ = K Qᵀ and Oᵀ += Vᵀ Pᵀ: the sums of a lane are then 16 keys of
// one row, for each block of 32, and rounded they are what the lane brings to the second product, as they stand. Two
// lanes share a row: its maximum is a local one and one exchange.
//
// Two workgroups share a CU, so that each SIMD has two waves: one in its products, one in its softmax. Keys are copied
// to LDS without registers between, their banks permuted by what lanes fetch. Products need the keys of a value's
// column side by side, and here the targets differ:
//
//   gfx942   values come through registers, which transpose them. One stage, for its LDS has 64 KB.
//
//     memory | K1 to LDS, V1 to registers     |                  | K2, V2
//     a wave | softmax 0, O += P0 V0 | wait ∥ | S1    V1 to LDS ∥ | softmax 1, O += P1 V1 | wait ∥ ...     ∥ barrier
//
//   gfx950   reads LDS transposed, so values are copied as keys are. Two stages, one barrier for each tile.
//
//     memory | K2, V2 to LDS                         | K3, V3
//     a wave | S1, softmax 1, O += P1 V1    | wait ∥ | S2, softmax 2, O += P2 V2 ...
//
// Bound: gfx942 matrix cores at 128 columns, vector instructions at 64; gfx950 both within a fifth of each other.
// docs/kernels/attention_forward_cdna.md counts.
//
// Chapters, in forward/: tiles.cuh (keys and values in LDS), wave.cuh (which row is whose), load.cuh, compute.cuh,
// store.cuh.
//
// A tile has 64 or 128 columns, of keys 256 too; of head dims between, the rest is zeros in LDS, which buffers give
// behind their end.
//
// Refused: f32 inputs; head dims above 128, of keys 256, that are no multiple of 8, or in pages not a tile's; on gfx942
// head_dim_qk above 128 beside a score program, dropout or pages, for which registers lack; rows that do not begin
// at multiples of 16 bytes, tiles of keys that span 2^31 bytes (sm80/attention_forward_f32.cuh takes them all).
#pragma once

#include "cdna/forward/compute.cuh"
#include "cdna/forward/load.cuh"
#include "cdna/forward/store.cuh"
#include "cdna/forward/wave.cuh"
#include "common/every_tile.cuh"
#include "common/passes.cuh"
#include "common/range.cuh"
#include "common/row_view.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/barrier.cuh"
#include "ptx/copy_to_shared.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec_cdna.h"

namespace fovea::cuda::cdna {

/// What a workgroup computes.
template <CdnaForwardSpec spec, class Mods>
struct Forward {
  using T = Traits<spec>;
  using Tiles = typename WalkOf<Mods>::Type;
  using Scores = typename Sums<spec, Mods>::Scores;
  using Arriving = ArrivingValues<spec, T::kCdna.reads_transposed>;
  static constexpr bool kIsCopied = T::kCdna.reads_transposed;

  const Wave<spec> wave;
  Sums<spec, Mods> sums;

  FOVEA_DEVICE_MEMBER Forward(const ForwardParams& p, const Work& work)
      : wave{p, work, ptx::dynamic_shared(), ptx::warp_idx(), ptx::lane_idx()} {}

  /// Full only where all keys exist, too; idx -1: there are no more. What it needs of memory is under way.
  FOVEA_DEVICE_MEMBER VisitedTile next_tile(Tiles& tiles, Arriving& arriving, int stage) {
    VisitedTile tile;
    if (!tiles.next(tile)) return {-1, false};
    tile.is_full = tile.is_full && (tile.idx + 1) * spec.tile_kv <= wave.work.kv_end;
    copy_rows(wave, KvRows<spec>(wave, wave.p.k, wave.key_bytes(), tile.idx), wave.keys(stage));
    if constexpr (kIsCopied) {
      copy_rows(wave, KvRows<spec>(wave, wave.p.v, wave.value_bytes(), tile.idx),
                wave.values(stage));
    } else {
      arriving.load(wave, tile.idx);
    }
    return tile;
  }

  FOVEA_DEVICE_MEMBER void add_tile(Scores& s, int stage, VisitedTile tile, Pass pass) {
    sums.modify(wave, s, tile);
    if (is_indicator(pass)) sums.shrink(s);
    sums.softmax(wave, s);
    if constexpr (spec.has_dropout) {
      if (!is_indicator(pass)) sums.drop(wave, s, tile);
    }
    sums.multiply_values(wave, stage, s);
  }

  /// One tile, which has been copied but for its values: they are stored when the scores are there. Gives the next one.
  FOVEA_DEVICE_MEMBER VisitedTile visit(Tiles& tiles, Arriving& arriving, VisitedTile tile,
                                        Pass pass) {
    const bool has_rows = wave.has_rows();
    Scores s;
    if (has_rows) sums.multiply_keys(wave, 0, s);
    arriving.store(wave, pass);
    ptx::sync_threads();  // values are there, and nobody reads these keys any more
    const VisitedTile next = next_tile(tiles, arriving, 0);
    if (has_rows) add_tile(s, 0, tile, pass);
    return next;
  }

  /// One tile, which has been copied. The next one has all its time to come.
  FOVEA_DEVICE_MEMBER VisitedTile visit_copied(Tiles& tiles, Arriving& none, int stage,
                                               VisitedTile tile, Pass pass) {
    const VisitedTile next = next_tile(tiles, none, 1 - stage);
    if (pass != Pass::all) turn_values(wave, stage, pass);
    if (!wave.has_rows()) return next;
    Scores s;
    sums.multiply_keys(wave, stage, s);
    add_tile(s, stage, tile, pass);
    return next;
  }

  FOVEA_DEVICE_MEMBER void walk(Pass pass) {
    const TileSpan rows = span_of<spec>(wave.work);
    const TileRange range{wave.work.kv_begin / spec.tile_kv,
                          ceil_div(wave.work.kv_end, spec.tile_kv), spec.tile_kv};
    Tiles tiles(rows, range, wave.p.captures);
    sums.start();
    Arriving arriving;
    VisitedTile tile = next_tile(tiles, arriving, 0);
#pragma unroll 1
    for (int stage = 0; tile.idx >= 0; stage = 1 - stage) {
      ptx::wait_for_copies<0>();
      ptx::sync_threads();  // what was copied is there, and nobody reads values of the tile before
      if constexpr (kIsCopied) {
        tile = visit_copied(tiles, arriving, stage, tile, pass);
      } else {
        tile = visit(tiles, arriving, tile, pass);
      }
    }
  }

  FOVEA_DEVICE_MEMBER void run() {
    load_queries(wave, sums.queries);
#pragma unroll 1
    for (Pass pass = Pass::all; pass != Pass::end;
         pass = static_cast<Pass>(static_cast<std::int32_t>(pass) + 1)) {
      walk(pass);
      const bool is_done = is_finite(wave, sums) || pass != Pass::all;
      if (is_done) finish(wave, sums, pass);
      if (is_done && pass == Pass::all) return;
      ptx::sync_threads();
    }
  }
};

/// Eight dies with an L2 cache each take the workgroups of a grid in turns. Of `size` heads that run side by side,
/// this die's are to be neighbours, which share keys: the `i`-th workgroup takes this one.
FOVEA_DEVICE std::int32_t in_order_of_dies(std::int32_t i, std::int32_t size) {
  constexpr std::int32_t kDies = 8;
  return size % kDies == 0 ? i % kDies * (size / kDies) + i / kDies : i;
}

/// The CTA of find_work that this one is.
template <CdnaForwardSpec spec>
FOVEA_DEVICE std::int32_t cta_of_die(const ForwardParams& p) {
  const std::int32_t id = ptx::block_idx().x;
  const std::int32_t head_units = p.num_heads_q / spec.heads_per_tile;
  if constexpr (spec.is_varlen) {
    const std::int32_t unit = id % head_units;
    return id - unit + in_order_of_dies(unit, head_units);
  } else {
    const std::int32_t first = id / (p.num_q_tiles * p.heads_per_section) * p.heads_per_section;
    const std::int32_t size = least(p.heads_per_section, p.num_sequences * head_units - first);
    const std::int32_t pair = (id - first * p.num_q_tiles) % size;
    return id - pair + in_order_of_dies(pair, size);
  }
}

template <CdnaForwardSpec spec, class Mods>
FOVEA_DEVICE void attention_forward(const ForwardParams& p) {
  const Work work = find_work<spec>(p, cta_of_die<spec>(p));
  if (work.is_nothing) return;
  Forward<spec, Mods>(p, work).run();
}

}  // namespace fovea::cuda::cdna
