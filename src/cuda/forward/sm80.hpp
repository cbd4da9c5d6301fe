// sm80/attention_forward on the host: what it takes, its tile, its parameters. Read candidates.hpp for the table that
// it is a row of, device/sm80/attention_forward.cuh for the kernel.
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
struct SpecText<TeamSpec> {
  static constexpr std::string_view kName = "TeamSpec";
  using Base = ForwardSpec;
  static constexpr std::tuple kMembers{
      FOVEA_SPEC_MEMBER(TeamSpec, keeps_queries),  FOVEA_SPEC_MEMBER(TeamSpec, has_panels),
      FOVEA_SPEC_MEMBER(TeamSpec, holds_all_keys), FOVEA_SPEC_MEMBER(TeamSpec, multiplies_codes),
      FOVEA_SPEC_MEMBER(TeamSpec, sums_codes),     FOVEA_SPEC_MEMBER(TeamSpec, rounding),
      FOVEA_SPEC_MEMBER(TeamSpec, scale_tile),     FOVEA_SPEC_MEMBER(TeamSpec, takes_codes),
      FOVEA_SPEC_MEMBER(TeamSpec, smooths_v),      FOVEA_SPEC_MEMBER(TeamSpec, instructions)};
};

/// A row of the table of candidates.
struct Sm80Forward {
  using Spec = TeamSpec;

  static constexpr std::string_view kName = "cuda/sm80/attention_forward";
  static constexpr std::string_view kHeader = "sm80/attention_forward.cuh";
  static constexpr std::string_view kEntry = "sm80::attention_forward";
  static constexpr std::string_view kParams = "ForwardParams";
  static constexpr bool kMultipliesByWgmma = false;
  static constexpr bool kIsChained = false;
  static constexpr bool kReadsNumbersOfCodes = false;

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
  /// The same for a spec that says all but its tile, and for one that `choose` gave.
  static Spec with_best_tile(const Spec& spec, const ForwardProblem& problem,
                             const DeviceTraits& device);
  static std::vector<Spec> with_other_tiles(const Spec& chosen, const ForwardProblem& problem,
                                            const DeviceTraits& device);
  /// One whose text is short, for calls while another is compiled: 0.35 to 0.45 s of a core that takes 2 to 4 for
  /// Hopper's. Its splits are whole sequences, which need no other kernel. Empty where none fits.
  static std::optional<Spec> quickest(const ForwardProblem& problem, const DeviceTraits& device);
  static constexpr decltype(Candidate::reads) kReads = nullptr;
  static std::size_t shared_bytes(const Spec& spec);
  static constexpr auto scratch_bytes = partial_bytes;
  /// A call's parameters and grids. `workspace` holds plan.workspace_bytes.
  static constexpr auto prepare = prepare_plain;
};

}  // namespace fovea::cuda
