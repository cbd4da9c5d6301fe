// Kernels of forward mode under the emulator, on the feature matrix, against the oracle: what every access may do is
// checked beside.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "kernels/each_landing.hpp"
#include "kernels/jvp/emulated_jvp.hpp"
#include "kernels/jvp/jvp_cases.hpp"
#include "reference/attention_jvp.hpp"
#include "reference/element.hpp"
#include "support/gradient_compare.hpp"

namespace fovea::testing {
namespace {

class EmulatedJvps : public ::testing::TestWithParam<GradientCase> {};

TEST_P(EmulatedJvps, EqualTheOracle) {
  const GradientCase& problem = GetParam();
  for_each_landing([&](Emulation& emulation) {
    const auto run = [&](const AttentionJvp& args) {
      run_jvp(problem.forward.label, args, emulation);
    };
    EXPECT_EQ(jvp_difference(problem, run, products_of(problem)), "");
  });
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedJvps, ::testing::ValuesIn(jvp_cases()),
                         [](const auto& each) { return each.param.forward.label; });

/// |got - expected| / |expected| over all elements.
double relative_error(const std::vector<double>& got, const std::vector<double>& expected) {
  double errors = 0, squares = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    errors += (got[i] - expected[i]) * (got[i] - expected[i]);
    squares += expected[i] * expected[i];
  }
  return std::sqrt(errors / squares);
}

/// The tolerance of bf16 products is one for inputs that are rounded, too, which these are not: of theirs only the
/// weights are rounded, P and P (S' - r), and out': by half a unit in the last place at most, and independently, so
/// that all elements together err by about as much, and hardly by twice as much.
TEST(EmulatedJvp, TensorCoresErrByTheRoundingOfWeightsAlone) {
  const std::vector<GradientCase> cases = jvp_cases();
  for (const std::string label :
       {"several_tiles_bf16", "full_bf16_d64", "full_bf16_d128", "grouped_f16_d128"}) {
    const GradientCase& problem = *std::ranges::find(
        cases, label, [](const GradientCase& each) { return each.forward.label; });
    GradientMemory memory(problem);
    memory.forward.poison_outputs();
    memory.poison_outputs();
    const AttentionJvp args = memory.jvp_args();
    Emulation emulation;
    run_jvp(label, args, emulation);
    const double unit = problem.forward.dtype == Dtype::f16 ? 0x1p-11 : 0x1p-8;
    EXPECT_LE(relative_error(reference::elements(args.out_tangent),
                             reference::attention_jvp(args).out_tangent),
              unit)
        << label;
  }
}

}  // namespace
}  // namespace fovea::testing
