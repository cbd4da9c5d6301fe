// Attention in four bits on sm_100 and sm_103 on the host: what of recipes it takes, its groups, its launches. Read
// candidates.hpp for the table that it is a row of, round_to_fp4.hpp for the kernels before it,
// device/sm100/attention_fp4.cuh for it.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuda/device/shared/fp4_sm100.h"
#include "cuda/forward/candidates.hpp"
#include "cuda/forward/round_to_fp4.hpp"
#include "cuda/forward/sm90.hpp"
#include "cuda/params/tensor_maps.hpp"
#include "cuda/spec_text.hpp"

namespace fovea::cuda {

template <>
struct SpecText<Sm100Fp4Spec> {
  static constexpr std::string_view kName = "Sm100Fp4Spec";
  using Base = Sm90ForwardSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(Sm100Fp4Spec, scale_group)};
};

/// A call's parameters and grids.
struct Sm100Fp4Launch {
  Sm90Launch roles{};
  Fp4RoundingLaunch rounding{};
  Sm100Fp4Params params{};

  /// Range tables, the counter of row tiles, the kernels that round, the kernel, which starts while the last of them
  /// ends.
  KernelLaunches launches(const ForwardPlan& plan) const;
};

/// A row of the table of candidates.
struct Sm100ForwardFp4 {
  using Spec = Sm100Fp4Spec;

  static constexpr std::string_view kName = "cuda/sm100/attention_fp4";
  static constexpr std::string_view kHeader = "sm100/attention_fp4.cuh";
  static constexpr std::string_view kEntry = "sm100::attention_fp4";
  static constexpr std::string_view kParams = "Sm100Fp4Params";
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
  static Sm100Fp4Launch prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                                const AttentionForward& args, const GrownCache* cache,
                                void* workspace, const TensorMapEncoder& encode);
};

}  // namespace fovea::cuda
