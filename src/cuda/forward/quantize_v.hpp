// The kernel that rounds V to eight bits before attention, and where in the workspace it leaves it. Read
// device/common/quantize_v.cuh for the kernel, sm90_quantized.hpp for who reads its codes.
#pragma once

#include <cstddef>

#include "cuda/device/shared/quantize_v.h"
#include "cuda/forward/spec.hpp"
#include "cuda/kernel_set.hpp"
#include "cuda/params/tensor_maps.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {

template <>
struct SpecText<QuantizeVSpec> {
  static constexpr std::string_view kName = "QuantizeVSpec";
  using Base = void;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(QuantizeVSpec, element),
                                       FOVEA_SPEC_MEMBER(QuantizeVSpec, head_dim),
                                       FOVEA_SPEC_MEMBER(QuantizeVSpec, is_packed)};
};

/// For attention of this spec.
QuantizeVSpec quantize_v_spec(const ForwardSpec& attention);
PlannedKernel quantize_v_kernel(const QuantizeVSpec& spec);

/// Codes, then scales.
std::size_t quantized_v_bytes(const QuantizeVSpec& spec, const ForwardProblem& problem);

struct QuantizeVLaunch {
  QuantizeVParams params{};
  QuantizeVSpec spec{};
  unsigned num_ctas = 0;  // 0: there are no keys, or V is not rounded

  void add_to(KernelLaunches& all) const;
};
/// `to` holds quantized_v_bytes, at a multiple of 256 as its parts are.
QuantizeVLaunch quantize_v_launch(const QuantizeVSpec& spec, const ForwardProblem& problem,
                                  const ForwardParams& call, void* to);

/// The codes as TMA takes them, a tile in a box.
TensorMapParam map_of_value_codes(const TensorMapEncoder& encode, const QuantizeVLaunch& launch);

}  // namespace fovea::cuda
