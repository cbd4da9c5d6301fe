// sm80/attention_coded on the host: attention over a cache of codes. Read sm80.hpp for its tiles,
// device/sm80/attention_coded.cuh for the kernel.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuda/device/shared/forward_params_coded.h"
#include "cuda/forward/sm80.hpp"

namespace fovea::cuda {

template <>
struct SpecText<CodedSpec> {
  static constexpr std::string_view kName = "CodedSpec";
  using Base = TeamSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(CodedSpec, k_codes),
                                       FOVEA_SPEC_MEMBER(CodedSpec, v_codes)};
};

/// Why tensor cores cannot multiply what the codes of a cache become.
std::optional<Refusal> refuses_codes(const ForwardProblem& problem, const DeviceTraits& device);
/// Of kernels whose lanes have whole parts of a row of codes.
std::optional<Refusal> refuses_rows_of_codes(const ForwardProblem& problem);

/// A call's parameters and grids.
struct CodedLaunch {
  CodedParams params{};
  ForwardLaunch common{};

  KernelLaunches launches(const ForwardPlan& plan) const;
};

/// A row of the table of candidates.
struct Sm80Coded {
  using Spec = CodedSpec;
  static constexpr std::string_view kName = "cuda/sm80/attention_coded";
  static constexpr std::string_view kHeader = "sm80/attention_coded.cuh";
  static constexpr std::string_view kEntry = "sm80::attention_coded";
  static constexpr std::string_view kParams = "CodedParams";
  static constexpr bool kMultipliesByWgmma = false;
  static constexpr bool kIsChained = false;
  static constexpr bool kReadsNumbersOfCodes = false;

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
  static constexpr decltype(Candidate::reads) kReads = nullptr;
  static std::size_t shared_bytes(const Spec& spec);
  static std::size_t scratch_bytes(const Spec& spec, const ForwardProblem& problem);
  static CodedLaunch prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                             const AttentionForward& args, const GrownCache* cache, void* workspace,
                             const TensorMapEncoder& encode);
};

}  // namespace fovea::cuda
