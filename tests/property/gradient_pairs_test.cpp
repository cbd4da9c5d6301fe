// Every two features together, backward and in forward mode, in every dtype, on every target that
// this machine has. Hidden keys, and rows that see nothing, are NaN in everything that is read.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "support/features.hpp"
#include "support/gradient_compare.hpp"

namespace fovea::testing {
namespace {

/// One tile of 128 keys and one of three; three times the work of forward is enough of it.
GradientCase small_case(Dtype dtype) {
  GradientCase problem{.forward = plain_case(dtype)};
  problem.forward.seqlen_q = 5;
  problem.forward.seqlen_kv = 131;
  problem.forward.head_dim_qk = problem.forward.head_dim_v = 8;
  return problem;
}

bool goes_with(const Feature& first, const Feature& second) {
  return first.group.empty() || first.group != second.group;
}

using Difference = std::function<std::string(const GradientCase&)>;

/// Those without statistics have no gradient of lse.
void add(GradientCase& problem, const Feature& feature) {
  feature.add(problem.forward);
  problem.has_dlse = problem.forward.wants_lse;
}

void expect_pairs_equal(Dtype dtype, const Difference& difference_of) {
  const int kEnough = GTEST_FLAG_GET(fail_fast) ? 1 : 10;
  int num_different = 0;
  std::uint64_t pair = 0;
  for (const Feature& first : features()) {
    for (const Feature& second : features()) {
      if (first.is_long || second.is_long) continue;  // see gradient_contract_test.cpp
      if (&first > &second || (&first != &second && !goes_with(first, second))) continue;
      GradientCase problem = small_case(dtype);
      problem.forward.layout_seed = ++pair;
      problem.forward.label = std::string(first.name);
      add(problem, first);
      if (&first != &second) {
        problem.forward.label += " + " + std::string(second.name);
        add(problem, second);
      }
      const std::string difference = difference_of(problem);
      if (difference.empty()) continue;
      ADD_FAILURE() << difference;
      if (++num_different == kEnough) return;
    }
  }
}

class GradientPairs : public ::testing::TestWithParam<Dtype> {};

TEST_P(GradientPairs, OfBackwardEqualOracle) {
  expect_pairs_equal(GetParam(),
                     [](const GradientCase& problem) { return backward_difference(problem); });
}

TEST_P(GradientPairs, OfForwardModeEqualOracle) {
  expect_pairs_equal(GetParam(),
                     [](const GradientCase& problem) { return jvp_difference(problem); });
}

INSTANTIATE_TEST_SUITE_P(Of, GradientPairs, ::testing::Values(Dtype::f32, Dtype::f16, Dtype::bf16),
                         [](const auto& each) { return std::string(fovea::name(each.param)); });

}  // namespace
}  // namespace fovea::testing
