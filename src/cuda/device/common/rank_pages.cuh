// Caches whose pages are dealt over ranks in turn: page n of every sequence lies on rank n % num_ranks, in column
// n / num_ranks of that rank's table. What a rank's calls of attention and of append read, from lengths that lie on the
// device: a captured graph finds what they hold at its replay.
//
//   own keys of n      (n / page_size + num_ranks - 1 - rank) / num_ranks pages, and a part of one that is its own
//   new tokens         rows of a cache that begins with the page of the first of them; pages of other ranks are none
//                      (-1), whose rows append_to_cache does not write
//
// A warp for each sequence. Lengths and pages are limited where they are read: wrong numbers lead to no access outside
// of the tensors.
//
// Bound: latency; a few integers for each sequence and new token.
#pragma once

#include "common/sequence.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/rank_pages_params.h"

namespace fovea::cuda {

/// Of the first `seqlen` keys of a sequence.
FOVEA_DEVICE std::int32_t own_keys(const RankPagesParams& p, std::int32_t seqlen) {
  const std::int32_t full = seqlen / p.page_size;
  const std::int32_t rest = full % p.num_ranks == p.rank ? seqlen - full * p.page_size : 0;
  return (full + p.num_ranks - 1 - p.rank) / p.num_ranks * p.page_size + rest;
}

/// Where the rank has this page of a sequence; -1 where it has none.
FOVEA_DEVICE std::int32_t own_page(const RankPagesParams& p, std::int32_t sequence,
                                   std::int32_t page) {
  const std::int32_t column = page / p.num_ranks;
  if (page % p.num_ranks != p.rank || column >= p.table_width) return -1;
  const std::int64_t entry = index_at(p.page_table, sequence * p.page_table_row_stride, column);
  return static_cast<std::int32_t>(limited(entry, -1, kMostCounted));
}

FOVEA_DEVICE void write_length(std::int32_t* tensor, std::int32_t sequence, std::int32_t value) {
  if (tensor != nullptr && ptx::lane_idx() == 0) ptx::st_global(tensor + sequence, value);
}

/// first, first + 1, ... of a sequence's row.
FOVEA_DEVICE void write_positions(std::int32_t* tensor, std::int32_t sequence, std::int32_t count,
                                  std::int32_t first) {
  if (tensor == nullptr) return;
#pragma unroll 1
  for (std::int32_t i = ptx::lane_idx(); i < count; i += 32)
    ptx::st_global(tensor + std::int64_t{sequence} * count + i, first + i);
}

FOVEA_DEVICE void rank_pages(const RankPagesParams& p) {
  const auto sequence = static_cast<std::int32_t>(
      (ptx::block_idx().x * ptx::block_dim().x + ptx::thread_idx().x) / 32);
  if (sequence >= p.batch) return;
  const RankPagesPlaces& to = p.places;
  const auto before = static_cast<std::int32_t>(
      limited(index_at(p.seqlens, sequence), 0, kMostCounted - p.num_new));
  const std::int32_t after = before + p.num_new;
  const std::int32_t first_page = before / p.page_size;
  write_length(to.seqlens, sequence, after);
  write_length(to.own_seqlens, sequence, own_keys(p, after));
  write_length(to.append_seqlens, sequence, before - first_page * p.page_size);
  write_positions(to.positions_new, sequence, p.num_new, before);
  write_positions(to.positions_q, sequence, p.seqlen_q, after - p.seqlen_q);
#pragma unroll 1
  for (std::int32_t i = ptx::lane_idx(); i < to.num_append_pages; i += 32) {
    ptx::st_global(to.append_pages + std::int64_t{sequence} * to.num_append_pages + i,
                   own_page(p, sequence, first_page + i));
  }
}

}  // namespace fovea::cuda
