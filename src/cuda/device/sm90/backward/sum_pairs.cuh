// The gradient of a dense bias from dS, which sm90/attention_backward left for each sequence and head (PairTiles):
// their sum in f32, in the order of sequences and heads, rounded once into a tensor of any strides. A CTA for each tile
// of it of kPairQueries queries and kSm90BackwardKeys keys. Tiles that no CTA visited are not read.
//
// Sums that are not finite, in f16 because dS was too large for it, or because the kernel takes no score less its row's
// origin, are named, and computed again by sm80/captured_tiles.
//
// Bound: memory. 2 bytes are read for each pair of each sequence and head, and the gradient is written.
#pragma once

#include "common/backward_work.cuh"
#include "common/passes.cuh"
#include "common/store_eight.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/backward_params_sm90.h"
#include "shared/backward_spec_sm90.h"

namespace fovea::cuda::sm90 {

/// One thread of 256, which has the pieces that the thread of its number among the groups of keys has left.
template <Sm90BackwardSpec spec>
struct PairSums {
  static constexpr int kThreads = 32 * kSm90RowWarps;
  static constexpr int kPieces = kPairPieces / kThreads;  // of 16 queries each
  using Pieces = ptx::U32x4[kPieces];

  const SumPairsParams& p;
  const int thread;
  std::int32_t batch_place, head_place, key_tile, query_tile;
  float sums[8 * kPieces];

  FOVEA_DEVICE_MEMBER explicit PairSums(const SumPairsParams& params)
      : p(params), thread(ptx::thread_idx().x) {
    const std::int32_t query_tiles = ceil_div(p.to.num_q, kPairQueries);
    const std::int32_t key_tiles = ceil_div(p.to.num_kv, kSm90BackwardKeys);
    const std::int32_t id = ptx::block_idx().x;
    query_tile = id % query_tiles;
    key_tile = id / query_tiles % key_tiles;
    const std::int32_t place = id / query_tiles / key_tiles;
    head_place = place % p.to.num_heads;
    batch_place = place / p.to.num_heads;
  }

  FOVEA_DEVICE_MEMBER void run() {
#pragma unroll
    for (float& sum : sums) sum = 0;
    if (query_tile * kPairQueries < p.forward.seqlen_q &&
        key_tile * kSm90BackwardKeys < p.forward.seqlen_kv)
      add_all();
    if (ptx::vote_any(is_nan(zero_if_finite(sums)))) ask_redo();
    store();
  }

 private:
  FOVEA_DEVICE_MEMBER void add_all() {
    const std::int32_t first_batch = batch_place * p.to.sequences_per_place;
    const std::int32_t first_head = head_place * p.to.q_heads_per_place;
    const std::int32_t end_batch =
        least(first_batch + p.to.sequences_per_place, p.forward.num_sequences);
    const std::int32_t end_head = least(first_head + p.to.q_heads_per_place, p.forward.num_heads_q);
    for (std::int32_t batch = first_batch; batch < end_batch; ++batch) {
#pragma unroll 4
      for (std::int32_t head = first_head; head < end_head; ++head)
        add(pair_tile_at(p.forward, batch, head, key_tile, query_tile));
    }
  }

  FOVEA_DEVICE_MEMBER void add(std::int64_t tile) {
    if (ptx::ld_global(p.pairs.visited + tile) == 0) return;
    const auto* const from = static_cast<const ptx::U32x4*>(p.pairs.tiles) + tile * kPairPieces +
                             thread / 32 * (32 * kPieces) + thread % 32;
    Pieces pieces;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) pieces[i] = ptx::ld_global(from + 32 * i);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const std::uint32_t pairs[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[8 * i + 2 * j] += low_of<spec.element>(pairs[j]);
        sums[8 * i + 2 * j + 1] += high_of<spec.element>(pairs[j]);
      }
    }
  }

  /// Of the 64 keys of the thread's group.
  FOVEA_DEVICE_MEMBER void ask_redo() const {
    if (thread % 32 != 0) return;
    constexpr std::int32_t kKeys = kSm90BackwardKeys / 2;
    const std::int32_t query_tiles = ceil_div(p.to.num_q, kPairQueries);
    const std::int32_t place = batch_place * p.to.num_heads + head_place;
    const std::int64_t tile =
        (std::int64_t{place} * query_tiles + query_tile) * ceil_div(p.to.num_kv, kKeys) +
        2 * key_tile + thread / 128;
    ptx::atom_add_global(p.redo.tiles + tile, 1);
    ptx::atom_add_global(p.redo.any, 1);
  }

  /// Keys are neighbours in memory, and queries in a thread.
  FOVEA_DEVICE_MEMBER void store() const {
    const ptx::SharedAddress rows = ptx::dynamic_shared();
    const int key = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < 8 * kPieces; ++i) {
      const int query = 8 * (i / 4) + 2 * (thread % 4) + i % 2;
      ptx::st_shared(rows + 4 * (query * kSumPairsPitch + key + i / 2 % 2 * 8), sums[i]);
    }
    ptx::sync_threads();
    const DenseGradient& to = p.to;
    GradientParam gradient{};
    gradient.tensor = {to.data, to.batch_stride, to.q_stride, to.head_stride, to.kv_stride};
    gradient.element = to.element;
    const bool is_aligned = has_aligned_rows(gradient.tensor);
    const std::int32_t first_query = query_tile * kPairQueries;
    const std::int32_t left = least(kPairQueries, to.num_q - first_query);
    constexpr int kEights = kSm90BackwardKeys / 8;
#pragma unroll 1
    for (int at = thread; at < left * kEights; at += kThreads) {
      const std::int32_t first_key = key_tile * kSm90BackwardKeys + at % kEights * 8;
      const std::int32_t count = least(8, to.num_kv - first_key);
      if (count <= 0) continue;
      const ptx::SharedAddress from = rows + 4 * (at / kEights * kSumPairsPitch + at % kEights * 8);
      const auto lo = ptx::ld_shared<ptx::F32x4>(from);
      const auto hi = ptx::ld_shared<ptx::F32x4>(from + 16);
      const float x[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
      store_eight<spec.element>(gradient,
                                batch_place * to.batch_stride + head_place * to.head_stride +
                                    (first_query + at / kEights) * to.q_stride +
                                    first_key * to.kv_stride,
                                is_aligned, count, x);
    }
  }
};

/// 32 kSm90RowWarps threads, a CTA for each tile of the gradient; kSumPairsBytes of shared memory.
template <Sm90BackwardSpec spec, class Mods>
FOVEA_DEVICE void sum_pairs(const SumPairsParams& p) {
  ptx::griddepcontrol_wait();
  PairSums<spec>(p).run();
}

}  // namespace fovea::cuda::sm90
