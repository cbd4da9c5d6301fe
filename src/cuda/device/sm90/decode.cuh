// Attention of few rows over many keys: decoding. What counts is how fast keys and values come from memory.
//
//   O = Σ_w exp(m_w - m) O_w,  l = Σ_w exp(m_w - m) l_w           over warps, then over splits (common/combine.cuh)
//
// A CTA stays on its SM and takes one split of the keys after the other: the rows of one kv head, heads of a group
// side by side, and 256 keys or more. Two warps find splits and load boxes of four slices of 16 keys by TMA (over
// pages of one), as far ahead as there are buffers, across the ends of splits. Eight warps each take the slices that
// come to their own slots, and compute what sm80/attention_forward computes: a warp has up to 16 rows, and sums of its
// own. Of 17 to 64 rows four warps are a warpgroup, and each of two takes every other box, of 64 keys. At the end of a
// split the sums are joined in the order of its slices; warpgroups exchange halves of theirs. Where a CTA has splits
// that follow each other, their states become one, or the rows of the output.
//
//   load 0, 1   split s: K0-3 V0-3 | K4-7 V4-7 | ... | K12-15 V12-15   split s+1: K0-3 V0-3 | ...     TMA
//   warp 0      S0 P0 O0 ........ S8 P8 O8 ............. \
//   warp 1      ... S1 P1 O1 ........ S9 P9 O9 .........  > meet, join, partial state
//   warp 7      ............ S7 P7 O7 ....... S15 P15 O15 /
//   combine     starts beside the last CTAs and waits for them (programmatic dependent launch)
//
// Bound: memory. 4.2 TB/s are 19 bytes a clock of each SM, and a byte is asked for some 800 ns before it comes, so 26
// KB must be under way on each SM; four buffers at head_dim 128 are 128 KB. A warp computes a slice of 8 KB in about
// 800 of the 3,500 clocks that memory takes for those of eight warps. mma.sync of 64 rows would take twice memory's
// time. A warpgroup takes some 1,650 clocks for a box of 64 keys beside the other one, whatever of its 64 rows is
// there, and memory as long for one of each; the end of a split takes each some 2,500 (measured with stamps).
//
// Split boundaries follow from the sequence's own length (shared/split.h), and which part a slice belongs to from its
// place in the split, so a row's bits do not depend on who else is in the batch. Values behind the last key are cleared
// where they lie in shared memory; of other NaN and infinity in V, a row whose sums are not finite computes its split
// again, key by key.
//
// Keys and values may be codes of 8 bits (sm90/decode_coded): half the bytes, so that slices are of 32 keys and boxes
// of 128 (over pages of 64). Their scales come beside them by cp.async; codes become operands in registers, of which
// those that compute get what a warpgroup of helpers leaves. Rows are eights there, one or two of a warp; of up to 32
// rows two warps take the same slices.
//
// Chapters, in decode/:
//
//   cta.cuh             where things lie in shared memory, what the loading warps post
//   box_walk.cuh        which boxes of keys the rows see, and which slices of them
//   load.cuh            which splits a CTA has; keys and values on their way in, pages too
//   scales.cuh          those of codes on their way in
//   queries.cuh         those of warpgroups on their way in
//   codes.cuh           slices of codes
//   group_products.cuh  products of a warpgroup
//   compute.cuh         slices, and what all warps' sums together are
//   fold.cuh            states of splits made one, in their order
//   unit.cuh            those of several splits of a CTA
//   group_rows.cuh      the same of two warpgroups' rows
//   cluster.cuh         those of a cluster's CTAs
//
// Read common/careful_row.cuh for a row key by key, where V holds NaN or infinity.
//
// Refused (sm90_decode.cpp has the words): f32, packed keys, more than 64 rows, head dims above 128, no more keys
// than one split has, and what TMA cannot read by slices: pages of other sizes than multiples of 8, rows that do not
// lie at multiples of 16 bytes; of codes head dims other than 64 and 128.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params_sm90.h"
#include "shared/forward_spec.h"
#include "sm90/decode/compute.cuh"
#include "sm90/decode/cta.cuh"
#include "sm90/decode/load.cuh"
#include "sm90/decode/queries.cuh"

