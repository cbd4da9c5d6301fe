// What the rotary kernel takes at the launch. cuda/rotary/rotary.hpp fills and launches, device/common/rotary.cuh runs.
#pragma once

#include "shared/element.h"
#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

struct RotaryParams {
  BshdParam x, out;  // [batch, seqlen, num_heads, head_dim], or packed [num_rows, ...]
  Element x_element, out_element;
  BshdParam cos, sin;  // [max_positions, num_pairs]: row and column strides
  Element cos_element, sin_element;
  IndexParam cu_seqlens;  // [batch + 1], packed; null: seqlen rows of each sequence
  IndexParam positions;   // [batch, seqlen], packed [num_rows]; null: of offsets, or from 0 on
  std::int64_t positions_row_stride;
  IndexParam offsets;  // [batch]; null: 0
  std::int32_t batch, seqlen, num_rows, num_heads, head_dim;
  std::int32_t max_positions, num_pairs;
  std::int32_t is_interleaved;  // pairs (2j, 2j + 1); else (j, j + num_pairs)
  std::int32_t is_conjugate;
  std::int32_t is_in_place;
};

}  // namespace fovea::cuda
