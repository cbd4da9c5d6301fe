// The kernels that round Q, K and V to four bits before attention, and where in the workspace they leave them. Read
// device/sm120/round_to_fp4.cuh for the kernels, sm120_fp4.hpp and sm100_fp4.hpp for who reads their records.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>

#include "cuda/device/shared/fp4.h"
#include "cuda/forward/candidates.hpp"
#include "cuda/forward/spec.hpp"
#include "cuda/kernel_set.hpp"
#include "cuda/spec_text.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {

template <>
struct SpecText<Fp4RoundingSpec> {
  static constexpr std::string_view kName = "Fp4RoundingSpec";
  using Base = void;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(Fp4RoundingSpec, element),
                                       FOVEA_SPEC_MEMBER(Fp4RoundingSpec, head_dim_qk),
                                       FOVEA_SPEC_MEMBER(Fp4RoundingSpec, head_dim_v),
                                       FOVEA_SPEC_MEMBER(Fp4RoundingSpec, group),
                                       FOVEA_SPEC_MEMBER(Fp4RoundingSpec, is_packed),
                                       FOVEA_SPEC_MEMBER(Fp4RoundingSpec, is_for_tensor_memory)};
};

/// What attention in four bits does not take, on whatever device multiplies them. Of a recipe that it computes.
std::optional<Refusal> refuses_four_bits(const ForwardProblem& problem, const DeviceTraits& device);

/// Channels as products have them: in steps of their depth.
std::int32_t fp4_head_dim(std::int64_t head_dim);
/// Neighbours that share a scale.
std::int32_t fp4_group(const Quantization& quant);

/// Of attention with this spec.
Fp4RoundingSpec fp4_rounding_spec(const ForwardSpec& attention, std::int32_t group,
                                  bool is_for_tensor_memory);
/// Sums of tiles, means, records, scores of means.
PlannedKernels fp4_rounding_kernels(const Fp4RoundingSpec& spec);

/// Sums, means, records and scores of means.
std::size_t fp4_bytes(const Fp4RoundingSpec& spec, const ForwardProblem& problem);
/// CTAs of the kernel that rounds: tiles of all operands.
std::int64_t num_fp4_tiles(const ForwardProblem& problem);

struct Fp4RoundingLaunch {
  Fp4RoundingParams params{};
  Fp4RoundingSpec spec{};

  void add_to(KernelLaunches& all) const;
};
/// `to` holds fp4_bytes, at a multiple of 256 as its parts are.
Fp4RoundingLaunch fp4_rounding_launch(const Fp4RoundingSpec& spec, const ForwardProblem& problem,
                                      const ForwardParams& call, void* to);

}  // namespace fovea::cuda