namespace fovea::cuda::sm90 {

template <Sm90DecodeSpec spec>
FOVEA_DEVICE void start_barriers(const decoding::Cta<spec>& cta) {
  using L = decoding::Layout<spec>;
  if (cta.warp != L::kReaders || !ptx::elect_one()) return;
  for (const TensorMapParam* map : {&cta.p.k, &cta.p.v}) ptx::prefetch_tensormap(tensor_map(*map));
  for (int i = 0; i < L::kStages; ++i) {
    ptx::mbarrier_init(cta.barrier(L::kAt.full, i), L::kArrivals);
    ptx::mbarrier_init(cta.barrier(L::kAt.empty, i), L::kReadersOfBox);
    if constexpr (multiplies_by_wgmma(spec)) {
      ptx::mbarrier_init(cta.barrier(L::kAt.full_values, i), L::kArrivals);
      ptx::mbarrier_init(cta.barrier(L::kAt.empty_values, i), L::kReadersOfBox);
    }
  }
  for (int i = 0; i < L::kRecords; ++i) {
    ptx::mbarrier_init(cta.barrier(L::kAt.posted, i), 1);
    ptx::mbarrier_init(cta.barrier(L::kAt.read, i), L::kReaders + L::kQueryLoaders);
  }
  if constexpr (L::kQueryLoaders > 0) {
    ptx::prefetch_tensormap(tensor_map(cta.p.q));
    ptx::mbarrier_init(cta.barrier(L::kAt.queries_full, 0), 1);
    ptx::mbarrier_init(cta.barrier(L::kAt.queries_empty, 0), L::kReaders);
  }
  ptx::mbarrier_init(cta.barrier(L::kAt.joined, 0), L::kReaders);
  ptx::fence_mbarrier_init_release_cluster();
}

/// num_warps * 32 threads, one CTA on an SM: as many CTAs as there are SMs, or fewer.
template <Sm90DecodeSpec spec, class Mods>
FOVEA_DEVICE void decode(const Sm90DecodeParams& p) {
  const decoding::Cta<spec> cta{{ptx::dynamic_shared(), ptx::warp_idx(), ptx::lane_idx()}, p};
  if constexpr (is_clustered(spec)) ptx::barrier_cluster_arrive();  // this CTA has started
  if constexpr (spec.takes_groups) ptx::griddepcontrol_launch_dependents();
  using L = decoding::Layout<spec>;
  start_barriers<spec>(cta);
  if constexpr (L::kQueryLoaders > 0) {
    if (cta.warp == 0) decoding::QueryBoxes<spec>::clear_rest(cta);
  }
  ptx::sync_threads();
  if (cta.warp >= L::kReaders) {
    if constexpr (L::kTradesRegisters) ptx::setmaxnreg_dec<L::kHelperRegisters>();
    if (cta.warp < L::kReaders + L::kLoaders) {
      decoding::Load<spec, Mods>(cta).run();
    } else if (cta.warp < L::kReaders + L::kLoaders + L::kQueryLoaders) {
      if constexpr (L::kQueryLoaders > 0) decoding::LoadQueries<spec>(cta).run();
    }
    if constexpr (is_clustered(spec)) {
      ptx::sync_warp();  // one lane of it has loaded
      ptx::barrier_cluster_wait();
      ptx::barrier_cluster_arrive();
      ptx::barrier_cluster_wait();
    }
  } else {
    if constexpr (L::kTradesRegisters) ptx::setmaxnreg_inc<L::kReaderRegisters>();
    decoding::Reader<spec, Mods>(cta).run();
  }
}

}  // namespace fovea::cuda::sm90
