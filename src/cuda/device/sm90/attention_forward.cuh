// Attention forward by wgmma and TMA: Hopper.
//
//   S = Q Kᵀ;  P = exp(mask(program(scale S)) - m);  O = Σ P V / l   Dao 2023 (FlashAttention-2), Shah et al. 2024 (-3)
//
// A CTA stays on its SM and works off tiles of rows. One warp loads Q, K, V by TMA, one stores finished tiles, and two
// or three warpgroups of 64 rows each compute. They take turns at the tensor cores ("ping-pong"), and each runs one
// software pipeline over all kv tiles of all its row tiles: a step issues the scores of the next kv tile and the sums
// of the last one, and does the softmax of the next while the sums run. The first kv tile of the next row tile is just
// another step, so short sequences have no gaps.
//
//   load     | Q0 K0 |  K1  V0 |  K2  V1 |  Q1 K0' V2 | ...
//   wgmma A  | S0 |      S1 O0 |           S2 O1 |           S0' O2 |
//   softmax A      | P0 |    ....  P1 |    ......    P2 |   store O |
//   wgmma B       | S0 |           S1 O0 |           S2 O1 | ...                      while A is in its softmax
//
// kv tiles are visited from the right, so that those with a mask come first; the softmax of the others needs no maximum
// (common/optimistic_softmax.cuh). A third warp claims row tiles and finds the kv tiles that each visits
// (common/tile_walk.cuh) while the tiles before are still computed; the loading warp posts beside each K tile what it
// is.
//
// Bound: tensor cores, 4096 flops a clock and SM; at head_dim 64 the exponentials, 9.4 softmax elements a clock beside
// a busy tensor core. Measured: 95 % of the first at head_dim 128 (docs/kernels/attention_forward_sm90.md).
//
// Who waits for whom: q_full, k_full, v_full (bytes of TMA), k_empty, v_empty (each consumer warp has read it), o_full
// (the warps of a group have put O where its Q lay), q_empty (that O is on its way), slot_full, slot_empty (which row
// tile comes next), group_full, group_empty (which kv tiles it visits, 32 at a time), claim (loading is near the end of
// a row tile: the next may be claimed), v_landed (values that are to be rewritten have arrived: the end of a paged
// sequence cuts them, or the row tile is computed again), round_done.
//
// Small values: powers are relative to a reference that may stand 80 octaves above the row's maximum, so sums may leave
// the range of floats below. Such row tiles go the way of the next paragraph, by the pass `low`.
//
// NaN and infinity: scores that a row does not see are replaced, so Q and K are harmless. In V they are not (0 * NaN).
// Row tiles with sums that are not finite are on a list, and behind its last row tile the CTA computes those again, in
// passes (common/passes.cuh), by the same code: the loading warp rewrites values, the storing warp adds infinities to
// O. A pass over a row tile is a round, as all row tiles were the first one, and behind it all warps wait for each
// other. Nearly always there is one.
//
// Packed sequences: tensors are one long sequence to TMA, and a row tile brings where its own sequence lies
// (SequencePlace, beside it in the slot). Keys behind the sequence's end are a neighbour's, masked as those behind the
// last key are. Rows that a sequence's end cuts off are a neighbour's too: the storing warp writes such a tile row by
// row.
//
// Head dims from 65 to 96 lie in panels of 32 columns and the narrower swizzle, which is as free of conflicts: three
// quarters of the products that 128 take.
//
// Pages: to TMA a page is an entry of the tensor's last dimension, and a tile is loaded box by box, each in one page.
// The loading warp reads the page table, a lane each box, one kv tile ahead; boxes behind the last key have page -1,
// which TMA fills with zeros and does not read. In the page that the end cuts, K is masked, and of V the loading warp
// clears the rows behind the end: whatever lay there, it does not reach the sums.
//
// Contiguous caches: to TMA a slot is an entry of the last dimension, and a sequence begins at any row of it. Values
// behind its end are cleared.
//
// Few rows: heads of a group share a tile of 64 rows, which one warpgroup computes, with as many buffers of K and V as
// shared memory holds: memory is the bound. A row tile is one split of a sequence's keys then; its partial states go to
// memory for common/combine, which starts beside the last CTAs and waits for them. Of packed queries over a cache the
// box of a sequence may end with rows of the next one: nobody asks for those.
//
// Selected tiles: where a mask selects tiles of 64 rows by a table (expr/position_steps.hpp), those are the tiles. A
// CTA is one warpgroup with a walk and buffers of its own, and an SM has two or three of them, which hide each other's
// softmax as groups do: the bound is what L2 gives, 32 KB for each tile of 64 x 64 at head_dim 128.
//
// Codes of eight bits in the place of Q and K: panels of bytes, products of integers, scales beside them
// (forward/code_scores.cuh). K becomes codes in a launch before (common/quantize_kv.cuh), Q where it has arrived
// (forward/query_codes.cuh). Lab book: docs/kernels/attention_quantized_sm90.md.
//
// row_max asks for the maximum of every tile: all are careful. Dropout takes its probabilities out of P, rounded
// already.
//
// What TMA cannot read, two warps copy (copy_cp_async.cuh): pages of any size, pages that keys begin inside of, strides
// that TMA does not have. Their output is written row by row.
//
// Caches of codes: a warpgroup behind those that compute loads them, and makes numbers of 16 bits of them on their way
// into shared memory (copy_codes.cuh). Lab book: docs/kernels/attention_coded_sm90.md.
//
// Chapters, in forward/: cta (what all roles know), schedule, redo (row tiles computed again), load with copy_tma,
// copy_cp_async or copy_codes, compute with scores, code_scores, softcap and output, store. The entry is here.
//
// Refused (forward/sm90.cpp has the words): f32 inputs, rows that do not lie at multiples of 16 bytes, few rows that
// TMA cannot read.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/forward/compute.cuh"
#include "sm90/forward/cta.cuh"
#include "sm90/forward/load.cuh"
#include "sm90/forward/schedule.cuh"
#include "sm90/forward/store.cuh"
#include "sm90/forward/value_codes.cuh"

