// What a forward kernel takes at the launch. Strides are in elements, 64 bits; shapes stand beside their pointers. What
// index tensors hold is nobody's promise: beside them stands what it is limited to (common/sequence.cuh).
#pragma once

#include "shared/captures.h"
#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

struct ForwardParams {
  BshdParam q;    // [batch, seqlen_q, num_heads_q, head_dim_qk]
  BshdParam k;    // [batch, seqlen_kv, num_heads_kv, head_dim_qk]; paged: [page, slot, ...]
  BshdParam v;    // [batch, seqlen_kv, num_heads_kv, head_dim_v];  paged: [page, slot, ...]
  BshdParam out;  // [batch, seqlen_q, num_heads_q, head_dim_v], written
  // Rows start at multiples of 16 bytes and are contiguous; else they are read, or written, by elements.
  std::int32_t is_q_aligned, is_kv_aligned, is_out_aligned;

  float* lse;      // [batch, num_heads_q, seqlen_q], strides below; null: not wanted
  float* row_max;  // as lse
  std::int64_t lse_batch_stride, lse_head_stride, lse_row_stride;
  std::int64_t row_max_batch_stride, row_max_head_stride, row_max_row_stride;
  const float* sinks;  // [num_heads_q], null: none
  std::int64_t sinks_stride;

  IndexParam cu_seqlens_q;   // packed: [num_sequences + 1]
  IndexParam cu_seqlens_kv;  // packed: [num_sequences + 1]
  IndexParam seqlens_kv;     // [batch] rows in use of each sequence; null: seqlen_kv for all
  IndexParam left_padding;   // [batch] rows at the start that are no keys; null: none
  IndexParam slots;          // [batch] row of the cache of each sequence; null: its own
  IndexParam page_table;     // [batch, pages], rows page_table_row_stride apart; or a list of pages
  std::int64_t page_table_row_stride;
  // [batch + 1] where the pages of a sequence begin in the list; null: a table
  IndexParam page_indptr;
  std::int32_t num_listed;  // pages of the list
  std::int32_t capacity;    // rows that a sequence of the cache has room for, left padding included
  std::int32_t num_slots;   // of the cache; paged: pages. At least 1 where capacity is
  std::int32_t page_size;
  std::int32_t page_shift;    // log2 page_size, or -1
  std::int32_t num_new;       // keys that the call appended behind seqlens_kv
  IndexParam cu_seqlens_new;  // [num_sequences + 1] of them, packed; null: num_new of each sequence
  std::int64_t total_new;

  float* partial_out;  // split: [batch, num_heads_q, seqlen_q, max_splits, head_dim_v of the tile]
  float* partial_lse;  // split: [batch, num_heads_q, seqlen_q, max_splits], natural
  float* partial_max;  // split: likewise; where lse is huge, log of its sum instead (beside_lse)
  std::int32_t max_splits;

  std::int32_t num_sequences;        // dense: batch
  std::int32_t seqlen_q, seqlen_kv;  // of one sequence; packed: bounds
  std::int32_t fewest_queries;       // packed over a cache: sequences of fewer are another kernel's
  std::int64_t total_q;              // packed: rows of q, those after the last sequence too
  std::int64_t total_kv;             // packed: rows of k and v
  std::int32_t num_heads_q, num_heads_kv, group;
  std::int32_t head_dim_qk, head_dim_v;  // of the problem
  std::int32_t num_q_tiles;              // dense: of a sequence and head
  std::int32_t heads_per_section;        // pairs (batch, head unit) whose keys share the L2 cache
  float softmax_scale, softmax_scale_log2;

  float dropout_keep_scale;         // 1 / (1 - p), 0 for p = 1
  std::uint32_t dropout_threshold;  // a key is dropped where the counter's word is below
  std::uint32_t dropout_key[2];     // seed and offset, mixed (core/philox.hpp)
  // reads_dropout_seed: in place of the key, what is mixed, less what lies at these addresses
  const std::uint64_t* dropout_seed_at;
  const std::uint64_t* dropout_offset_at;
  std::uint64_t dropout_seed, dropout_offset;

  Captures captures;

  // has_dropout_places: [num_sequences + num_heads_q + seqlen_q + seqlen_kv]
  const std::int32_t* dropout_places;
};

}  // namespace fovea::cuda
