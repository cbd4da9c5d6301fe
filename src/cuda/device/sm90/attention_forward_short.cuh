// Attention forward of short sequences by wgmma and TMA: Hopper.
//
//   S = Q Kᵀ;  P = exp(mask(scale S) - m);  O = Σ P V / l                                Milakov & Gimelshein 2018
//
// A CTA owns tile_q rows of one head, mostly all, and shared memory has all keys and values of their sequence: copies
// are asked for two tiles ahead, each lands on a barrier of its own, and no buffer of keys is written twice (but see
// short/ring.cuh: where all keys would leave room for one CTA, tiles pass through two buffers). One to
// three warpgroups share what landed; each takes 64 rows at a time, and their keys in as few products as registers
// allow. Sums of a tile and scores of the next run beside each other, but nothing beside the end of 64 rows: the next
// scores there slow it by more than they take (measured). Queries that have a buffer of their own are asked for behind
// the first scores:
//
//   TMA      Q0 K0 V0 K1 V1 Q1                     a group with two row tiles of two kv tiles each
//   wgmma    | S00 |         | O00 S01 |         | O01 |         | S10 |         | O10 S11 | ...
//   softmax        |   P00   |         |   P01   |     |  store  |     |   P10   |
//
// Where shared memory has no room for all of Q, a group's queries follow each other in as many buffers as cost no CTA
// (q_stages); or in one, while those of the rows in hand lie in registers (keeps_queries). Then sums of a tile run
// beside the powers of the next (runs_ahead), but for wide heads.
//
// A class token, or what a length leaves behind its last 64 rows, would take a group as long as 64: up to 16 such rows
// have a warp of their own, which multiplies them by mma.sync beside the group (short/last_rows.cuh). Of a product with
// all keys, warps spare the powers of those that a mask hides, 64 at a time.
//
// What hides a CTA's latencies is the CTAs beside it: there is no loading warp, no schedule and no counter. Where one
// product of each kind makes a tile, CTAs are persistent: what the next tile needs is asked for in the place of what
// has been read, while this one goes on (short/persistent.cuh). The softmax is exact (common/online_softmax.cuh), its
// maximum taken before its powers.
//
// Bound: memory up to some 100 tokens, then a CTA's own latencies; docs/kernels/attention_short_sm90.md counts them.
//
// NaN and infinity in V reach rows that do not see them, as 0 * NaN: where a sum is not finite the CTA computes its
// rows again in passes (common/passes.cuh), from values that it loads again and rewrites. What lies behind the last key
// of a packed sequence is a neighbour's, and may lead there.
//
// Chapters, in short/: cta (what all warps know, and which tiles a group multiplies), load, softmax, output, compute,
// last_rows, persistent, ring. The entry is here.
//
// Refused (forward/sm90_short.cpp has the words): score programs, masks that are no range of keys, dropout, caches,
// sums in f32, what TMA cannot read, longer sequences.
#pragma once

#include "ptx/base.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params_sm90.h"
#include "shared/forward_spec.h"
#include "sm90/short/cta.cuh"
#include "sm90/short/persistent.cuh"
#include "sm90/short/ring.cuh"

namespace fovea::cuda::sm90 {
/// num_warps * 32 threads, a CTA for each tile of rows of a head; persistent: as many as run at once, or fewer.
template <Sm90ShortSpec spec, class Mods>
FOVEA_DEVICE void attention_forward_short(const Sm90ShortParams& p) {
  using namespace short_keys;
  const RoleWarp self{ptx::dynamic_shared(), ptx::warp_idx(), ptx::lane_idx()};
  if constexpr (spec.is_persistent) {
    run_persistent<spec, Mods>(self, p);
  } else if constexpr (spec.kv_buffers > 0) {
    const Cta<spec> cta{self, p, work_of_cta<spec>(p.common)};
    if (cta.work.is_nothing) return;
    run_ring<Mods>(cta);
  } else {
    run_tile<Mods>(Cta<spec>{self, p, work_of_cta<spec>(p.common)});
  }
}

}  // namespace fovea::cuda::sm90
