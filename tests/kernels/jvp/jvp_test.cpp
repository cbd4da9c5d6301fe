// Kernels of forward mode under the emulator, on the feature matrix, against the oracle: what every access may do is
// checked beside.
#include <gtest/gtest.h>

#include "kernels/each_landing.hpp"
#include "kernels/jvp/emulated_jvp.hpp"
#include "kernels/jvp/jvp_cases.hpp"
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

}  // namespace
}  // namespace fovea::testing
