// What the kernel that rounds K, V and Q before attention is compiled for, and takes: common/quantize_kv.cuh.
#pragma once

#include "shared/element.h"
#include "shared/forward_params.h"
#include "shared/quantize_k.h"
#include "shared/quantize_q.h"
#include "shared/quantize_v.h"
#include "shared/rounding.h"
#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

struct QuantizeKvSpec {
  Element element = Element::bf16;  // of all operands
  // Of codes: 64 or 128, the problem's padded by zeros. Of v 0: it stays as it is.
  std::int32_t head_dim_qk = 128, head_dim_v = 0;
  bool is_packed = false;
  bool rounds_q = false;        // else attention does
  bool reads_elements = false;  // rows lie at any alignment, with any strides
  // In the place of codes the numbers that they stand for, as elements, for kernels that multiply those.
  bool writes_numbers = false;
  Rounding rounding = Rounding::rows;  // else no numbers are written, and Q is rounded
  // Rows of Q that share a scale: of each q_span neighbours those alike modulo q_step.
  std::int32_t q_span = 1, q_step = 1;
  // Keys that do: of each k_tile those that a lane holds, or all.
  std::int32_t k_tile = kQuantizedTile;
  bool has_k_lanes = true;
  KeyMean key_mean = KeyMean::sample;
  bool rotates = false;    // rows of Q and K, before they are rounded (quantize_k.h)
  bool smooths_v = false;  // the mean of all keys is taken from V before it is rounded
  bool centers_v = false;  // and nothing else is done to it: elements in the place of codes
  // Operands are codes of e4m3 already, which go to their places: Rounding::given, element bf16.
  bool takes_codes = false;
  // K and V lie in a cache, each as such codes, none: as elements. Kernels take QuantizeCacheParams then. `keeps_v`: V
  // is not rounded, and goes to its place as elements.
  bool is_cached = false, is_paged = false, has_packed_q = false;
  Codes k_codes = Codes::none, v_codes = Codes::none;
  bool keeps_v = false;
  // The greatest scale of a head's keys goes behind their mean: attention reads it, to know rows that are far from 0.
  bool keeps_greatest_scale = false;

  bool operator==(const QuantizeKvSpec&) const = default;
};

/// A kernel before it takes what codes of a tile need of the whole sequence: the mean of its keys, greatest magnitudes
/// of its values.
constexpr bool looks_at_sequences(const QuantizeKvSpec& spec) {
  return smooths_keys(spec.rounding);
}
constexpr bool has_channel_scales(const QuantizeKvSpec& spec) {
  return spec.rounding == Rounding::lanes && spec.head_dim_v > 0;
}
constexpr bool looks_at_values(const QuantizeKvSpec& spec) {
  return has_channel_scales(spec) || spec.smooths_v;
}

/// Elements, in the place of codes.
constexpr bool writes_values(const QuantizeKvSpec& spec) {
  return spec.head_dim_v > 0 && (spec.writes_numbers || spec.centers_v || spec.keeps_v);
}

struct QuantizeKvParams {
  QuantizeKParams k;
  QuantizeVParams v;
  QuantizeQParams q;
  // Of all sequences and heads, 0 where the operand is not rounded here: CTAs of Q, of V, then of K.
  std::int32_t num_tiles_of_q, num_tiles_of_v;
  // Words that become 0: attention notes there which rows it loses (lost_rows.h)
  std::uint32_t* notes;
  std::int64_t num_notes;
};

/// Where K and V lie in a cache: its call, and the scales of its codes.
struct QuantizeCacheParams : QuantizeKvParams {
  ForwardParams cache;
  ScaleParam k_scale, v_scale;
};

constexpr std::int32_t quantize_shared_bytes(const QuantizeKvSpec& spec) {
  const std::int32_t of_v = spec.head_dim_v > 0 ? quantize_v_shared_bytes(spec.head_dim_v) : 0;
  const std::int32_t of_q = spec.q_span > 1 ? kQuantizeQSharedBytes : 0;
  const std::int32_t of_rows = of_q > kQuantizeKSharedBytes ? of_q : kQuantizeKSharedBytes;
  return of_v > of_rows ? of_v : of_rows;
}

}  // namespace fovea::cuda
