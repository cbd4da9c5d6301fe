// Multi-head latent attention over a cache: keys of 576 columns whose first 512 are the values, one memory for both,
// read once. Hopper.
//
//   S = Q Kᵀ;  P = exp(mask(program(scale S)) - m);  O = Σ P K[:, :512] / l            DeepSeek-V2 2024 (absorbed form)
//
// A CTA stays on its SM and takes one unit after the other: 64 rows (heads of a kv head side by side, of one query or
// of several) and one split of a sequence's keys. One warp loads tiles of 64 keys by TMA, 72 KB each, into two buffers;
// two warpgroups compute. A warpgroup cannot hold O of 64 rows and 512 columns, so each has half of the columns, and a
// buffer: of the tile that lies there it alone computes S and the softmax, and leaves P for both in the last 64 columns
// of the tile, which are no values and have been read. Then both multiply it with their halves of the tile:
//
//   load      | K0      | K1      |          | K2      |         | K3
//   group 0             | S0 P0   | O0                 | O1      | S2 P2  | O2
//   group 1                       | O0       | S1 P1   | O1                 O2  | S3 P3 ...
//
// While a group is in its softmax the other may multiply; m and what it rescales sums by goes from group to group with
// P, tile by tile, so a row's bits do not depend on which group had which tile.
//
// Bound: with few heads memory, 1,152 bytes a key. With 128 heads tensor cores: 64 rows of a tile are 64 * 64 * 2 *
// (576 + 512) flops, 2,176 clocks; two units share their keys through the L2 cache, 34 bytes a clock of each SM.
//
// Split boundaries follow from the sequence's own length (shared/split.h). Values behind the last key are cleared where
// they lie in shared memory; of other NaN and infinity in values, a row whose sums are not finite computes its split
// again, key by key (common rules: docs/design/contract.md).
//
// Chapters, in latent/:
//
//   cta.cuh       what follows from the spec, where things lie in shared memory, what the loading warp posts
//   load.cuh      which units a CTA has; queries and tiles of keys on their way in, pages too
//   scores.cuh    S, programs and softmax of one tile
//   compute.cuh   the walk of a group over its unit's tiles, and the unit's end
//
// Read common/careful_row.cuh for a row key by key, where values are NaN or infinity.
//
// Refused (sm90_decode_latent.cpp has the words): other head dims, values in a memory of their own, packed sequences,
// dropout, pages of sizes that are no multiples of 8, rows that do not lie at multiples of 16 bytes.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params_sm90.h"
#include "shared/forward_spec.h"
#include "sm90/latent/compute.cuh"
#include "sm90/latent/cta.cuh"
#include "sm90/latent/load.cuh"

namespace fovea::cuda::sm90 {

template <Sm90LatentSpec spec>
FOVEA_DEVICE void start_barriers(const latent::Cta<spec>& cta) {
  using L = latent::Layout<spec>;
  if (cta.warp != L::kComputingWarps || !ptx::elect_one()) return;
  for (const TensorMapParam* map : {&cta.p.q, &cta.p.k}) ptx::prefetch_tensormap(tensor_map(*map));
  for (int i = 0; i < L::kBuffers; ++i) {
    for (int part = 0; part < L::kParts; ++part) ptx::mbarrier_init(cta.full(i, part), 1);
    ptx::mbarrier_init(cta.barrier(L::kAt.p_full, i), 4);
    ptx::mbarrier_init(cta.barrier(L::kAt.empty, i), L::kComputingWarps);
  }
  for (int i = 0; i < L::kRecords; ++i) {
    ptx::mbarrier_init(cta.barrier(L::kAt.posted, i), 1);
    ptx::mbarrier_init(cta.barrier(L::kAt.read, i), L::kComputingWarps);
  }
  ptx::mbarrier_init(cta.barrier(L::kAt.q_full, 0), 1);
  ptx::mbarrier_init(cta.barrier(L::kAt.q_empty, 0), L::kComputingWarps);
  ptx::fence_mbarrier_init_release_cluster();
}

/// num_warps * 32 threads, one CTA on an SM: as many CTAs as there are SMs, or fewer.
template <Sm90LatentSpec spec, class Mods>
FOVEA_DEVICE void decode_latent(const Sm90LatentParams& p) {
  const latent::Cta<spec> cta{{ptx::dynamic_shared(), ptx::warp_idx(), ptx::lane_idx()}, p};
  ptx::griddepcontrol_launch_dependents();
  start_barriers<spec>(cta);
  cta.clear_rows_without_queries();
  ptx::sync_threads();
  using L = latent::Layout<spec>;
  if (cta.warp < L::kComputingWarps) {
    ptx::setmaxnreg_inc<L::kComputeRegisters>();
    latent::Compute<spec, Mods>(cta).run();
  } else {
    ptx::setmaxnreg_dec<L::kLoadRegisters>();
    if (cta.warp == L::kComputingWarps) latent::Load<spec, Mods>(cta).run();
  }
}

}  // namespace fovea::cuda::sm90
