// The kernels that round Q and K to eight bits before attention, and where in the workspace they leave them. Read
// device/common/quantize_qk.cuh for the kernel, sm90_quantized.hpp for who reads its codes.
#pragma once

#include <cstddef>

#include "cuda/device/shared/quantize_qk.h"
#include "cuda/forward/spec.hpp"
#include "cuda/kernel_set.hpp"
#include "cuda/params/tensor_maps.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {

template <>
struct SpecText<QuantizeQkSpec> {
  static constexpr std::string_view kName = "QuantizeQkSpec";
  using Base = void;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(QuantizeQkSpec, element),
                                       FOVEA_SPEC_MEMBER(QuantizeQkSpec, head_dim),
                                       FOVEA_SPEC_MEMBER(QuantizeQkSpec, is_packed)};
};

/// For attention of this spec.
QuantizeQkSpec quantize_qk_spec(const ForwardSpec& attention);
/// Means of keys, then codes.
PlannedKernels quantize_qk_kernels(const QuantizeQkSpec& spec);

/// Codes, then what is beside them.
std::size_t quantized_bytes(const QuantizeQkSpec& spec, const ForwardProblem& problem);

/// CTAs of the kernel, packed or not.
std::int64_t num_quantizing_ctas(const ForwardProblem& problem);

struct QuantizeQkLaunch {
  QuantizeQkParams params{};
  unsigned num_ctas = 0;  // of the second kernel; 0: there are no rows

  /// Of keys, of all sequences: CTAs of the first.
  unsigned num_heads() const {
    return static_cast<unsigned>(params.num_heads_kv * params.num_sequences);
  }

  /// The first kernel, and the second, which waits for what it is launched behind.
  void add_mean_to(KernelLaunches& all) const;
  void add_to(KernelLaunches& all) const;
};
/// `to` holds quantized_bytes, at a multiple of 256 as its parts are.
QuantizeQkLaunch quantize_qk_launch(const QuantizeQkSpec& spec, const ForwardProblem& problem,
                                    const ForwardParams& call, void* to);

/// The codes of one operand as TMA takes them, in boxes of `rows` rows of a head. Where there are no keys, queries, as
/// Operands::keys_or_queries has it.
enum class CodesOf : std::uint8_t { queries, keys };
TensorMapParam map_of_codes(const TensorMapEncoder& encode, const QuantizeQkSpec& spec,
                            const QuantizeQkParams& params, CodesOf operand, std::int64_t rows);

}  // namespace fovea::cuda
