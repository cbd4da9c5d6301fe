// Blackwell's backward kernel under the emulator, on the feature matrix, against the oracle: what every access may do,
// to tensor memory too, is checked beside.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/backward/backward_cases.hpp"
#include "kernels/backward/each_key_walk.hpp"
#include "kernels/backward/emulated_backward.hpp"
#include "support/long_run.hpp"

namespace fovea::testing {
namespace {

class EmulatedBlackwellBackwards : public ::testing::TestWithParam<GradientCase> {};

TEST_P(EmulatedBlackwellBackwards, EqualTheOracle) {
  expect_key_walk_equals_oracle(GetParam(), run_blackwell_backward);
}

/// All of them where tests may take long.
std::vector<GradientCase> cases_to_run() {
  std::vector<GradientCase> cases = blackwell_backward_cases();
  if (times_longer() == 1)
    std::erase_if(cases, [](const GradientCase& each) {
      return !is_short_blackwell_backward(each.forward.label);
    });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedBlackwellBackwards, ::testing::ValuesIn(cases_to_run()),
                         [](const auto& each) { return each.param.forward.label; });

}  // namespace
}  // namespace fovea::testing
