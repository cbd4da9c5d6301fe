// f32 sums of a gradient, rounded once into the tensor that is wanted: of any dtype and strides.
//
// Bound: memory. A CTA for each row of all its heads; neighbouring threads have neighbouring elements.
#pragma once

#include "common/element.cuh"
#include "ptx/base.cuh"
#include "ptx/memory.cuh"
#include "shared/backward_params.h"

namespace fovea::cuda {

FOVEA_DEVICE void convert_gradient(const ConvertParams& c) {
  const std::int64_t row = ptx::block_idx().x;
  const std::int64_t batch = row / c.rows_per_batch;
  const std::int64_t in_batch = row - batch * c.rows_per_batch;
  const std::int32_t count = c.num_heads * c.head_dim;
  const float* const sums = c.sums + batch * c.batch_stride + in_batch * c.row_stride;
  const BshdParam& to = c.to.tensor;
  const std::int64_t first = batch * to.batch_stride + in_batch * to.row_stride;
#pragma unroll 4
  for (std::int32_t i = ptx::thread_idx().x; i < count; i += kConvertThreads) {
    const std::int32_t head = i / c.head_dim;
    const std::int32_t col = i - head * c.head_dim;
    const float sum = ptx::ld_global_nc(sums + head * c.head_stride + col);
    store_element(const_cast<void*>(to.data), c.to.element,
                  first + head * to.head_stride + col * to.col_stride, sum * c.factor);
  }
}

}  // namespace fovea::cuda
