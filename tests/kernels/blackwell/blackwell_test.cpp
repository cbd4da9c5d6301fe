// Blackwell's forward kernel under the emulator, on the feature matrix, against the oracle: what every access may do,
// to tensor memory too, is checked beside.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/blackwell/blackwell_cases.hpp"
#include "kernels/blackwell/emulated_blackwell.hpp"
#include "kernels/each_landing.hpp"
#include "support/kernel_compare.hpp"
#include "support/long_run.hpp"

namespace fovea::testing {
namespace {

class EmulatedBlackwells : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedBlackwells, EqualTheOracle) {
  const Case& problem = GetParam();
  for_each_landing([&](Emulation& emulation) {
    expect_kernel_equals_oracle(problem, [&](const AttentionForward& args) {
      run_blackwell(problem.label, args, emulation);
    });
    if (problem.has_infinite_values || problem.has_huge_value) {
      EXPECT_GT(emulation.num_redone, 0);
    }
  });
}

/// All of them where tests may take long.
std::vector<Case> cases_to_run() {
  std::vector<Case> cases = blackwell_cases();
  if (times_longer() == 1)
    std::erase_if(cases, [](const Case& each) { return !is_short_blackwell(each.label); });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedBlackwells, ::testing::ValuesIn(cases_to_run()),
                         [](const auto& each) { return each.param.label; });

}  // namespace
}  // namespace fovea::testing
