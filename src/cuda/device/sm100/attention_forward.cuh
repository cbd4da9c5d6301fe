// Attention forward by tcgen05 and TMA: Blackwell (sm_100a, sm_103a).
//
//   S = Q Kᵀ;  P = exp(mask(program(scale S)) - m);  O = Σ P V / l   Dao 2023 (FlashAttention-2), Dao et al. 2026 (-4)
//
// A CTA stays on its SM and works off tiles of 256 rows, two groups of 128, or of one group. Scores, probabilities and
// sums are in tensor memory; one thread issues all products; the four warps of each group do its softmax, a thread each
// row. While one group is in its softmax the other one's products run:
//
//   tensor cores | S0 S1 |      O0 S0' | O1 S1' | O0 S0" | O1 S1" | ...
//   group 0             |  P0   |       |  P0'   |        |  P0"
//   group 1                |   P1     |        |  P1'   |        |
//
// Powers of full tiles are relative to a reference that needs no maximum (common/optimistic_softmax.cuh), so that O has
// to be scaled hardly ever: groups do that themselves, and no warps stand by for it.
//
// Tensor memory, 512 columns: S0 S1 (128 each), O0 O1 (head_dim_v each), P0 P1 (64 each) where there is room for them
// beside, up to head_dim 64; else P lies over the scores it was made of, which by then are in registers.
//
// Bound: tensor cores, 8192 flops a clock and SM: 1024 clocks for the 128 x 128 scores and their sums at head_dim 128.
// ex2 takes as many on sm_100, which is why some keys have their powers from a polynomial there (forward/row.cuh), and
// half as many on sm_103. Nothing here has run on a GPU: docs/kernels/attention_forward_sm100.md has what is expected,
// and what the emulator checks.
//
// Who waits for whom: q_full, k_full, v_full (bytes of TMA), q_empty, k_empty, v_empty (products that read them are
// complete; K also: each computing warp has read what is posted beside it), s_full (scores are there, and all sums of
// tiles before), p_full (P is there, and scores and sums have been read), o_full (a row tile's sums are), sums_done (P
// has been multiplied, where scores wait for that); the others as on Hopper (sm90/attention_forward.cuh).
//
// The rest is Hopper's: which row tile comes next and which kv tiles it visits (sm90/forward/schedule.cuh), how they
// are loaded (load.cuh, copy_tma.cuh), row tiles with NaN or infinity among their values computed again in passes
// (redo.cuh), packed sequences, dropout.
//
// Chapters, in forward/: cta (what all roles know), multiply, softmax with row and scores, output. The entry is here.
//
// One group alone where two have no room, above head_dim 128, or no rows: up to 128 queries; few rows, whose heads
// share the tile and whose keys are split among CTAs, with f32 partial states that common/combine joins. Products and
// softmax take turns then.
//
// Refused (forward/sm100.cpp has the words): f32 inputs, head dims above 256, codes, what TMA cannot read.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm100/forward/cta.cuh"
#include "sm100/forward/multiply.cuh"
#include "sm100/forward/softmax.cuh"
#include "sm90/forward/load.cuh"
#include "sm90/forward/schedule.cuh"

namespace fovea::cuda::sm100 {

template <Sm100ForwardSpec spec>
FOVEA_DEVICE void start_barriers(const Cta<spec>& cta) {
  using T = Traits<spec>;
  if (!ptx::elect_one()) return;
  for (const TensorMapParam* map : {&cta.p.q, &cta.p.k, &cta.p.v})
    ptx::prefetch_tensormap(sm90::tensor_map(*map));
  for (int i = 0; i < T::kGroups; ++i) {
    ptx::mbarrier_init(cta.barrier(T::kAt.q_full, i), 1);
    ptx::mbarrier_init(cta.barrier(T::kAt.q_empty, i), 1);
    ptx::mbarrier_init(cta.barrier(T::kAt.s_full, i), 1);
    ptx::mbarrier_init(cta.barrier(T::kAt.p_full, i), 4);
    ptx::mbarrier_init(cta.barrier(T::kAt.o_full, i), 1);
    ptx::mbarrier_init(cta.barrier(T::kAt.sums_done, i), 1);
  }
  for (int i = 0; i < T::kStages; ++i) {
    ptx::mbarrier_init(cta.barrier(T::kAt.k_full, i), 1);
    ptx::mbarrier_init(cta.barrier(T::kAt.k_empty, i), T::kReaders + 1);  // and a commit
    ptx::mbarrier_init(cta.barrier(T::kAt.v_full, i), 1);
    ptx::mbarrier_init(cta.barrier(T::kAt.v_empty, i), 1);
  }
  constexpr int kRoles = T::kReaders + 2;  // and loading and multiplying warps
  for (int i = 0; i < T::kSlots; ++i) {
    ptx::mbarrier_init(cta.barrier(T::kAt.slot_full, i), 1);
    ptx::mbarrier_init(cta.barrier(T::kAt.slot_empty, i), kRoles);
  }
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(cta.barrier(T::kAt.group_full, i), 1);
    ptx::mbarrier_init(cta.barrier(T::kAt.group_empty, i), 1);
  }
  ptx::mbarrier_init(cta.barrier(T::kAt.claim, 0), 1);
  ptx::mbarrier_init(cta.barrier(T::kAt.v_landed, 0), 1);
  ptx::mbarrier_init(cta.barrier(T::kAt.round_done, 0), 32 * kRoles);
  for (int i = 0; i < 2; ++i) ptx::st_shared(cta.redo_list_at(i), std::int32_t{-1});
  ptx::st_shared(cta.smem + T::kAt.pass, static_cast<std::int32_t>(Pass::all));
  for (int i = 0; i < T::kReaders; ++i) ptx::st_shared(cta.smem + T::kAt.slots_read + 4 * i, 0U);
  ptx::fence_mbarrier_init_release_cluster();
}

