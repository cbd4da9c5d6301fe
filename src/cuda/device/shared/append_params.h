// What the append kernel takes at the launch. cuda/append/append_to_cache.hpp fills and launches,
// device/common/append_to_cache.cuh runs.
#pragma once

#include "shared/element.h"
#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

/// Rows of new tokens, and where they go.
struct TokenRows {
  BshdParam from;  // [batch, num_tokens, num_heads, head_dim], or packed [num_rows, ...]
  BshdParam to;    // the same; in a cache [slot or page, row, num_heads, head_dim]
  Element from_element, to_element;
  Codes codes;            // what `to` holds instead of elements
  ScaleParam scale;       // of them
  IndexParam cu_seqlens;  // [batch + 1], packed; null: num_tokens of each sequence
  std::int32_t num_rows;  // of all sequences
  std::int32_t num_tokens, num_heads, head_dim;
  std::int32_t is_cached;  // `to` is a cache
  std::int32_t is_turned;  // by the angles of their positions
  std::int32_t is_copied;  // by 16 bytes: neither turned nor converted, rows of both sides aligned
  // [batch, num_tokens], of packed tokens [num_rows]; null: the token's place in its sequence
  IndexParam positions;
  std::int64_t positions_row_stride;
};

struct AppendParams {
  TokenRows rows[3];  // one for each blockIdx.y: k, v, q
  std::int32_t batch;

  IndexParam seqlens;       // [batch] rows in use before the call
  IndexParam left_padding;  // [batch], null: none
  IndexParam slots;         // [batch], null: each its own
  IndexParam page_table;    // [batch, pages], or a list of pages; null: contiguous
  std::int64_t page_table_row_stride;
  IndexParam page_indptr;  // [batch + 1] where the pages of a sequence begin in the list
  std::int32_t num_listed;
  std::int32_t page_size;
  std::int32_t capacity;   // rows that a sequence has room for: none is written behind them
  std::int32_t num_slots;  // or pages: nothing is written to others
  std::int32_t num_new;
  IndexParam cu_seqlens_new;  // [batch + 1] of new tokens, packed; null: num_new of each sequence
  std::int64_t total_new;

  BshdParam cos, sin;  // [max_positions, num_pairs]: row and column strides
  std::int32_t max_positions;
  Element cos_element, sin_element;
  std::int32_t num_pairs;
  std::int32_t is_interleaved;  // pairs (2j, 2j + 1); else (j, j + num_pairs)
};

}  // namespace fovea::cuda
