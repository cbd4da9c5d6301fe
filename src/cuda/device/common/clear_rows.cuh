// Packed rows behind the last sequence, which belong to nobody: out 0, lse -inf. For kernels whose grid counts
// sequences, not rows.
#pragma once

#include "common/element.cuh"
#include "common/online_softmax.cuh"
#include "common/sequence.cuh"
#include "ptx/base.cuh"
#include "ptx/memory.cuh"
#include "shared/clear_rows.h"

namespace fovea::cuda {

/// A CTA for each row of q.
FOVEA_DEVICE void clear_rows(const ClearRowsParams& p) {
  const std::int64_t row = ptx::block_idx().x;
  if (row < limited(index_at(p.cu_seqlens_q, p.num_sequences), 0, p.total_q)) return;
  const std::int32_t count = p.num_heads_q * p.head_dim_v;
#pragma unroll 1
  for (std::int32_t i = ptx::thread_idx().x; i < count; i += ptx::block_dim().x) {
    const std::int32_t head = i / p.head_dim_v;
    store_element(const_cast<void*>(p.out.data), p.out_element,
                  row * p.out.row_stride + head * p.out.head_stride +
                      (i - head * p.head_dim_v) * p.out.col_stride,
                  0.0F);
  }
  if (p.lse == nullptr) return;
#pragma unroll 1
  for (std::int32_t head = ptx::thread_idx().x; head < p.num_heads_q; head += ptx::block_dim().x)
    ptx::st_global(p.lse + head * p.lse_head_stride + row * p.lse_row_stride, -infinity());
}

}  // namespace fovea::cuda
