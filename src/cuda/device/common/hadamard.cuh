// The rotation of rows of Q and K before they are rounded, in registers. What it is, to the order of its operations,
// all of them f32: src/quant/hadamard.hpp.
//
//   x ← H (± x) / √block        H: sums and differences of channels 1, 2, 4, ... apart
//
// A thread holds eight neighbouring channels of a row. Those further apart are other lanes', which it asks by shuffles,
// or in another eight of its own (sm90/forward/query_codes.cuh).
#pragma once

#include "common/round_to_codes.cuh"
#include "ptx/math.cuh"
#include "ptx/warp.cuh"
#include "shared/quantize_k.h"

namespace fovea::cuda {

/// Of eight channels, the octet-th of the row.
FOVEA_DEVICE void flip_signs(const RotationParams& rotation, int octet, EightNumbers& x) {
  const std::uint32_t flipped = rotation.flipped[octet];
#pragma unroll
  for (int d = 0; d < 8; ++d) x[d] = (flipped >> d & 1U) != 0 ? -x[d] : x[d];
}

FOVEA_DEVICE void sum_and_difference(float& a, float& b) {
  const float sum = ptx::add_rn(a, b);
  b = ptx::add_rn(a, -b);
  a = sum;
}

/// Among a thread's eight.
FOVEA_DEVICE void mix_eight(const RotationParams& rotation, EightNumbers& x) {
#pragma unroll
  for (int apart = 1; apart < 8; apart *= 2) {
    if (apart >= rotation.block) return;
#pragma unroll
    for (int d = 0; d < 8; ++d)
      if ((d & apart) == 0) sum_and_difference(x[d], x[d + apart]);
  }
}

/// With lanes that hold neighbouring eights, as many as this power of two. All of them come here.
template <int lanes>
FOVEA_DEVICE void mix_lanes(const RotationParams& rotation, EightNumbers& x) {
  const int lane = ptx::lane_idx();
#pragma unroll
  for (int apart = 1; apart < lanes; apart *= 2) {
    if (8 * apart >= rotation.block) return;
    const bool is_upper = (lane & apart) != 0;
#pragma unroll
    for (int d = 0; d < 8; ++d) {
      const float other = ptx::shfl_bfly(x[d], apart);
      x[d] = ptx::add_rn(other, is_upper ? -x[d] : x[d]);
    }
  }
}

FOVEA_DEVICE void normalize(const RotationParams& rotation, EightNumbers& x) {
#pragma unroll
  for (int d = 0; d < 8; ++d) x[d] = ptx::mul_rn(x[d], rotation.factor);
}

/// A row that so many lanes hold, of which this one has the octet-th eight.
template <int lanes>
FOVEA_DEVICE void rotate(const RotationParams& rotation, int octet, EightNumbers& x) {
  flip_signs(rotation, octet, x);
  mix_eight(rotation, x);
  mix_lanes<lanes>(rotation, x);
  normalize(rotation, x);
}
template <int lanes>
FOVEA_DEVICE void rotate_back(const RotationParams& rotation, int octet, EightNumbers& x) {
  mix_eight(rotation, x);
  mix_lanes<lanes>(rotation, x);
  normalize(rotation, x);
  flip_signs(rotation, octet, x);
}

}  // namespace fovea::cuda
