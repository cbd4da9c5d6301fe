// A tensor of any dtype as kernels take it that serve all of them.
#pragma once

#include "cuda/device/shared/rows_param.h"
#include "cuda/params/tensor_params.hpp"

namespace fovea::cuda {

/// Dense or packed rows of f32, f16 or bf16.
inline RowsParam rows_param(const TensorView& tensor) {
  return {.rows = bshd(tensor),
          .element = element_of(tensor.dtype()),
          .is_aligned = is_aligned(tensor)};
}

}  // namespace fovea::cuda
