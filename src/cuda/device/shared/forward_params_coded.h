// What sm80/attention_coded takes at the launch.
#pragma once

#include "shared/forward_params.h"
#include "shared/tensor_params.h"

namespace fovea::cuda {

struct CodedParams {
  ForwardParams common;  // k and v: codes, strides in bytes
  ScaleParam k_scale, v_scale;
  // Rows of codes start at multiples of 16 bytes, are contiguous, and hold whole units of 16; else they are read byte
  // by byte.
  std::int32_t are_codes_aligned;
};

}  // namespace fovea::cuda
