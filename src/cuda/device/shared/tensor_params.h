// Tensors as kernels take them: an address and strides in elements.
#pragma once

#include "shared/types.h"

namespace fovea::cuda {

/// What kernels count in 32 bits, slots and positions of rows and keys, also rounded up to tiles of them.
inline constexpr std::int32_t kMostCounted = 0x7fffffff - 1023;

/// A tensor [batch, seqlen, heads, head_dim]; packed: batch stride 0.
struct BshdParam {
  const void* data;
  std::int64_t batch_stride, row_stride, head_stride, col_stride;
};

/// Scales of a cache of codes: one of each row and head, or one that several share, along which strides are 0. `slot`
/// is a row of the cache's first dimension: paged, a page.
struct ScaleParam {
  float* data;
  std::int64_t sequence_stride, slot_stride, row_stride, head_stride;
  std::int32_t are_of_rows;  // written with the rows
};

/// A tensor of one dimension of i32 or i64, in memory of the device; data may be null where it is optional.
struct IndexParam {
  const void* data;
  std::int64_t stride;
  std::int32_t is_wide;  // i64
};

}  // namespace fovea::cuda
