// Attention forward of short sequences by wgmma and TMA: Hopper.
//
//   S = Q Kᵀ;  P = exp(mask(scale S) - m);  O = Σ P V / l                                Milakov & Gimelshein 2018
//
// A CTA owns tile_q rows of one head, mostly all, and shared memory has all keys and values of their sequence: copies
// are asked for two tiles ahead, each lands on a barrier of its own, and no buffer of keys is written twice. One to
// three warpgroups share what landed; each takes 64 rows at a time, and their keys in as few products as registers
// allow. The last product of 64 rows and the first of the next 64 run beside each other, and beside the end of the
// former:
//
//   TMA      Q0 K0 V0 K1 V1 Q1                     a group with two row tiles of two kv tiles each
//   wgmma    | S00 |         | O00 S01 |          | O01 S10 |         | O10 S11 | ...
//   softmax        |   P00   |         |    P01   |  store  |   P10   |
//
// Where shared memory has no room for all of Q, a group's queries follow each other in one buffer (q_stages).
//
// What hides a CTA's latencies is the CTAs beside it: there is no loading warp, no schedule, no counter, and nothing is
// kept between row tiles. The softmax is exact (common/online_softmax.cuh), its maximum taken before its powers.
//
// Bound: memory up to some 100 tokens, then a CTA's own latencies; docs/kernels/attention_short_sm90.md counts them.
//
// NaN and infinity in V reach rows that do not see them, as 0 * NaN: where a sum is not finite the CTA computes its
// rows again in passes (common/passes.cuh), from values that it loads again and rewrites. What lies behind the last key
// of a packed sequence is a neighbour's, and may lead there.
//
// Chapters, in short/: cta (what all warps know, and which tiles a group multiplies), load, softmax, output. The walk
// and the entry are here.
//
// Refused (forward/sm90_short.cpp has the words): score programs, masks that are no range of keys, dropout, caches,
// sums in f32, what TMA cannot read, longer sequences.
#pragma once

#include "common/passes.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "shared/forward_params_sm90.h"
#include "shared/forward_spec.h"
#include "sm90/short/cta.cuh"
#include "sm90/short/load.cuh"
#include "sm90/short/output.cuh"
#include "sm90/short/softmax.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::sm90 {
namespace short_keys {

/// What a group computes.
template <Sm90ShortSpec spec, class Mods>
struct Compute {
  using T = Traits<spec>;
  using Probabilities = std::uint32_t[spec.tile_kv / 16][4];
  const Cta<spec>& cta;
  std::uint32_t later_tiles;  // of keys, that are still to be asked for: a bit each

  float s[spec.tile_kv / 2];
  float o[spec.head_dim_v / 2];
  Rows<spec> rows;
  std::uint32_t q_parities = 0, q_refills = 0;  // of buffers of Q, a bit each
  bool is_finite = true;

  FOVEA_DEVICE_MEMBER Compute(const Cta<spec>& of_cta, std::uint32_t later)
      : cta(of_cta), later_tiles(later) {}

  /// All row tiles of the group.
  FOVEA_DEVICE_MEMBER void run(Pass pass) {
    Steps<spec, Mods> steps(cta);
    Step step{};
    if (!steps.next(step)) return;
    Probabilities p;
    issue_scores(step);
    for (;;) {
      Step after{};
      const bool has_after = !T::kIsOneStep && steps.next(after);
      ptx::wgmma_wait_group<0>();
      make_probabilities(step, pass, p);
      issue_sums(step, pass, p);
      // Note: each way has its wait. Where they meet before O is read, ptxas takes O for a product's that still runs,
      // and lets one product run at a time. The next queries may take the place of these, where O is left for a moment.
      if (step.is_last) {
        ptx::wgmma_wait_group<0>();
        if (T::kHasNextQueries && has_after) issue_scores(after);
        is_finite = finish(cta, step.row_tile, rows, o, pass) && is_finite;
        if constexpr (T::kRefills) refill(step.row_tile);
        if (!T::kHasNextQueries && has_after) issue_scores(after);
        if (!has_after) return;
      } else {
        issue_scores(after);
      }
      step = after;
    }
  }

  /// Warp 0 asks for keys and values up to this tile.
  FOVEA_DEVICE_MEMBER void load_up_to(int kv_tile) {
    if (spec.stages == 1 || cta.warp != 0) return;
    const std::uint32_t tiles = later_tiles & up_to_tile(kv_tile);
    later_tiles &= ~tiles;
    if (ptx::elect_one()) copy_tiles(cta, tiles);
    ptx::sync_warp();
  }

