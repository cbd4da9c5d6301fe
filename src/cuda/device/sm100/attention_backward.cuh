// Attention backward by tcgen05 and TMA: Blackwell (sm_100a, sm_103a).
//
//   P = exp(program(scale S) - lse);  dS = P (dout vᵀ - delta) program'
//   dv = Pᵀ dout;  dk = scale dSᵀ q;  dq = scale Σ dS k
//
// (Dao 2023, FlashAttention-2; Dao et al. 2026, -4.) A CTA owns 128 keys of a head and walks over the tiles of 128
// queries that see them, of all q heads of its group. Scores are transposed, keys in the lanes of tensor memory, so
// that P and dS are operands there as threads store them. One thread issues all products; eight warps compute, a thread
// for a key and half of a tile's queries; four add dQ to f32 sums in memory:
//
//   tensor cores | S1  dK0 dQ0 | dV1 dP1 | S2 | dK1 dQ1 | ...
//   compute      |    P1       |         dS1  |   P2
//   dQ           |             | read, add to memory
//
// Tensor memory, 512 columns: S and dP (128 each), dV and dK (head_dim each), and dQ, up to head_dim 64 in columns of
// its own, else over dP and dS. P lies over S, dS over dP; dS is in shared memory as well, for dQ.
//
// Bound at head_dim 128: shared memory. A tile of 128 x 128 is 2,560 clocks of products, and of 128 bytes a clock 2,048
// that they read, 256 of dS, 512 of additions to memory, 304 of lse and deltas: 3,120. Nothing here has run on a GPU:
// docs/kernels/attention_backward_sm100.md has what is expected, and what the emulator checks.
//
// Who waits for whom: k_full, v_full, q_full, dout_full (bytes of TMA), stage_empty (dK of the tile is complete, and
// each computing warp has read lse and deltas), s_full, dp_full, dq_full (products are complete), p_full, ds_full (each
// computing warp has stored them), dv_done, dk_done (products have read what lies in tensor memory), dq_empty (each
// adding warp has read dQ), sums_full (all products are complete), memory_read (nobody reads tensor memory any more).
//
// The rest is Hopper's, as it is (sm90/attention_backward.cuh): which tiles are visited and loaded (load.cuh), turns,
// so that dq has the same bits at every run (turns.cuh), f32 sums of dq as fragments of products of 64 x 64, and who
// writes dq from them (last_tiles.cuh, finish_queries.cuh), what is known of rows (prepare_rows.cuh), tiles that are
// computed again where NaN or infinity may have met a weight of 0.
//
// Chapters, in backward/: cta (what all roles know), multiply, key_gradients with probabilities, query_gradients. The
// entry is here.
//
// Refused (backward/sm100.cpp has the words): f32 inputs, head dims above 128, what TMA cannot read.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/cta.cuh"
#include "sm100/backward/key_gradients.cuh"
#include "sm100/backward/multiply.cuh"
#include "sm100/backward/query_gradients.cuh"
#include "sm90/backward/load.cuh"
#include "sm90/backward/turns.cuh"

