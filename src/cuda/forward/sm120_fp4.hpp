// Attention in four bits on sm_120 on the host: what of recipes it takes, its tile, its launches. Read candidates.hpp
// for the table that it is a row of, round_to_fp4.hpp for the kernels before it, device/sm120/attention_fp4.cuh for it.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuda/device/shared/fp4.h"
#include "cuda/forward/candidates.hpp"
#include "cuda/forward/launch.hpp"
#include "cuda/forward/round_to_fp4.hpp"
#include "cuda/params/tensor_maps.hpp"
#include "cuda/spec_text.hpp"

namespace fovea::cuda {

template <>
struct SpecText<Fp4ForwardSpec> {
  static constexpr std::string_view kName = "Fp4ForwardSpec";
  using Base = ForwardSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(Fp4ForwardSpec, group)};
};

/// A call's parameters and grids.
struct Fp4Launch {
  ForwardLaunch common{};
  Fp4RoundingLaunch rounding{};
  Fp4Params params{};

  /// Range tables, the kernels that round, the kernel.
  KernelLaunches launches(const ForwardPlan& plan) const;
};

/// A row of the table of candidates.
struct Sm120ForwardFp4 {
  using Spec = Fp4ForwardSpec;

  static constexpr std::string_view kName = "cuda/sm120/attention_fp4";
  static constexpr std::string_view kHeader = "sm120/attention_fp4.cuh";
  static constexpr std::string_view kEntry = "sm120::attention_fp4";
  static constexpr std::string_view kParams = "Fp4Params";
  static constexpr bool kMultipliesByWgmma = false;
  static constexpr bool kIsChained = false;
  static constexpr bool kReadsNumbersOfCodes = false;

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
  static constexpr decltype(Candidate::reads) kReads = nullptr;
  static Fp4RoundingSpec rounding_spec(const Spec& spec);
  static std::size_t shared_bytes(const Spec& spec);
  static std::size_t scratch_bytes(const Spec& spec, const ForwardProblem& problem);
  static Fp4Launch prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                           const AttentionForward& args, const GrownCache* cache, void* workspace,
                           const TensorMapEncoder& encode);
};

}  // namespace fovea::cuda
