// What the kernel that finds the places of a shared prefix takes at the launch. cuda/prefix/prefix_places.hpp fills and
// launches, device/common/prefix_places.cuh runs.
#pragma once

#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

/// Index tensors that are written, i32 and row-major; null: not wanted.
struct PrefixPlacesParam {
  std::int32_t* prefix_seqlens;       // [groups]
  std::int32_t* prefix_left_padding;  // [groups]
  std::int32_t* slots;                // [groups]
  std::int32_t* page_table;           // [groups, num_pages]
  std::int32_t* cu_seqlens;           // [groups + 1]
  std::int32_t* suffix_seqlens;       // [batch]
  std::int32_t* suffix_left_padding;  // [batch]
  std::int32_t* rows;                 // [rows, 4]
  std::int32_t num_pages;
};

struct PrefixParams {
  PrefixPlacesParam places;
  std::int32_t batch, num_groups, num_rows;
  std::int32_t num_keys;      // of the prefix
  std::int32_t skipped_rows;  // of the cache, in front of what views of the suffix begin with

  IndexParam cu_sequences;  // [groups + 1], null: one group of all
  IndexParam cu_seqlens_q;  // [batch + 1], packed; null: seqlen_q queries of each sequence
  std::int32_t seqlen_q;

  // The cache, as in ForwardParams.
  IndexParam seqlens_kv;    // [batch] rows in use before the call's new tokens
  std::int32_t seqlen_kv;   // keys of a sequence at most
  IndexParam left_padding;  // [batch], null: none
  IndexParam slots;         // [batch], null: each its own
  IndexParam page_table;    // [batch, pages], or a list of pages; null: contiguous
  std::int64_t page_table_row_stride;
  IndexParam page_indptr;  // [batch + 1]
  std::int32_t num_listed;
  std::int32_t page_size;
  std::int32_t capacity;
  std::int32_t num_new;
  IndexParam cu_seqlens_new;  // [batch + 1], packed; null: num_new of each sequence
  std::int64_t total_new;
  std::int32_t table_width;  // entries of a row of the table; of a list num_listed
};

}  // namespace fovea::cuda