/// Loads; then waits until the last commits have arrived, which nobody else does: shared memory may be another CTA's
/// when this one has ended.
template <Sm100ForwardSpec spec>
FOVEA_DEVICE void load(const Cta<spec>& cta) {
  using T = Traits<spec>;
  sm90::Load<spec> load(cta);
  load.run();
  for (int i = 0; i < T::kGroups; ++i) cta.await(cta.barrier(T::kAt.q_empty, i), load.q.parity);
  for (int i = 0; i < T::kStages; ++i) {
    cta.await(cta.barrier(T::kAt.k_empty, load.k.stage), load.k.parity);
    cta.await(cta.barrier(T::kAt.v_empty, load.v.stage), load.v.parity);
    load.k.advance();
    load.v.advance();
  }
}

/// Multiplies; then gives tensor memory back: behind the last round all warps have met, so nobody reads it any more.
template <Sm100ForwardSpec spec>
FOVEA_DEVICE void multiply(const Cta<spec>& cta, const TensorMemory<spec>& memory) {
  Multiply<spec>(cta, memory).run();
  ptx::sync_warp();
  ptx::tcgen05_fence_after_thread_sync();
  ptx::tcgen05_dealloc<kSm100Columns>(memory.base);
}

template <Sm100ForwardSpec spec>
FOVEA_DEVICE Cta<spec> cta_of(const Sm90ForwardParams& p) {
  return {{ptx::dynamic_shared(), ptx::warp_idx(), ptx::lane_idx()}, p};
}

FOVEA_DEVICE Role role_of(int warp) { return static_cast<Role>(warp < 4 ? warp : 4); }

/// Barriers and tensor memory.
template <Sm100ForwardSpec spec>
FOVEA_DEVICE void start(const Cta<spec>& cta) {
  if (role_of(cta.warp) == Role::load) start_barriers<spec>(cta);
  if (role_of(cta.warp) == Role::multiply) {
    ptx::tcgen05_alloc<kSm100Columns>(cta.smem + Traits<spec>::kAt.tensor_memory);
    ptx::tcgen05_relinquish_alloc_permit();
  }
}

/// 65,536 registers: what the launch gives a thread, and what each role makes of it. One group has all that it could
/// take.
template <Sm100ForwardSpec spec>
struct Registers {
  static constexpr bool kAreTraded = Traits<spec>::kGroups > 1;
  /// Whoever finds row tiles in sequences of all lengths has more to keep.
  static constexpr int kOfService = Traits<spec>::kPostsPlace ? 56 : 40;
  static constexpr int kOfRows = Traits<spec>::kPostsPlace ? 224 : 232;
};

/// num_warps * 32 threads: as many CTAs as there are SMs, or fewer.
template <Sm100ForwardSpec spec, class Mods>
FOVEA_DEVICE void attention_forward(const Sm90ForwardParams& p) {
  using T = Traits<spec>;
  using R = Registers<spec>;
  start(cta_of<spec>(p));
  ptx::griddepcontrol_wait();  // for whoever clears the counter and builds range tables
  ptx::tcgen05_fence_before_thread_sync();
  ptx::sync_threads();
  ptx::tcgen05_fence_after_thread_sync();
  const Cta<spec> cta = cta_of<spec>(p);  // anew: held across the allocation its members spill
  const TensorMemory<spec> memory{{cta.word_at(cta.smem + T::kAt.tensor_memory)}};
  const Role role = role_of(cta.warp);
  if (role == Role::compute) {
    if constexpr (R::kAreTraded) ptx::setmaxnreg_inc<R::kOfRows>();
    Softmax<spec, Mods>(cta, memory).run();
  } else {
    if constexpr (R::kAreTraded) ptx::setmaxnreg_dec<R::kOfService>();
    if (role == Role::load) load<spec>(cta);
    if (role == Role::multiply) multiply<spec>(cta, memory);
    if (role == Role::schedule) sm90::Schedule<spec, Mods>(cta).run();
  }
}

}  // namespace fovea::cuda::sm100
