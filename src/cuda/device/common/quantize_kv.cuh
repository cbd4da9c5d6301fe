// K and V rounded to eight bits before attention, and Q where attention reads codes of it. Tiles of V come before those
// of Q and K: those wait for the mean of K, which a kernel before this one takes meanwhile; V waits too, where that one
// takes scales of channels, or V's mean. Attention waits for this kernel only, whose tiles of K have waited for that
// one. Read quantize_k.cuh, quantize_v.cuh and quantize_q.cuh, a tile each.
#pragma once

#include "common/quantize_k.cuh"
#include "common/quantize_q.cuh"
#include "common/quantize_v.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/warp.cuh"
#include "shared/quantize_kv.h"

namespace fovea::cuda {

/// What kernels of this spec take.
template <QuantizeKvSpec spec, bool is_cached = spec.is_cached>
struct QuantizeParams {
  using Type = QuantizeKvParams;
  FOVEA_DEVICE OperandRows<spec, spec.k_codes> keys(const Type&) { return {}; }
  FOVEA_DEVICE OperandRows<spec, spec.v_codes> values(const Type&) { return {}; }
};
template <QuantizeKvSpec spec>
struct QuantizeParams<spec, true> {
  using Type = QuantizeCacheParams;
  FOVEA_DEVICE OperandRows<spec, spec.k_codes> keys(const Type& p) { return {p.cache, p.k_scale}; }
  FOVEA_DEVICE OperandRows<spec, spec.v_codes> values(const Type& p) {
    return {p.cache, p.v_scale};
  }
};

/// By all CTAs.
FOVEA_DEVICE void clear_notes(const QuantizeKvParams& p) {
  const std::int64_t step = std::int64_t{ptx::grid_dim().x} * kQuantizeThreads;
#pragma unroll 1
  for (std::int64_t i = std::int64_t{ptx::block_idx().x} * kQuantizeThreads + ptx::thread_idx().x;
       i < p.num_notes; i += step)
    ptx::st_global(p.notes + i, 0U);
}

template <QuantizeKvSpec spec>
FOVEA_DEVICE void mean_of_keys(const typename QuantizeParams<spec>::Type& p) {
  using Params = QuantizeParams<spec>;
  ptx::griddepcontrol_launch_dependents();  // they wait for the mean
  clear_notes(p);
  std::int32_t number = ptx::block_idx().x;
  if constexpr (looks_at_values(spec)) {
    const std::int32_t num_heads = p.k.num_heads_kv * p.k.num_sequences;
    if (number < num_heads) return QuantizeV<spec>{p.v, Params::values(p)}.run_look(number);
    number -= num_heads;
  }
  QuantizeK<spec>{p.k, Params::keys(p)}.run_mean(number);
}

template <QuantizeKvSpec spec>
FOVEA_DEVICE void quantize_kv(const typename QuantizeParams<spec>::Type& p) {
  using Params = QuantizeParams<spec>;
  ptx::griddepcontrol_launch_dependents();
  std::int32_t number = ptx::block_idx().x;
  if constexpr (spec.head_dim_v > 0) {
    if (number < p.num_tiles_of_v) return QuantizeV<spec>{p.v, Params::values(p)}.run(number);
    number -= p.num_tiles_of_v;
  }
  if constexpr (spec.rounds_q) {
    if (number < p.num_tiles_of_q) return QuantizeQ<spec>{p.q, {p.k}}.run(number);
    number -= p.num_tiles_of_q;
  }
  QuantizeK<spec>{p.k, Params::keys(p)}.run(number);
}

}  // namespace fovea::cuda
