// Eight neighbours of a row of a gradient, rounded and stored.
#pragma once

#include "common/element.cuh"
#include "common/element_pair.cuh"
#include "ptx/memory.cuh"
#include "shared/backward_params.h"

namespace fovea::cuda {

/// Eight neighbours of a row, `count` of which exist.
template <Element element>
FOVEA_DEVICE void store_eight(const GradientParam& to, std::int64_t at, bool is_aligned, int count,
                              const float (&x)[8]) {
  if (is_aligned && count == 8 && to.element == element) {
    ptx::st_global(reinterpret_cast<ptx::U32x4*>(
                       static_cast<std::uint16_t*>(const_cast<void*>(to.tensor.data)) + at),
                   ptx::U32x4{pair_of<element>(x[0], x[1]), pair_of<element>(x[2], x[3]),
                              pair_of<element>(x[4], x[5]), pair_of<element>(x[6], x[7])});
    return;
  }
  for (int i = 0; i < count; ++i)
    store_element(const_cast<void*>(to.tensor.data), to.element, at + i * to.tensor.col_stride,
                  x[i]);
}

/// Do rows lie at multiples of 16 bytes, their elements side by side?
FOVEA_DEVICE bool has_aligned_rows(const BshdParam& t) {
  return t.col_stride == 1 && reinterpret_cast<std::uint64_t>(t.data) % 16 == 0 &&
         (t.batch_stride | t.row_stride | t.head_stride) % 8 == 0;
}

}  // namespace fovea::cuda
