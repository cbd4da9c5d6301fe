// Where the keys and rows of a call with a shared prefix lie: the index tensors that its two calls of attention read.
// src/problem/shared_prefix.hpp says what they are.
//
// Grid (x, 3): sequences, a thread each; groups, a CTA each, and one for the end of the last; rows, a warp each, where
// programs want to know them. Lengths, slots and pages lie on the device and are limited where they are read, so that a
// captured graph finds what they hold at its replay, and wrong numbers lead to no access outside of the tensors.
//
// Bound: latency; a few integers for each sequence, row and page of the prefix.
#pragma once

#include "common/packed_row.cuh"
#include "common/sequence.cuh"
#include "ptx/memory.cuh"
#include "shared/prefix_params.h"

namespace fovea::cuda {

inline constexpr CacheKind kAnyPrefix{true, true};

FOVEA_DEVICE void write_index(std::int32_t* tensor, std::int64_t i, std::int64_t value) {
  if (tensor == nullptr) return;
  ptx::st_global(tensor + i, static_cast<std::int32_t>(limited(value, 0, kMostCounted)));
}

FOVEA_DEVICE void write_suffix(const PrefixParams& p) {
  const std::int32_t i =
      static_cast<std::int32_t>(ptx::block_idx().x * ptx::block_dim().x + ptx::thread_idx().x);
  if (i >= p.batch) return;
  const CachedRows rows = cached_rows<kAnyPrefix>(p, i);
  const std::int64_t padding = std::int64_t{rows.begin} + p.num_keys - p.skipped_rows;
  const std::int64_t end = std::int64_t{rows.begin} + rows.count - p.skipped_rows;
  write_index(p.places.suffix_seqlens, i, end < padding ? padding : end);
  write_index(p.places.suffix_left_padding, i, padding);
}

FOVEA_DEVICE std::int64_t queries_before(const PrefixParams& p, std::int32_t sequence) {
  if (p.cu_seqlens_q.data != nullptr)
    return limited(index_at(p.cu_seqlens_q, sequence), 0, p.num_rows);
  return std::int64_t{sequence} * p.seqlen_q;
}

/// Where the entries of a sequence begin in the table or the list, and how many there are.
struct PageEntries {
  std::int64_t row, first;
  std::int32_t count;
};
FOVEA_DEVICE PageEntries entries_of(const PrefixParams& p, std::int32_t sequence) {
  if (p.page_indptr.data == nullptr) return {sequence * p.page_table_row_stride, 0, p.table_width};
  const PackedRows listed = packed_rows(p.page_indptr, sequence, p.num_listed);
  return {0, listed.begin, listed.count};
}

/// Entries behind those that it has are those of nothing.
FOVEA_DEVICE void copy_pages(const PrefixParams& p, std::int32_t group, std::int32_t sequence,
                             std::int32_t begin) {
  PageEntries entries{0, 0, 0};
  if (sequence < p.batch) entries = entries_of(p, sequence);
#pragma unroll 1
  for (std::int32_t i = ptx::thread_idx().x; i < p.places.num_pages; i += ptx::block_dim().x) {
    std::int64_t page = 0;
    if (i < entries.count - begin)
      page = index_at(p.page_table, entries.row, entries.first + begin + i);
    write_index(p.places.page_table, std::int64_t{group} * p.places.num_pages + i, page);
  }
}

FOVEA_DEVICE void write_group(const PrefixParams& p) {
  const auto group = static_cast<std::int32_t>(ptx::block_idx().x);
  if (group > p.num_groups) return;
  std::int32_t first = group == p.num_groups ? p.batch : 0;
  if (p.cu_sequences.data != nullptr)
    first = static_cast<std::int32_t>(limited(index_at(p.cu_sequences, group), 0, p.batch));
  const bool is_writer = ptx::thread_idx().x == 0;
  if (is_writer) write_index(p.places.cu_seqlens, group, queries_before(p, first));
  if (group == p.num_groups) return;
  const bool is_empty = first >= p.batch;
  std::int32_t padding = is_empty ? 0 : cached_rows<kAnyPrefix>(p, first).begin;
  if (p.places.page_table != nullptr) {
    const std::int32_t page = padding / p.page_size;
    copy_pages(p, group, first, page);
    padding -= page * p.page_size;
  }
  if (!is_writer) return;
  std::int64_t slot = first;
  if (!is_empty && p.slots.data != nullptr) slot = index_at(p.slots, first);
  write_index(p.places.slots, group, is_empty ? 0 : slot);
  write_index(p.places.prefix_left_padding, group, padding);
  write_index(p.places.prefix_seqlens, group, is_empty ? 0 : std::int64_t{padding} + p.num_keys);
}

FOVEA_DEVICE void write_row(const PrefixParams& p) {
  const std::int32_t row = static_cast<std::int32_t>(
      (ptx::block_idx().x * ptx::block_dim().x + ptx::thread_idx().x) / 32);
  if (p.places.rows == nullptr || row >= p.num_rows) return;
  std::int32_t sequence = 0;
  PackedRows queries{0, p.seqlen_q};
  if (p.cu_seqlens_q.data != nullptr) {
    sequence = sequence_of(p.cu_seqlens_q, p.batch, row);
    queries = packed_rows(p.cu_seqlens_q, sequence, p.num_rows);
  } else {
    sequence = row / p.seqlen_q;
    queries.begin = std::int64_t{sequence} * p.seqlen_q;
  }
  if (ptx::lane_idx() != 0) return;
  const auto q_idx = static_cast<std::int32_t>(row - queries.begin);
  ptx::U32x4 columns{0, 0, 0, 0};
  if (q_idx >= 0 && q_idx < queries.count) {
    const auto word = [](std::int32_t value) { return static_cast<std::uint32_t>(value); };
    columns = {word(sequence), word(q_idx), word(queries.count),
               word(cached_rows<kAnyPrefix>(p, sequence).count)};
  }
  ptx::st_global(reinterpret_cast<ptx::U32x4*>(p.places.rows) + row, columns);
}

FOVEA_DEVICE void prefix_places(const PrefixParams& p) {
  const std::uint32_t part = ptx::block_idx().y;
  if (part == 0) return write_suffix(p);
  if (part == 1) return write_group(p);
  write_row(p);
}

}  // namespace fovea::cuda
