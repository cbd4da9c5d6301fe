// Every recipe with every feature of a forward call, against the oracle's emulation of it.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "support/compare.hpp"
#include "support/features.hpp"

namespace fovea::testing {
namespace {

/// Recipes with a name, and those that have what no named one has.
std::vector<std::string> recipes() {
  std::vector<std::string> texts;
  for (const NamedQuantization& named : quantizations())
    if (!named.quant.is_none()) texts.emplace_back(named.name);
  texts.insert(texts.end(),
               {"accurate,hadamard=yes", "int8,smooth_q=block,block_q=16,warp_q=16,hadamard=yes",
                "fast,p_step=0,p_codes=exp2,row_sums=exact,q_scales=block,k_scales=tensor",
                "qk=int8,q_scales=warp,block_q=32,warp_q=8,k_scales=block,block_kv=32",
                "pv=e4m3,v_scales=tile_channel,smooth_v=sequence,p_max=448",
                "int8,v_scales=channel,block_kv=256", "qk=e4m3,smooth_k=sequence"});
  return texts;
}

Case case_with(const std::string& recipe, Dtype dtype) {
  Case problem = plain_case(dtype);
  problem.quant = parse_quantization(recipe);
  problem.label = recipe;
  return problem;
}

class Recipes : public ::testing::TestWithParam<std::string> {};

TEST_P(Recipes, EqualOracleWithEachFeature) {
  std::uint64_t layout = 0;
  for (const Feature& feature : features()) {
    const Dtype dtype = ++layout % 3 == 0 ? Dtype::f32 : layout % 3 == 1 ? Dtype::bf16 : Dtype::f16;
    Case problem = case_with(GetParam(), dtype);
    if (feature.name == std::string_view("bf16_products")) continue;  // refused: validate_test
    problem.layout_seed = layout;
    problem.label += " + " + std::string(feature.name);
    feature.add(problem);
    expect_equals_oracle(problem);
  }
}

/// More rows than a panel, blocks of queries and tiles of keys that are cut, several heads to a kv head, and a program
/// that is not blind to shifts.
TEST_P(Recipes, EqualOracleWithAllTogether) {
  Case problem = case_with(GetParam(), Dtype::bf16);
  problem.batch = 2;
  problem.seqlen_q = 70;
  problem.seqlen_kv = 301;
  problem.num_heads_q = 4;
  problem.num_heads_kv = 2;
  problem.head_dim_qk = 24;
  problem.head_dim_v = 40;
  problem.has_sinks = true;
  problem.score = softcap(3);
  problem.mask = causal() && window(200, 0);
  expect_equals_oracle(problem);
}

TEST_P(Recipes, InfinitiesOfValuesReachTheirRows) {
  Case problem = case_with(GetParam(), Dtype::f32);
  problem.seqlen_q = problem.seqlen_kv = 150;
  problem.mask = causal();
  problem.has_infinite_values = true;
  expect_equals_oracle(problem);
}

INSTANTIATE_TEST_SUITE_P(Of, Recipes, ::testing::ValuesIn(recipes()), [](const auto& each) {
  std::string name;
  for (const char c : each.param)
    name += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  return name;
});

}  // namespace
}  // namespace fovea::testing
