// A family of kernels that no other file knows: what a new one brings, and that it is enough.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/candidate_of.hpp"
#include "cuda/forward/choices.hpp"
#include "cuda/forward/launch.hpp"
#include "cuda/spec_text.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {

// ---- its folder --------------------------------------------------------------------------------------------------

/// toy/attention_forward.
struct ToySpec : ForwardSpec {
  std::int32_t rounds = 1;

  bool operator==(const ToySpec&) const = default;
};

template <>
struct SpecText<ToySpec> {
  static constexpr std::string_view kName = "ToySpec";
  using Base = ForwardSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(ToySpec, rounds)};
};

namespace {

/// Tiles of one row; as many rounds as there are keys.
struct ToyForward {
  using Spec = ToySpec;

  static constexpr std::string_view kName = "cuda/toy/attention_forward";
  static constexpr std::string_view kHeader = "toy/attention_forward.cuh";
  static constexpr std::string_view kEntry = "toy::attention_forward";
  static constexpr std::string_view kParams = "ForwardParams";
  static constexpr bool kMultipliesByWgmma = false;
  static constexpr bool kIsChained = false;
  static constexpr bool kReadsNumbersOfCodes = false;

  static std::optional<Refusal> refuses(const ForwardProblem& f, const DeviceTraits& device) {
    if (auto refusal = refuses_any(f, device)) return refusal;
    if (f.seqlen_kv > 8) return Refusal{"more than 8 keys"};
    return std::nullopt;
  }
  static ToySpec choose(const ForwardProblem& f, const DeviceTraits&) {
    ToySpec spec{common_spec(f)};
    spec.tile_q = 1;
    spec.rounds = static_cast<std::int32_t>(f.seqlen_kv);
    return spec;
  }
  static std::vector<ToySpec> alternatives(const ForwardProblem& f, const DeviceTraits& device) {
    return {choose(f, device)};
  }
  static constexpr decltype(Candidate::reads) kReads = nullptr;
  static std::size_t shared_bytes(const ToySpec& spec) {
    return static_cast<std::size_t>(spec.rounds) * sizeof(float);
  }
  static std::size_t scratch_bytes(const ToySpec& spec, const ForwardProblem& f) {
    return partial_bytes(spec, f);
  }
  static ForwardLaunch prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                               const AttentionForward& args, const GrownCache* cache,
                               void* workspace, const TensorMapEncoder&) {
    return forward_launch(problem, plan, args, workspace, cache);
  }
};

// ---- its row in the table ----------------------------------------------------------------------------------------

constexpr Candidate kToy = candidate_of<ToyForward>();

// ---- its tests ---------------------------------------------------------------------------------------------------

ForwardProblem problem_of(std::int64_t seqlen_kv) {
  Problem p;
  p.q = make_spec(Dtype::bf16, std::array<std::int64_t, 4>{1, 4, 2, 64});
  p.k = p.v = make_spec(Dtype::bf16, std::array<std::int64_t, 4>{1, seqlen_kv, 2, 64});
  return validate(p, "test");
}

TEST(ToyFamily, IsPlannedByItsRow) {
  const DeviceTraits device = typical_device(8, 0);
  const ForwardProblem problem = problem_of(5);
  ASSERT_FALSE(kToy.refuses(problem, device));
  const ForwardPlan plan = plan_choice(problem, device, {&kToy, kToy.choose(problem, device)});
  EXPECT_EQ(plan.candidate, ToyForward::kName);
  EXPECT_EQ(plan.spec.as<ToySpec>().rounds, 5);
  EXPECT_EQ(plan.shared_bytes, 5 * sizeof(float));
  EXPECT_EQ(kToy.refuses(problem_of(9), device)->reason, "more than 8 keys");
}

TEST(ToyFamily, SpecsArePrintedWithWhatTheyAdd) {
  const AnyForwardSpec spec = kToy.choose(problem_of(5), typical_device(8, 0));
  const std::string text = spec.print();
  EXPECT_NE(text.find("inline constexpr ToySpec spec = "), std::string::npos) << text;
  EXPECT_NE(text.find("s.head_dim_qk = 64;"), std::string::npos) << text;
  EXPECT_NE(text.find("s.rounds = 5;"), std::string::npos) << text;
}

TEST(ToyFamily, SpecsAreValues) {
  const AnyForwardSpec five = kToy.choose(problem_of(5), typical_device(8, 0));
  AnyForwardSpec copy = five;
  EXPECT_EQ(copy, five);
  copy.get_if<ToySpec>()->rounds = 6;
  EXPECT_NE(copy, five);
  EXPECT_EQ(five.as<ToySpec>().rounds, 5);
  EXPECT_EQ(copy.get_if<TeamSpec>(), nullptr);
  EXPECT_NE(AnyForwardSpec(ToySpec{}), AnyForwardSpec(ForwardSpec{}));
}

}  // namespace
}  // namespace fovea::cuda
