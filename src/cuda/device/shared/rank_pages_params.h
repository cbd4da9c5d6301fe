// What the kernel that finds a rank's pages takes at the launch. cuda/pages/rank_pages.hpp fills and launches,
// device/common/rank_pages.cuh runs.
#pragma once

#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

/// Index tensors that are written, i32 and row-major; null: not wanted.
struct RankPagesPlaces {
  std::int32_t* seqlens;         // [batch] of whole sequences, new tokens among them
  std::int32_t* own_seqlens;     // [batch] of the rank's pages alone
  std::int32_t* append_seqlens;  // [batch] rows in use of the page that the first new token goes to
  std::int32_t* append_pages;    // [batch, num_append_pages] from that page on; -1: another rank's
  std::int32_t* positions_new;   // [batch, num_new]
  std::int32_t* positions_q;     // [batch, seqlen_q]
  std::int32_t num_append_pages;
};

struct RankPagesParams {
  RankPagesPlaces places;
  IndexParam seqlens;     // [batch] of whole sequences, before new tokens
  IndexParam page_table;  // [batch, table_width] the rank's pages
  std::int64_t page_table_row_stride;
  std::int32_t table_width, page_size;
  std::int32_t rank, num_ranks;
  std::int32_t batch, num_new, seqlen_q;
};

}  // namespace fovea::cuda
