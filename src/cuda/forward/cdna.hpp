// cdna/attention_forward on the host: what it takes, its tile, its parameters. Read candidates.hpp for the table that
// it is a row of, amd/cdna/attention_forward.cuh for the kernel.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuda/device/shared/forward_spec_cdna.h"
#include "cuda/forward/candidates.hpp"
#include "cuda/forward/launch.hpp"
#include "cuda/spec_text.hpp"

namespace fovea::cuda {

template <>
struct SpecText<CdnaForwardSpec> {
  static constexpr std::string_view kName = "CdnaForwardSpec";
  using Base = ForwardSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(CdnaForwardSpec, gfx)};
};

/// A row of the table of candidates.
struct CdnaForward {
  using Spec = CdnaForwardSpec;

  static constexpr std::string_view kName = "cuda/cdna/attention_forward";
  static constexpr std::string_view kHeader = "cdna/attention_forward.cuh";
  static constexpr std::string_view kEntry = "cdna::attention_forward";
  static constexpr std::string_view kParams = "ForwardParams";
  static constexpr bool kMultipliesByWgmma = false;
  static constexpr bool kIsChained = false;
  static constexpr bool kReadsNumbersOfCodes = false;

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
  /// Rows at multiples of 16 bytes, and keys and values of a tile within 2^31 bytes, as a buffer counts them.
  static bool reads(const AttentionForward& args, const GrownCache* cache);
  static constexpr decltype(Candidate::reads) kReads = reads;
  static std::size_t shared_bytes(const Spec& spec);
  static constexpr auto scratch_bytes = partial_bytes;
  /// A call's parameters and grids. `workspace` holds plan.workspace_bytes.
  static constexpr auto prepare = prepare_plain;
};

}  // namespace fovea::cuda
