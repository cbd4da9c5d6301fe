// Attention backward by wgmma and TMA: Hopper.
//
//   P = exp(program(scale S) - lse);  dS = P (dout vᵀ - delta) program'
//   dv = Pᵀ dout;  dk = scale dSᵀ q;  dq = scale Σ dS k
//
// (Dao 2023, FlashAttention-2.) A CTA owns 128 keys of a head and walks over the tiles of queries that see them, of all
// q heads of its group. Two groups of 64 keys each hold dk and dv in registers; their scores are transposed, so that P
// and dS are operands in registers as they come. A third group sums dq: it multiplies dS, which the others leave in one
// of two buffers, with k, and adds fragments to f32 sums in memory. Its first warp loads.
//
//   load       | k q0 dout0 v | q1 dout1 | q2 dout2 | ...
//   wgmma  A   | S0 |  dP0 dv0   |  dk0 S1 |  dP1 dv1 ...        between: exponentials beside dP, dS beside dv
//   wgmma  B   | the same, on its own                            while A is at its exponentials
//   wgmma  dq  |                     dq0: columns 0..63, 64..127 | ...
//
// The groups never meet but at mbarriers, so one's exponentials run under another's products.
//
// Deltas are subtracted by the tensor cores: a row's delta as three 16-bit numbers, one more step of depth of dP
// (prepare_rows), for loads of shared memory are what there is no time for.
//
// Score programs are those of sm80's kernel, with their derivatives. With a slope gradients have weights of their own,
// P program', where dS will be. Registers are what bounds them (spares_registers): at head_dim 128 dv is computed
// before dP, at 64 a tile has 64 queries. With dropout P of dv is without what is dropped, weights are with it, and
// threads subtract deltas.
//
// Bound: the data path of shared memory. Of a block of 64 queries and 128 keys at head_dim 128, products take 2,560
// clocks and read 256 KB, 2,048 clocks; additions to memory pass there as well, 256 clocks, what lse and dS need
// another 300. Laboratory's best: 3,100 clocks a block.
//
// Deterministic (turns.cuh), a fourth group has the loading warp, which takes turns with CTAs of lower keys, and one
// that passes them on; then each thread of a group has 8 registers less.
//
// Who waits for whom: k_full, v_full, q_full, dout_full (bytes of TMA), stage_empty (each warp that owns keys has read
// q and dout), ds_full (those have stored dS), ds_empty (dq's warps have read it), turn (dq may be added to), added (it
// has been), passed (the next turn may be taken).
//
// NaN and infinity at pairs that a row does not see reach neither P nor dS; in q, dout and k of such a row or key they
// meet those zeros in products. Tiles of gradients that are not finite are named, and computed again by
// sm80/attention_backward (asks_redo).
//
// dq is written from its sums by the CTA that adds last, where that is known (last_tiles.cuh), else by a kernel behind
// this one. Each kernel of a call starts while the one before it ends, and waits by itself.
//
// Where dS is the gradient of a dense bias, groups of keys leave it in memory as they have it (stores_pairs), and
// sum_pairs sums it over sequences and heads.
//
// Chapters, in backward/: cta (what all roles know), load, key_gradients with probabilities, query_gradients, turns,
// last_tiles; around the kernel prepare_rows, finish_queries and sum_pairs. The entry is here.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/backward/cta.cuh"
#include "sm90/backward/key_gradients.cuh"
#include "sm90/backward/load.cuh"
#include "sm90/backward/query_gradients.cuh"
#include "sm90/backward/turns.cuh"

namespace fovea::cuda::sm90 {

/// By the first warp.
template <Sm90BackwardSpec spec>
FOVEA_DEVICE void start_backward(const BackwardCta<spec>& cta) {
  using T = BackwardTraits<spec>;
  constexpr int kOwners = 4 * T::kGroups;  // warps that own keys
  const OwnedTile tile =
      find_tile<spec.is_varlen, true>(cta.p.common, ptx::block_idx().x, T::kKeys);
  if (!ptx::elect_one()) return;
  for (const TensorMapParam* map : {&cta.p.q, &cta.p.k, &cta.p.v, &cta.p.dout})
    ptx::prefetch_tensormap(tensor_map(*map));
  cta.init_load_barriers(kOwners);
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(cta.barrier(T::kAt.ds_full, i), kOwners);
    ptx::mbarrier_init(cta.barrier(T::kAt.ds_empty, i), 4);
  }
  cta.init_turn_barriers();
  ptx::fence_mbarrier_init_release_cluster();
  cta.post_owned(tile);
}

/// num_warps * 32 threads, one CTA on an SM, one for each tile of keys of each kv head.
template <Sm90BackwardSpec spec, class Mods>
FOVEA_DEVICE void attention_backward(const Sm90BackwardParams& p) {
  using T = BackwardTraits<spec>;
  ptx::griddepcontrol_launch_dependents();
  const BackwardCta<spec> cta{{ptx::dynamic_shared(), ptx::warp_idx(), ptx::lane_idx()}, p};
  if (cta.warp == 0) start_backward<spec>(cta);
  if (cta.warp == 1) {
    for (int row = cta.lane; row < spec.tile_q; row += 32)
      ptx::st_shared(cta.smem + T::kAt.zeros + kDeltaBytes * row, ptx::U32x4{});
    ptx::fence_proxy_async_shared_cta();
  }
  ptx::griddepcontrol_wait();  // for who prepares the rows
  ptx::sync_threads();
  // Packed, grids are bounds.
  if (spec.is_varlen && ptx::vote_any(cta.owned().is_nothing != 0)) return;
  if (cta.warp < 4 * T::kGroups) {
    ptx::setmaxnreg_inc<T::kKeyRegisters>();
    KeyGradients<spec, Mods>(cta).run();
  } else if (!T::kHasAside || cta.warp < 12) {
    ptx::setmaxnreg_dec<T::kQueryRegisters>();
    QueryGradients<spec, Mods>(cta).run();
  } else {
    ptx::setmaxnreg_dec<T::kAsideRegisters>();
    if (cta.warp == 12) {
      with_load<spec, Mods>(cta, [&](auto& load) { TakeTurns<spec>(cta, load.keys).run(load); });
    }
    if (cta.warp == 13) PassTurns<spec>(cta).run();
  }
}

}  // namespace fovea::cuda::sm90
