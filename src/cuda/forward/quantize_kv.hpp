// The kernels that round K, V and Q to eight bits before attention, and where in the workspace they leave them. Read
// device/common/quantize_kv.cuh for the kernels, sm90_quantized.hpp and sm80_quantized.hpp for who reads their codes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <tuple>

#include "core/ceil_div.hpp"
#include "cuda/device/shared/quantize_kv.h"
#include "cuda/forward/spec.hpp"
#include "cuda/kernel_set.hpp"
#include "cuda/params/tensor_maps.hpp"
#include "cuda/spec_text.hpp"
#include "problem/cache.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {

template <>
struct SpecText<QuantizeKvSpec> {
  static constexpr std::string_view kName = "QuantizeKvSpec";
  using Base = void;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(QuantizeKvSpec, element),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, head_dim_qk),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, head_dim_v),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, is_packed),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, rounds_q),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, reads_elements),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, writes_numbers),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, rounding),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, q_span),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, q_step),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, k_tile),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, has_k_lanes),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, key_mean),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, rotates),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, smooths_v),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, centers_v),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, takes_codes),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, is_cached),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, is_paged),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, has_packed_q),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, k_codes),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, v_codes),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, keeps_v),
                                       FOVEA_SPEC_MEMBER(QuantizeKvSpec, keeps_greatest_scale)};
};

/// Parts of a workspace begin at multiples of this.
inline constexpr std::int64_t kPartAlignment = 256;
constexpr std::size_t part_bytes(std::int64_t bytes) {
  return static_cast<std::size_t>(fovea::ceil_div(bytes, kPartAlignment) * kPartAlignment);
}

/// For attention of this spec: Hopper's, which rounds Q itself and whose operands TMA can read; sm_80's, whose lie
/// anywhere.
QuantizeKvSpec quantize_kv_spec(const Sm90ForwardSpec& attention);
QuantizeKvSpec quantize_kv_spec(const TeamSpec& attention, const Quantization& quant);
/// For kernels of 16 bits: q and k as the numbers that their codes stand for; v too, where the recipe has codes of it.
QuantizeKvSpec quantize_numbers_spec(const ForwardProblem& problem);
/// Means of keys and of values, then codes.
PlannedKernels quantize_kv_kernels(const QuantizeKvSpec& spec);

/// Codes, and what is beside them.
std::size_t quantized_bytes(const QuantizeKvSpec& spec, const ForwardProblem& problem);

/// CTAs of the kernel that rounds, packed or not; of all operands.
std::int64_t num_quantizing_ctas(const ForwardProblem& problem);

/// From there on a kernel can start while the one before it ends.
inline constexpr int kFirstThatOverlaps = 90;

struct QuantizeKvLaunch {
  QuantizeCacheParams params{};  // of tensors, what they share with those
  QuantizeKvSpec spec{};
  unsigned num_ctas = 0;  // of the kernel that rounds; 0: there are no sequences
  bool overlaps = true;   // it starts while the kernel of means ends

  /// CTAs of the kernel that looks at whole sequences: of the means of keys of all sequences and heads, and as many for
  /// means or scales of channels of values.
  unsigned num_looking_ctas() const {
    const std::int64_t heads = std::int64_t{params.k.num_heads_kv} * params.k.num_sequences;
    return static_cast<unsigned>(looks_at_values(spec) ? 2 * heads : heads);
  }

  /// Those that a call gives, where the recipe wants such.
  void take_scales(const AttentionForward& args);

  /// The call over a cache, where the spec is of one.
  void take_cache(const ForwardParams& call, const KvCache& cache);

  void add_to(KernelLaunches& all) const;
};
/// `to` holds quantized_bytes, at a multiple of 256 as its parts are.
QuantizeKvLaunch quantize_kv_launch(const QuantizeKvSpec& spec, const ForwardProblem& problem,
                                    const ForwardParams& call, void* to);

/// The numbers that such a launch writes, in the shapes of the call's tensors.
struct RoundedTensors {
  TensorView q, k, v;  // v as given, where it has no codes
};
RoundedTensors rounded_tensors(const QuantizeKvLaunch& launch, const AttentionForward& args);
/// How a tensor of that shape lies: heads before rows, each of `width` elements.
TensorSpec rounded_spec(const TensorSpec& given, std::int64_t width);

/// The codes as TMA takes them, a tile in a box.
TensorMapParam map_of_key_codes(const TensorMapEncoder& encode, const QuantizeKvLaunch& launch);
TensorMapParam map_of_value_codes(const TensorMapEncoder& encode, const QuantizeKvLaunch& launch);
/// Or values that are not rounded, in boxes of a panel of `rows` rows.
TensorMapParam map_of_kept_values(const TensorMapEncoder& encode, const QuantizeKvLaunch& launch,
                                  std::int64_t rows, std::int64_t panel);

}  // namespace fovea::cuda
