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
      run_args(run_blackwell, problem.label, args, cuda::typical_device(10, 0), emulation);
    });
    if (problem.has_infinite_values || problem.has_huge_value) {
      EXPECT_GT(emulation.num_redone, 0);
    }
  });
}

class EmulatedBlackwellCaches : public ::testing::TestWithParam<NamedCacheCase> {};

TEST_P(EmulatedBlackwellCaches, EqualTheOracle) {
  for_each_landing([](Emulation& emulation) {
    expect_cache_equals_oracle(GetParam(), run_blackwell, cuda::typical_device(10, 0), emulation);
    if (!GetParam().problem.packed_q.empty()) return;  // queries of nobody are NaN
    EXPECT_EQ(emulation.num_redone > 0, GetParam().problem.nan_key >= 0)
        << "what lies behind the last key is no reason to compute again";
  });
}

/// All of them where tests may take long.
template <class Named>
std::vector<Named> to_run(std::vector<Named> cases) {
  if (times_longer() == 1)
    std::erase_if(cases, [](const Named& each) { return !is_short_blackwell(each.label); });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedBlackwells, ::testing::ValuesIn(to_run(blackwell_cases())),
                         [](const auto& each) { return each.param.label; });
INSTANTIATE_TEST_SUITE_P(All, EmulatedBlackwellCaches,
                         ::testing::ValuesIn(to_run(blackwell_cache_cases())),
                         [](const auto& each) { return each.param.label; });

}  // namespace
}  // namespace fovea::testing
