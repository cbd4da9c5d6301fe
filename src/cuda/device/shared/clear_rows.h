// What common/clear_rows takes at the launch.
#pragma once

#include "shared/element.h"
#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

struct ClearRowsParams {
  BshdParam out;  // [total_q, num_heads_q, head_dim_v], written
  Element out_element;
  float* lse;  // [num_heads_q, total_q], strides below; null: not wanted
  std::int64_t lse_head_stride, lse_row_stride;
  IndexParam cu_seqlens_q;  // [num_sequences + 1]
  std::int32_t num_sequences;
  std::int32_t num_heads_q, head_dim_v;
  std::int64_t total_q;
};

}  // namespace fovea::cuda
