// K and V rounded to eight bits before attention. Tiles of V come first: K waits for its mean, which a kernel before
// this one takes meanwhile. Attention waits for this kernel only, whose tiles of K have waited for that one. Read
// quantize_k.cuh and quantize_v.cuh, a tile each.
#pragma once

#include "common/quantize_k.cuh"
#include "common/quantize_v.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/warp.cuh"
#include "shared/quantize_kv.h"

namespace fovea::cuda {

template <QuantizeKvSpec spec>
FOVEA_DEVICE void mean_of_keys(const QuantizeKvParams& p) {
  QuantizeK<spec>{p.k}.run_mean();
}

template <QuantizeKvSpec spec>
FOVEA_DEVICE void quantize_kv(const QuantizeKvParams& p) {
  ptx::griddepcontrol_launch_dependents();
  const std::int32_t number = ptx::block_idx().x;
  if constexpr (spec.head_dim_v > 0) {
    if (number < p.num_tiles_of_v) return QuantizeV<spec>{p.v}.run(number);
  }
  QuantizeK<spec>{p.k}.run(number - p.num_tiles_of_v);
}

}  // namespace fovea::cuda
