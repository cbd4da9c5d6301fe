// The roles of a CTA of Blackwell's forward kernels: barriers and tensor memory at the start, who does what, who gives
// back what at the end. Whose products and whose softmax they are, kernels say: ../attention_forward.cuh,
// ../attention_fp4.cuh.
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
#include "sm90/forward/load.cuh"
#include "sm90/forward/schedule.cuh"

namespace fovea::cuda::sm100 {

template <auto spec>
FOVEA_DEVICE void start_barriers(const Cta<spec>& cta) {
  using T = Traits<spec>;
  if (!ptx::elect_one()) return;
  if constexpr (!T::kHasRoundedTiles) {
    for (const TensorMapParam* map : {&cta.p.q, &cta.p.k, &cta.p.v})
      ptx::prefetch_tensormap(sm90::tensor_map(*map));
  }
  for (int i = 0; i < T::kGroups; ++i) {
    ptx::mbarrier_init(cta.barrier(T::kAt.q_full, i), 1);
    ptx::mbarrier_init(cta.barrier(T::kAt.q_empty, i), 1);
    ptx::mbarrier_init(cta.barrier(T::kAt.s_full, i), 1);
    ptx::mbarrier_init(cta.barrier(T::kAt.p_full, i), 4);
    ptx::mbarrier_init(cta.barrier(T::kAt.o_full, i), 1);
    if constexpr (!T::kGroupsShareScores) ptx::mbarrier_init(cta.barrier(T::kAt.sums_done, i), 1);
  }
  if constexpr (T::kGroupsShareScores) ptx::mbarrier_init(cta.barrier(T::kAt.s_read, 0), 4);
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
template <auto spec>
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
template <auto spec, class Products>
FOVEA_DEVICE void multiply(const Cta<spec>& cta, const TensorMemory<spec>& memory) {
  Multiply<spec, Products>(cta, memory).run();
  ptx::sync_warp();
  ptx::tcgen05_fence_after_thread_sync();
  ptx::tcgen05_dealloc<kSm100Columns>(memory.base);
}

template <auto spec>
FOVEA_DEVICE Cta<spec> cta_of(const Sm90ForwardParams& p) {
  return {{ptx::dynamic_shared(), ptx::warp_idx(), ptx::lane_idx()}, p};
}

FOVEA_DEVICE Role role_of(int warp) { return static_cast<Role>(warp < 4 ? warp : 4); }

/// Barriers and tensor memory.
template <auto spec>
FOVEA_DEVICE void start(const Cta<spec>& cta) {
  if (role_of(cta.warp) == Role::load) start_barriers<spec>(cta);
  if (role_of(cta.warp) == Role::multiply) {
    ptx::tcgen05_alloc<kSm100Columns>(cta.smem + Traits<spec>::kAt.tensor_memory);
    ptx::tcgen05_relinquish_alloc_permit();
  }
}

/// 65,536 registers: what the launch gives a thread, and what each role makes of it. One group has all that it could
/// take.
template <auto spec>
struct Registers {
  static constexpr bool kAreTraded = Traits<spec>::kGroups > 1;
  static constexpr int kOfService = Traits<spec>::kServiceRegisters;
  static constexpr int kOfRows = Traits<spec>::kRowRegisters;
};

/// num_warps * 32 threads: as many CTAs as there are SMs, or fewer.
template <auto spec, class Mods, class Products, class Softmax>
FOVEA_DEVICE void run_roles(const Sm90ForwardParams& p) {
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
    Softmax(cta, memory).run();
  } else {
    if constexpr (R::kAreTraded) ptx::setmaxnreg_dec<R::kOfService>();
    if (role == Role::load) load<spec>(cta);
    if (role == Role::multiply) multiply<spec, Products>(cta, memory);
    if (role == Role::schedule) sm90::Schedule<spec, Mods>(cta).run();
  }
}

}  // namespace fovea::cuda::sm100
