// Attention backward by wgmma and TMA for head dims above 128: Hopper.
//
//   P = exp(program(scale S) - lse);  dS = P (dout vᵀ - delta) program'           Dao 2023, FlashAttention-2
//   owns keys      Sᵀ = K Qᵀ, dPᵀ = V doutᵀ    dv += Pᵀ dout, dk += dSᵀ Q    over the queries that see them
//   owns queries   S = Q Kᵀ,  dP = dout Vᵀ     dq += dS K                    over the keys that they see
//
// Two kernels, one text for what they share. At head_dim 256 sums of dk and dv of 64 keys are half of the registers of
// an SM, so a tile of keys cannot be wider; and a walk that adds dq to memory would add 64 KB for each 64 x 64 pairs,
// 25 bytes a clock of a rate of 17. So dq has a walk of its own: S and dP are computed twice, 7 products for 5, nothing
// is added to memory, and bits depend on the sequence alone, without turns.
//
// Keys: a group has dv and P, the other dk and dS; weights go from one to the other through shared memory, thread to
// thread, for fragments of both are the same. So each has one sum of 128 registers, and neither waits for itself:
//
//   load        | k q0 v dout0 | dout1 q1 | ...
//   group dv    | S0 |    | dv0 S1 |     | dv1 S2 | ...     between: exponentials
//   group dk    | dP0 |      | dk0 dP1 |     | dk1 dP2 | ...     between: dS, when P is there
//
// Queries: a group has 64 queries, all of their sums; what one is at between products runs under the other's:
//
//   load        | q k0 dout v0 | k1 v1 | ...
//   each group  | S0 dP0 |    | dq0 S1 dP1 |    | dq1 S2 dP2 | ...
//
// Bound: tensor cores. 64 x 64 pairs at head_dim 256 take 2,048 clocks of them for keys and 1,536 for queries, where 5
// products would be 2,560. Shared memory is read for 1,640 and 1,280 of these. docs/kernels/attention_backward_sm90.md
// has the budget.
//
// Who waits for whom: owned_qk_full, owned_v_full, qk_full, v_full (bytes of TMA), qk_empty, v_empty (each warp that
// multiplies has read them), passed_full (warps of dv have stored weights), passed_empty (those of dk have read them).
//
// NaN and infinity at pairs that a row does not see reach neither P nor dS; in the rows of such pairs they meet zeros
// in products. Tiles of gradients that are not finite are named, and computed again by sm80/attention_backward
// (asks_redo).
//
// Chapters, in backward/wide/: cta (what all roles know), load, pairs (a score on its way back, sums on their way out),
// keys, queries; clear_words runs ahead. The entry is here.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/backward/wide/cta.cuh"
#include "sm90/backward/wide/keys.cuh"
#include "sm90/backward/wide/load.cuh"
#include "sm90/backward/wide/queries.cuh"

namespace fovea::cuda::sm90 {

/// By one thread.
template <Sm90WideBackwardSpec spec>
FOVEA_DEVICE void start_wide_backward(const WideCta<spec>& cta) {
  using T = WideTraits<spec>;
  constexpr int kWarps = 8;  // that multiply
  for (const TensorMapParam* map : {&cta.p.q, &cta.p.k, &cta.p.v, &cta.p.dout})
    ptx::prefetch_tensormap(tensor_map(*map));
  ptx::mbarrier_init(cta.barrier(T::kAt.owned_qk_full, 0), 1);
  ptx::mbarrier_init(cta.barrier(T::kAt.owned_v_full, 0), 1);
  for (int i = 0; i < spec.stages; ++i) {
    ptx::mbarrier_init(cta.barrier(T::kAt.qk_full, i), 1);
    ptx::mbarrier_init(cta.barrier(T::kAt.qk_empty, i), kWarps);
  }
  for (int i = 0; i < spec.v_stages; ++i) {
    ptx::mbarrier_init(cta.barrier(T::kAt.v_full, i), 1);
    ptx::mbarrier_init(cta.barrier(T::kAt.v_empty, i), kWarps);
  }
  if constexpr (spec.owns_keys) {
    for (int i = 0; i < kSm90WidePassed; ++i) {
      ptx::mbarrier_init(cta.barrier(T::kAt.passed_full, i), kWarps / 2);
      ptx::mbarrier_init(cta.barrier(T::kAt.passed_empty, i), kWarps / 2);
    }
  }
  ptx::fence_mbarrier_init_release_cluster();
}

/// num_warps * 32 threads, one CTA on an SM, one for each tile of keys of each kv head, or of queries of each q head.
template <Sm90WideBackwardSpec spec, class Mods>
FOVEA_DEVICE void attention_backward_wide(const Sm90WideBackwardParams& p) {
  using T = WideTraits<spec>;
  ptx::griddepcontrol_launch_dependents();
  const WideCta<spec> cta{
      {ptx::dynamic_shared(), ptx::warp_idx(), ptx::lane_idx()},
      p,
      find_tile<spec.is_varlen, spec.owns_keys>(p.common, ptx::block_idx().x, spec.tile_owned)};
  if (cta.warp == 8 && ptx::elect_one()) start_wide_backward<spec>(cta);
  ptx::griddepcontrol_wait();  // for who knows the rows
  ptx::sync_threads();
  // Packed, grids are bounds.
  if (spec.is_varlen && ptx::vote_any(cta.owned.is_nothing)) return;
  if (cta.warp >= 8) {
    ptx::setmaxnreg_dec<T::kLoadRegisters>();
    if (cta.warp == 8) WideLoad<spec, Mods>(cta).run();
    return;
  }
  ptx::setmaxnreg_inc<T::kGroupRegisters>();
  if constexpr (!spec.owns_keys) {
    WideDq<spec, Mods>(cta).run();
  } else if (cta.warp < 4) {
    WideDv<spec, Mods>(cta).run();
  } else {
    WideDk<spec, Mods>(cta).run();
  }
}

}  // namespace fovea::cuda::sm90
