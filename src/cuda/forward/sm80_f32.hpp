// sm80/attention_forward_f32 on the host: what it takes, its tile, its parameters. Read candidates.hpp for the table
// that it is a row of, device/sm80/attention_forward_f32.cuh for the kernel.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuda/forward/candidates.hpp"
#include "cuda/forward/launch.hpp"
#include "cuda/spec_text.hpp"

namespace fovea::cuda {

template <>
struct SpecText<PlainSpec> {
  static constexpr std::string_view kName = "PlainSpec";
  using Base = ForwardSpec;
  static constexpr std::tuple<> kMembers{};
};

/// A row of the table of candidates.
struct Sm80ForwardF32 {
  using Spec = PlainSpec;

  static constexpr std::string_view kName = "cuda/sm80/attention_forward_f32";
  static constexpr std::string_view kHeader = "sm80/attention_forward_f32.cuh";
  static constexpr std::string_view kEntry = "sm80::attention_forward_f32";
  static constexpr std::string_view kParams = "ForwardParams";
  static constexpr bool kMultipliesByWgmma = false;
  static constexpr bool kIsChained = false;
  static constexpr bool kReadsNumbersOfCodes = false;

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
  static constexpr decltype(Candidate::reads) kReads = nullptr;
  static std::size_t shared_bytes(const Spec& spec);
  static constexpr auto scratch_bytes = partial_bytes;
  /// A call's parameters and grids. `workspace` holds plan.workspace_bytes.
  static constexpr auto prepare = prepare_plain;
};

}  // namespace fovea::cuda
