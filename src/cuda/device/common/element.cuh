// Elements of f32, f16 and bf16 as floats, one by one. Where the dtype is a constant, so is the branch.
#pragma once

#include "ptx/base.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "shared/element.h"

namespace fovea::cuda {

/// Of memory that no thread of the grid writes.
FOVEA_DEVICE float load_element(const void* data, Element element, std::int64_t at) {
  if (element == Element::f32) return ptx::ld_global_nc(static_cast<const float*>(data) + at);
  const std::uint32_t bits = ptx::ld_global_nc(static_cast<const std::uint16_t*>(data) + at);
  return element == Element::bf16 ? ptx::f32_of_bf16_lo(bits) : ptx::f32_of_f16_lo(bits);
}

/// Rounded to nearest even.
FOVEA_DEVICE void store_element(void* data, Element element, std::int64_t at, float value) {
  if (element == Element::f32) {
    ptx::st_global(static_cast<float*>(data) + at, value);
    return;
  }
  const std::uint32_t bits =
      element == Element::bf16 ? ptx::cvt_bf16x2(value, 0.0F) : ptx::cvt_f16x2(value, 0.0F);
  ptx::st_global(static_cast<std::uint16_t*>(data) + at, static_cast<std::uint16_t>(bits));
}

}  // namespace fovea::cuda