namespace fovea::cuda::sm100 {

/// By the first warp.
template <Sm100BackwardSpec spec>
FOVEA_DEVICE void start_backward(const BackwardCta<spec>& cta) {
  using T = BackwardTraits<spec>;
  constexpr int kComputing = 4 * T::kGroups;  // warps
  constexpr int kAdding = 4;
  const OwnedTile tile =
      find_tile<spec.is_varlen, true>(cta.p.common, ptx::block_idx().x, T::kKeys);
  if (!ptx::elect_one()) return;
  for (const TensorMapParam* map : {&cta.p.q, &cta.p.k, &cta.p.v, &cta.p.dout})
    ptx::prefetch_tensormap(sm90::tensor_map(*map));
  cta.init_load_barriers(kComputing + 1);  // and a commit
  for (const int by_commit : {T::kAt.s_full, T::kAt.dp_full, T::kAt.dv_done, T::kAt.dk_done,
                              T::kAt.dq_full, T::kAt.sums_full})
    ptx::mbarrier_init(cta.barrier(by_commit, 0), 1);
  ptx::mbarrier_init(cta.barrier(T::kAt.p_full, 0), kComputing);
  ptx::mbarrier_init(cta.barrier(T::kAt.ds_full, 0), kComputing);
  ptx::mbarrier_init(cta.barrier(T::kAt.dq_empty, 0), kAdding);
  ptx::mbarrier_init(cta.barrier(T::kAt.memory_read, 0), kComputing + kAdding);
  cta.init_turn_barriers();
  ptx::fence_mbarrier_init_release_cluster();
  cta.post_owned(tile);
}

/// Loads, and takes turns; then waits until the last commits have arrived, which nobody else does: shared memory may be
/// another CTA's when this one has ended.
template <Sm100BackwardSpec spec, class Mods>
FOVEA_DEVICE void load_backward(const BackwardCta<spec>& cta) {
  using T = BackwardTraits<spec>;
  sm90::with_load<spec, Mods>(cta, [&](auto& load) {
    if constexpr (spec.is_deterministic) {
      sm90::TakeTurns<spec>(cta, load.keys).run(load);
    } else {
      load.begin();
      while (load.has_next()) load.load_next();
    }
    for (int i = 0; i < T::kStages; ++i) {
      cta.await(cta.barrier(T::kAt.stage_empty, load.stages.stage), load.stages.parity);
      load.stages.advance();
    }
  });
}

/// Tensor memory is given back when all have read theirs.
template <Sm100BackwardSpec spec>
FOVEA_DEVICE void multiply_backward(const BackwardCta<spec>& cta,
                                    const BackwardTensorMemory<spec>& memory) {
  MultiplyBackward<spec>(cta, memory).run();
  cta.await(cta.barrier(BackwardTraits<spec>::kAt.memory_read, 0), 0);
  ptx::tcgen05_fence_after_thread_sync();
  ptx::tcgen05_dealloc<kSm100Columns>(memory.base);
}

/// num_warps * 32 threads, one CTA on an SM, one for each tile of keys of each kv head.
template <Sm100BackwardSpec spec, class Mods>
FOVEA_DEVICE void attention_backward(const Sm90BackwardParams& p) {
  using T = BackwardTraits<spec>;
  ptx::griddepcontrol_launch_dependents();
  const BackwardCta<spec> cta{{ptx::dynamic_shared(), ptx::warp_idx(), ptx::lane_idx()}, p};
  const BackwardRole role = backward_role_of(cta.warp);
  if (cta.warp == 0) start_backward<spec>(cta);
  if (role == BackwardRole::multiply) {
    ptx::tcgen05_alloc<kSm100Columns>(cta.smem + T::kAt.tensor_memory);
    ptx::tcgen05_relinquish_alloc_permit();
  }
  ptx::griddepcontrol_wait();  // for who prepares the rows
  ptx::tcgen05_fence_before_thread_sync();
  ptx::sync_threads();
  ptx::tcgen05_fence_after_thread_sync();
  const BackwardTensorMemory<spec> memory{{cta.word_at(cta.smem + T::kAt.tensor_memory)}};
  // Packed, grids are bounds.
  if (spec.is_varlen && ptx::vote_any(cta.owned().is_nothing != 0)) {
    if (role == BackwardRole::multiply) ptx::tcgen05_dealloc<kSm100Columns>(memory.base);
    return;
  }
  if (role == BackwardRole::compute) {
    ptx::setmaxnreg_inc<T::kComputeRegisters>();
    KeyGradients<spec, Mods>(cta, memory).run();
  } else if (role == BackwardRole::add) {
    ptx::setmaxnreg_inc<T::kQueryRegisters>();
    QueryGradients<spec>(cta, memory).run();
  } else {
    ptx::setmaxnreg_dec<T::kServiceRegisters>();
    if (role == BackwardRole::load) load_backward<spec, Mods>(cta);
    if (role == BackwardRole::multiply) multiply_backward<spec>(cta, memory);
    if (spec.is_deterministic && role == BackwardRole::pass) sm90::PassTurns<spec>(cta).run();
  }
}

}  // namespace fovea::cuda::sm100
