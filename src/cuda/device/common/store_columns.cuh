// Four neighbouring columns of a row of the output, rounded to its elements.
#pragma once

#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "shared/element.h"
#include "shared/tensor_params.h"

namespace fovea::cuda {

template <Element element>
FOVEA_DEVICE std::uint32_t pack_halves(float lo, float hi) {
  return element == Element::bf16 ? ptx::cvt_bf16x2(lo, hi) : ptx::cvt_f16x2(lo, hi);
}

/// Of rows of 16-bit elements: can four columns that begin at a multiple of four be stored at once? at: of the row's
/// first, in elements.
FOVEA_DEVICE bool has_plain_columns(const BshdParam& out, std::int64_t at) {
  const auto* const row = static_cast<const std::uint16_t*>(out.data) + at;
  return out.col_stride == 1 && reinterpret_cast<std::uint64_t>(row) % 8 == 0;
}
template <Element element>
FOVEA_DEVICE void store_plain_columns(std::uint16_t* to, const ptx::F32x4& values) {
  ptx::st_global(reinterpret_cast<ptx::U32x2*>(to),
                 ptx::U32x2{pack_halves<element>(values.x, values.y),
                            pack_halves<element>(values.z, values.w)});
}

/// at: of the first, in elements. num_left: columns of the row from there on.
template <Element element>
FOVEA_DEVICE void store_columns(const BshdParam& out, std::int64_t at, int num_left,
                                const ptx::F32x4& values) {
  if constexpr (element == Element::f32) {
    auto* const to = static_cast<float*>(const_cast<void*>(out.data)) + at;
    const float columns[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < num_left) ptx::st_global(to + i * out.col_stride, columns[i]);
  } else {
    auto* const to = static_cast<std::uint16_t*>(const_cast<void*>(out.data)) + at;
    const std::uint32_t lo = pack_halves<element>(values.x, values.y);
    const std::uint32_t hi = pack_halves<element>(values.z, values.w);
    const bool is_whole = num_left >= 4 && out.col_stride == 1;
    if (is_whole && reinterpret_cast<std::uint64_t>(to) % 8 == 0) {
      ptx::st_global(reinterpret_cast<ptx::U32x2*>(to), ptx::U32x2{lo, hi});
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= num_left) return;
      ptx::st_global(to + i * out.col_stride,
                     static_cast<std::uint16_t>((i < 2 ? lo : hi) >> (i % 2 * 16)));
    }
  }
}

}  // namespace fovea::cuda