namespace fovea::cuda::sm90 {

template <Sm90ForwardSpec spec>
FOVEA_DEVICE void start_barriers(const Cta<spec>& cta) {
  using T = Traits<spec>;
  constexpr int kReaders = 4 * T::kGroups;  // warps that compute
  constexpr int kLoaders = T::kLoaders;
  if (cta.warp != 0 || !ptx::elect_one()) return;
  if constexpr (!spec.loads_by_cp_async) {
    for (const TensorMapParam* map : {&cta.p.q, &cta.p.k, &cta.p.v})
      ptx::prefetch_tensormap(tensor_map(*map));
    if constexpr (!T::kWritesSums) ptx::prefetch_tensormap(tensor_map(cta.p.out));
  }
  for (int i = 0; i < T::kQStages * T::kGroups; ++i) {
    ptx::mbarrier_init(cta.barrier(T::kAt.q_full, i), kLoaders);
    ptx::mbarrier_init(cta.barrier(T::kAt.q_empty, i), 1);
    ptx::mbarrier_init(cta.barrier(T::kAt.o_full, i), 4);
  }
  for (int i = 0; i < T::kStages; ++i) {
    ptx::mbarrier_init(cta.barrier(T::kAt.k_full, i), kLoaders);
    ptx::mbarrier_init(cta.barrier(T::kAt.k_empty, i), kReaders);
    ptx::mbarrier_init(cta.barrier(T::kAt.v_full, i), kLoaders);
    ptx::mbarrier_init(cta.barrier(T::kAt.v_empty, i), kReaders);
  }
  for (int i = 0; i < T::kSlots; ++i) {
    ptx::mbarrier_init(cta.barrier(T::kAt.slot_full, i), 1);
    ptx::mbarrier_init(cta.barrier(T::kAt.slot_empty, i),
                       kReaders + kLoaders + 1);  // and loading and storing warps
  }
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(cta.barrier(T::kAt.group_full, i), 1);
    ptx::mbarrier_init(cta.barrier(T::kAt.group_empty, i), kLoaders);
  }
  ptx::mbarrier_init(cta.barrier(T::kAt.claim, 0), 1);
  ptx::mbarrier_init(cta.barrier(T::kAt.v_landed, 0), 1);
  ptx::mbarrier_init(cta.barrier(T::kAt.round_done, 0), 32 * (kReaders + kLoaders + 1));
  for (int i = 0; i < 2; ++i) ptx::st_shared(cta.redo_list_at(i), std::int32_t{-1});
  ptx::st_shared(cta.smem + T::kAt.pass, static_cast<std::int32_t>(Pass::all));
  ptx::fence_mbarrier_init_release_cluster();
}

/// num_warps * 32 threads: as many CTAs as the SMs hold together, spec.ctas_per_sm each, or fewer.
template <Sm90ForwardSpec spec, class Mods>
FOVEA_DEVICE void attention_forward(const Sm90ForwardParams& p) {
  using T = Traits<spec>;
  const Cta<spec> cta{{ptx::dynamic_shared(), ptx::warp_idx(), ptx::lane_idx()}, p};
  start_barriers<spec>(cta);
  if constexpr (spec.sums_codes) write_rows_of_ones<spec>(cta);
  ptx::griddepcontrol_wait();  // for whoever clears the counter and builds range tables
  if constexpr (spec.is_split) ptx::griddepcontrol_launch_dependents();  // the combine kernel waits
  ptx::sync_threads();
  if (cta.warp < 4) {
    if constexpr (T::kTradesRegisters) ptx::setmaxnreg_dec<T::kLoadRegisters>();
    if constexpr (!spec.has_codes())
      if (cta.warp == 0 || (T::kLoaders == 2 && cta.warp == 3)) Load<spec>(cta).run();
    if (cta.warp == 1) Store<spec>(cta).run();
    if (cta.warp == 2) Schedule<spec, Mods>(cta).run();
    return;
  }
  if constexpr (spec.has_codes()) {
    if (cta.loader() >= 0) {
      ptx::setmaxnreg_dec<T::kCodeRegisters>();
      Load<spec>(cta).run();
      return;
    }
  }
  if constexpr (T::kTradesRegisters) ptx::setmaxnreg_inc<T::kComputeRegisters>();
  Compute<spec, Mods>(cta).run();
}

}  // namespace fovea::cuda::sm90
