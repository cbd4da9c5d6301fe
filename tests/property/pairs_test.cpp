// Every two features together, in every dtype, on every target that this machine has.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "support/compare.hpp"
#include "support/features.hpp"

namespace fovea::testing {
namespace {

class Pairs : public ::testing::TestWithParam<Dtype> {};

TEST_P(Pairs, EqualOracle) {
  const int kEnough = GTEST_FLAG_GET(fail_fast) ? 1 : 10;
  int num_different = 0;
  std::uint64_t pair = 0;
  for (const Feature& first : features()) {
    for (const Feature& second : features()) {
      const bool excludes = !first.group.empty() && first.group == second.group;
      if (&first >= &second || excludes) continue;
      Case problem = plain_case(GetParam());
      problem.layout_seed = ++pair;
      problem.label = std::string(first.name) + " + " + std::string(second.name);
      first.add(problem);
      second.add(problem);
      if (targets_for(problem.dtype, problem.compute_dtype).empty())
        continue;  // no bf16 products here
      const std::string difference = difference_from_oracle(problem);
      if (difference.empty()) continue;
      ADD_FAILURE() << difference;
      if (++num_different == kEnough) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Of, Pairs, ::testing::Values(Dtype::f32, Dtype::f16, Dtype::bf16),
                         [](const auto& each) { return std::string(fovea::name(each.param)); });

}  // namespace
}  // namespace fovea::testing