 private:
  /// These queries are multiplied, and O, which lay in their place, is stored: the buffer goes to those that follow.
  FOVEA_DEVICE_MEMBER void refill(int row_tile) {
    const int next = cta.row_tile_of_round(row_tile / T::kGroups + spec.q_stages);
    if (next >= T::kRowTiles || !cta.has_rows(next)) return;
    ptx::fence_proxy_async_shared_cta();
    cta.release(cta.q_empty(row_tile));
    if (cta.warp % kWarpsOfGroup != 0) return;
    const int buffer = cta.buffer_of(row_tile);
    cta.await(cta.q_empty(row_tile), q_refills >> buffer & 1U);
    q_refills ^= 1U << buffer;
    if (ptx::elect_one()) copy_queries(cta, next);
    ptx::sync_warp();
  }

  /// S = Q Kᵀ.
  FOVEA_DEVICE_MEMBER void issue_scores(const Step& step) {
    using QTile = typename T::QTile;
    using KTile = typename T::KTile;
    load_up_to(step.kv_tile + kTilesAhead);
    if (step.is_first) {
      const int buffer = cta.buffer_of(step.row_tile);
      ptx::mbarrier_wait_parity(cta.q_full(step.row_tile), q_parities >> buffer & 1U);
      q_parities ^= 1U << buffer;
    }
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.k_full, step.kv_tile), 0);
    const auto a = k_major_descriptor(QTile{cta.q_at(step.row_tile)});
    const auto b = k_major_descriptor(KTile{cta.k_at(step.kv_tile)});
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < spec.head_dim_qk / T::kElement.k_step; ++i) {
      ptx::wgmma_ss<T::kType, T::kType, spec.tile_kv>(s, advanced(a, k_major_offset<QTile>(i)),
                                                      advanced(b, k_major_offset<KTile>(i)), i > 0);
    }
    ptx::wgmma_commit_group();
  }

  /// S becomes P. Where a warp without rows is skipped its P is anything, and so is its O. (Zeros ptxas would move
  /// ahead of the wait for S, and then let one product run at a time.)
  FOVEA_DEVICE_MEMBER void make_probabilities(const Step& step, Pass pass, Probabilities& p) {
    if constexpr (T::kSkipsWarps) {
      if (!cta.warp_has_rows(step.row_tile)) return;
    }
    if (step.is_first) rows.begin();
    if (!step.is_full) mask<Mods>(cta, step, s);
    if (is_indicator(pass)) shrink(s);
    rows.softmax(s, p, cta.p.common.softmax_scale_log2);
    if constexpr (spec.stages > 1) {  // else there is nothing yet
      if (!step.is_first) rows.rescale(o);
    }
  }

  /// O += P V.
  FOVEA_DEVICE_MEMBER void issue_sums(const Step& step, Pass pass, const Probabilities& p) {
    using VTile = typename T::VTile;
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.v_full, step.kv_tile), parity_of(pass));
    const auto b = mn_major_descriptor(VTile{cta.v_at(step.kv_tile)});
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < spec.tile_kv / T::kElement.k_step; ++i) {
      ptx::wgmma_rs<T::kType, T::kType, spec.head_dim_v, ptx::Major::mn>(
          o, p[i], advanced(b, mn_major_offset<VTile>(i)), i > 0 || !step.is_first);
    }
    ptx::wgmma_commit_group();
  }
};

}  // namespace short_keys

/// num_warps * 32 threads, a CTA for each tile of rows of a head.
template <Sm90ShortSpec spec, class Mods>
FOVEA_DEVICE void attention_forward_short(const Sm90ShortParams& p) {
  using namespace short_keys;
  const Cta<spec> cta{
      {ptx::dynamic_shared(), ptx::warp_idx(), ptx::lane_idx()}, p, work_of_cta<spec>(p.common)};
  if (cta.work.is_nothing) return;
  const std::uint32_t tiles = tiles_to_load<Mods>(cta);
  const std::uint32_t first_tiles = tiles & up_to_tile(lowest_bit(tiles) + kTilesAhead);
  start(cta, first_tiles);
  ptx::sync_threads();
  Compute<spec, Mods> compute(cta, tiles & ~first_tiles);
#pragma unroll 1
  for (Pass pass = Pass::all; pass != Pass::end;
       pass = static_cast<Pass>(static_cast<std::int32_t>(pass) + 1)) {
    if (pass != Pass::all) load_again(cta, tiles, pass);
    compute.run(pass);
    compute.load_up_to(spec.stages - 1);  // what its own rows do not see, others' may
    if (pass != Pass::all) continue;
    await_all(cta, tiles);
    if (are_all_finite(cta, compute.is_finite)) return;
  }
}

}  // namespace fovea::cuda::sm90
