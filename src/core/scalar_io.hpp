// One element of a float tensor, read or written as fp32: for the places where speed does not matter.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fovea/dtype.hpp"

namespace fovea {

/// index is in elements. dtype is f32, f16 or bf16.
inline float load_scalar(const std::byte* data, Dtype dtype, std::int64_t index) {
  switch (dtype) {
    case Dtype::f16:
      return static_cast<float>(reinterpret_cast<const float16*>(data)[index]);
    case Dtype::bf16:
      return static_cast<float>(reinterpret_cast<const bfloat16*>(data)[index]);
    default:
      return reinterpret_cast<const float*>(data)[index];
  }
}

inline void store_scalar(std::byte* data, Dtype dtype, std::int64_t index, float value) {
  switch (dtype) {
    case Dtype::f16:
      reinterpret_cast<float16*>(data)[index] = float16(value);
      return;
    case Dtype::bf16:
      reinterpret_cast<bfloat16*>(data)[index] = bfloat16(value);
      return;
    default:
      reinterpret_cast<float*>(data)[index] = value;
  }
}

}  // namespace fovea
