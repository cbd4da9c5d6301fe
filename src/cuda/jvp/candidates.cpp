#include "cuda/jvp/candidates.hpp"

#include <algorithm>
#include <array>
#include <tuple>

#include "core/check.hpp"
#include "cuda/forward/sm80.hpp"
#include "cuda/forward/spec.hpp"
#include "cuda/jvp/sm80.hpp"
#include "cuda/jvp/sm80_f32.hpp"
#include "cuda/params/tensor_params.hpp"
#include "cuda/spec_text.hpp"

namespace fovea::cuda {

template <>
struct SpecText<JvpSpec> {
  static constexpr std::string_view kName = "JvpSpec";
  using Base = TeamSpec;
  static constexpr std::tuple kMembers{
      FOVEA_SPEC_MEMBER(JvpSpec, has_q_tangent),      FOVEA_SPEC_MEMBER(JvpSpec, has_k_tangent),
      FOVEA_SPEC_MEMBER(JvpSpec, has_v_tangent),      FOVEA_SPEC_MEMBER(JvpSpec, q_tangent_element),
      FOVEA_SPEC_MEMBER(JvpSpec, k_tangent_element),  FOVEA_SPEC_MEMBER(JvpSpec, v_tangent_element),
      FOVEA_SPEC_MEMBER(JvpSpec, out_tangent_element)};
};

namespace {

/// The row of a kernel: its files name it Sm80Jvp, ... and give it what a row asks for.
template <typename Kernel>
constexpr JvpCandidate candidate_of() {
  return {.name = Kernel::kName,
          .header = Kernel::kHeader,
          .entry = Kernel::kEntry,
          .refuses = Kernel::refuses,
          .choose = Kernel::choose,
          .shared_bytes = Kernel::shared_bytes};
}

constexpr std::array kCandidates = {candidate_of<Sm80Jvp>(), candidate_of<Sm80JvpF32>()};

/// Columns of a launch, in the units that tiles have, and as few launches as `most` allows.
std::int32_t columns_of_launch(std::int32_t padded, std::int32_t most) {
  constexpr std::int32_t kUnit = 32;
  const std::int32_t launches = (padded + most - 1) / most;
  const std::int32_t columns = (padded + launches - 1) / launches;
  return (columns + kUnit - 1) / kUnit * kUnit;
}

}  // namespace

std::span<const JvpCandidate> jvp_candidates() { return kCandidates; }

const JvpCandidate& jvp_candidate_named(std::string_view name) {
  const auto* candidate = std::ranges::find(kCandidates, name, &JvpCandidate::name);
  FOVEA_ASSERT(candidate != kCandidates.end());
  return *candidate;
}

std::string describe(const JvpSpec& spec) { return AnyForwardSpec(spec).describe(); }

std::string print_jvp_spec(const JvpSpec& spec, std::string_view name) {
  return print_spec(spec, name);
}

std::optional<Refusal> refuses_any(const TangentProblem& problem, const DeviceTraits& device) {
  if (auto refusal = refuses_any(problem.forward, device)) return refusal;
  return refuses_margin(problem.forward);
}

JvpSpec common_spec(const TangentProblem& problem, std::int32_t most_columns) {
  const ForwardProblem& f = problem.forward;
  const JvpProblem& posed = problem.posed;
  JvpSpec spec{{common_spec(f)}};
  spec.head_dim_v = columns_of_launch(spec.head_dim_v, most_columns);
  spec.has_padded_head_dim =
      spec.head_dim_qk != f.head_dim_qk || f.head_dim_v % spec.head_dim_v != 0;
  spec.is_prescaled = true;
  const auto take = [](const TensorSpec& tangent, bool& is_there, Element& element) {
    is_there = tangent.rank != 0;
    if (is_there) element = element_of(tangent.dtype);
  };
  take(posed.q_tangent, spec.has_q_tangent, spec.q_tangent_element);
  take(posed.k_tangent, spec.has_k_tangent, spec.k_tangent_element);
  take(posed.v_tangent, spec.has_v_tangent, spec.v_tangent_element);
  spec.out_tangent_element = element_of(posed.out_tangent.dtype);
  return spec;
}

}  // namespace fovea::cuda
