// Every feature alone, in every dtype, on every target that this machine has. Pairs:
// tests/property/pairs_test.cpp.
#include "support/features.hpp"

#include <gtest/gtest.h>

#include "support/compare.hpp"

namespace fovea::testing {
namespace {

class CpuFeatures : public ::testing::TestWithParam<Feature> {};

TEST_P(CpuFeatures, EqualsOracle) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    Case problem = plain_case(dtype);
    problem.label = GetParam().name;
    GetParam().add(problem);
    if (targets_for(dtype, problem.compute_dtype).empty()) continue;  // no bf16 products here
    expect_equals_oracle(problem);
  }
}

INSTANTIATE_TEST_SUITE_P(Each, CpuFeatures,
                         ::testing::ValuesIn(features().begin(), features().end()),
                         [](const auto& each) { return std::string(each.param.name); });

TEST(CpuTargets, ScalarAlwaysRuns) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    const auto targets = targets_for(dtype);
    ASSERT_FALSE(targets.empty());
    EXPECT_EQ(targets.front(), CpuTarget::scalar);
  }
}

TEST(CpuTargets, PlainCaseOnAll) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16})
    expect_equals_oracle(plain_case(dtype));
}

}  // namespace
}  // namespace fovea::testing
