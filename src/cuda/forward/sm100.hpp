// What Blackwell's forward kernel needs on the host: its choice, and what of its launch is not Hopper's. Read
// candidates.hpp for the table that it is a row of, device/sm100/attention_forward.cuh for the kernel.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuda/device/shared/forward_spec_sm100.h"
#include "cuda/device/shared/fp4_sm100.h"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/candidates.hpp"
#include "cuda/forward/sm90.hpp"
#include "cuda/forward/spec.hpp"
#include "cuda/spec_text.hpp"

namespace fovea::cuda {

template <>
struct SpecText<Sm100ForwardSpec> {
  static constexpr std::string_view kName = "Sm100ForwardSpec";
  using Base = Sm90ForwardSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(Sm100ForwardSpec, polynomial_keys),
                                       FOVEA_SPEC_MEMBER(Sm100ForwardSpec, awaits_sums)};
};

/// Of kernels whose CTAs stay on their SMs and have Hopper's roles: what all of them have. Null of others.
inline const Sm90ForwardSpec* persistent_spec(const AnyForwardSpec& spec) {
  if (const auto* sm100 = spec.get_if<Sm100ForwardSpec>()) return sm100;
  if (const auto* fp4 = spec.get_if<Sm100Fp4Spec>()) return fp4;
  return spec.get_if<Sm90ForwardSpec>();
}

/// A row of the table of candidates.
struct Sm100Forward {
  using Spec = Sm100ForwardSpec;
  static constexpr std::string_view kName = "cuda/sm100/attention_forward";
  static constexpr std::string_view kHeader = "sm100/attention_forward.cuh";
  static constexpr std::string_view kEntry = "sm100::attention_forward";
  static constexpr std::string_view kParams = "Sm90ForwardParams";
  static constexpr bool kMultipliesByWgmma = false;
  static constexpr bool kIsChained = true;
  static constexpr bool kReadsNumbersOfCodes = false;

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
  static bool reads(const AttentionForward& args, const GrownCache* cache);
  static constexpr decltype(Candidate::reads) kReads = reads;
  static std::size_t shared_bytes(const Spec& spec);
  static std::size_t scratch_bytes(const Spec& spec, const ForwardProblem& problem);
  static Sm90Launch prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                            const AttentionForward& args, const GrownCache* cache, void* workspace,
                            const TensorMapEncoder& encode);
};

}  // namespace fovea::cuda
