// What attention of eight bits leaves of rows that it loses, for the kernel behind it (common/lost_rows.cuh): notes,
// which splits of a row may all set, or the scales of all rows.
#pragma once

#include "common/row_view.cuh"
#include "ptx/memory.cuh"
#include "shared/lost_rows.h"

namespace fovea::cuda {

/// Are rows of all sequences counted as one list?
template <auto spec>
inline constexpr bool kCountsPackedRows = spec.is_varlen || spec.has_packed_q;

/// The place of a row's bit. Rows behind the last sequence have none.
template <auto spec>
FOVEA_DEVICE std::int64_t number_of_row(const RowView<spec>& row) {
  const ForwardParams& p = row.p;
  if constexpr (kCountsPackedRows<spec>)
    return row.q_head * p.total_q + row.work.sequence.q_row + row.q_idx;
  return (row.work.sequence.q_batch * p.num_heads_q + row.q_head) * p.seqlen_q + row.q_idx;
}

template <auto spec>
FOVEA_DEVICE void note_lost_row(std::uint32_t* notes, const RowView<spec>& row) {
  if (!row.exists || row.work.sequence.is_trailing) return;
  const std::int64_t number = number_of_row(row);
  ptx::red_or_global(notes + 1 + number / 32, 1U << (number % 32));
  ptx::red_or_global(notes, 1U);
}

/// Of row q_idx of a sequence, the place of its scale.
template <auto spec>
FOVEA_DEVICE std::int64_t place_of_row_scale(const ForwardParams& p, std::int32_t sequence,
                                             std::int64_t q_row, std::int32_t q_head,
                                             std::int32_t q_idx) {
  constexpr bool kIsPacked = kCountsPackedRows<spec>;
  const std::int64_t of_list =
      num_row_scales(kIsPacked, p.num_sequences, kIsPacked ? p.total_q : p.seqlen_q);
  if constexpr (kIsPacked)
    return q_head * of_list + first_packed_tile(sequence, q_row) * kQuantizedTile + q_idx;
  return (std::int64_t{sequence} * p.num_heads_q + q_head) * of_list + q_idx;
}

FOVEA_DEVICE bool is_noted(const std::uint32_t* notes, std::int64_t number) {
  return (ptx::ld_global(notes + 1 + number / 32) >> (number % 32) & 1U) != 0;
}

}  // namespace fovea::cuda
