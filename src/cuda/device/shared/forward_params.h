// What a forward kernel takes at the launch. Strides are in elements, 64 bits; shapes stand beside their pointers.
#pragma once

#include "shared/captures.h"
#include "shared/types.h"

namespace fovea::cuda {

/// A tensor [batch, seqlen, heads, head_dim] (varlen: batch stride 0), head_dim contiguous.
struct BshdParam {
  const void* data;
  std::int64_t batch_stride, row_stride, head_stride;
};

struct ForwardParams {
  BshdParam q;  // [batch, seqlen_q, num_heads_q, head_dim_qk]
  BshdParam
      k;  // [batch, seqlen_kv, num_heads_kv, head_dim_qk]; paged: [page, slot, num_heads_kv, head_dim_qk]
  BshdParam
      v;  // [batch, seqlen_kv, num_heads_kv, head_dim_v];  paged: [page, slot, num_heads_kv, head_dim_v]
  BshdParam out;   // [batch, seqlen_q, num_heads_q, head_dim_v], written
  float* lse;      // strides below; written
  float* row_max;  // as lse; written
  std::int64_t lse_batch_stride, lse_head_stride, lse_row_stride;
  const float* sinks;         // [num_heads_q]
  const void* cu_seqlens_q;   // [num_sequences + 1] i32 or i64
  const void* cu_seqlens_kv;  // [num_sequences + 1]
  const void* seqlens_kv;     // [batch] keys of each sequence in the cache; null: seqlen_kv for all
  const void* cache_rows;  // [batch] row of the cache or page table of each sequence; null: its own
  const std::int32_t* page_table;  // [cache rows, pages per row]
  std::int64_t page_table_stride;
  std::int32_t page_size;

  float* partial_out;  // split: [split, batch, num_heads_q, seqlen_q, head_dim_v]
  float* partial_lse;  // split: [split, batch, num_heads_q, seqlen_q]
  std::int32_t
      keys_per_split;  // a multiple of tile_kv; a function of the sequence's own length only in its effect

  std::int32_t batch;                // sequences
  std::int32_t seqlen_q, seqlen_kv;  // of one sequence; varlen: bounds
  std::int64_t total_q;              // varlen: rows of q, those after the last sequence too
  std::int32_t num_heads_q, num_heads_kv, group;
  std::int32_t head_dim_qk, head_dim_v;  // of the problem
  float softmax_scale, softmax_scale_log2;

  float dropout_keep_scale;         // 1 / (1 - p)
  std::uint32_t dropout_threshold;  // keep where the counter's word is at least this
  std::uint64_t dropout_seed, dropout_offset;

  Captures captures;
};

}  // namespace fovea::cuda
