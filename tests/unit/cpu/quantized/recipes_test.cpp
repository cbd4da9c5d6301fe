// Every recipe with every feature of a forward call, against the oracle's emulation of it.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "problem/forward.hpp"
#include "reference/attention_forward.hpp"
#include "reference/element.hpp"
#include "support/compare.hpp"
#include "support/features.hpp"

namespace fovea::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

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
Case case_of_all_together(const std::string& recipe, Dtype dtype) {
  Case problem = case_with(recipe, dtype);
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
  return problem;
}

TEST_P(Recipes, EqualOracleWithAllTogether) {
  expect_equals_oracle(case_of_all_together(GetParam(), Dtype::bf16));
}

TEST_P(Recipes, InfinitiesOfValuesReachTheirRows) {
  Case problem = case_with(GetParam(), Dtype::f32);
  problem.seqlen_q = problem.seqlen_kv = 150;
  problem.mask = causal();
  problem.has_infinite_values = true;
  expect_equals_oracle(problem);
}

/// Rows whose scores are all the lowest float, all 2^40, and of both signs: steps of octaves are lost beside them.
TEST_P(Recipes, HugeScoresAreScores) {
  constexpr double kLowest = std::numeric_limits<float>::lowest();
  constexpr std::int64_t kKeys = 150;
  Case problem = case_with(GetParam(), Dtype::f32);
  problem.seqlen_q = 7;
  problem.seqlen_kv = kKeys;
  const TensorView bias = problem.capture(Dtype::f32, {3, kKeys}, [=](std::int64_t i) {
    if (i / kKeys < 2) return i / kKeys == 0 ? kLowest : 0x1p40;
    return i % 2 == 0 ? kLowest : -0x1p40;
  });
  problem.score = parse_score_mod("score + bias[q_idx % 3, kv_idx]", {.tensors = {{"bias", bias}}});
  expect_equals_oracle(problem);
}

// ---- q, k and v that come as codes of e4m3, by scales of the call ----

/// A scale for each sequence and kv head, in strides of their own.
TEST(RecipesOfCodes, EqualOracleWithEachFeature) {
  std::uint64_t layout = 0;
  for (const Feature& feature : features()) {
    if (feature.name == std::string_view("bf16_products")) continue;
    Case problem = case_with("fp8_static", Dtype::e4m3);
    problem.layout_seed = ++layout;
    problem.label += " of codes + " + std::string(feature.name);
    if (layout % 3 != 0) problem.out_dtype = layout % 3 == 1 ? Dtype::f32 : Dtype::f16;
    feature.add(problem);
    expect_equals_oracle(problem);
  }
}

TEST(RecipesOfCodes, EqualOracleWithAllTogether) {
  for (const char* recipe : {"fp8_static", "fp8_static,p_max=448,row_sums=codes",
                             "fp8_static,p_codes=linear,p_max=128,p_step=1"}) {
    Case problem = case_of_all_together(recipe, Dtype::e4m3);
    problem.layout = Layout::odd_offset;
    expect_equals_oracle(problem);
  }
}

TEST(RecipesOfCodes, NanReachesTheRowsThatSeeIt) {
  Case problem = case_with("fp8_static", Dtype::e4m3);
  problem.seqlen_q = problem.seqlen_kv = 150;
  problem.mask = causal();
  problem.has_infinite_values = true;  // in e4m3 the greatest codes, and NaN
  expect_equals_oracle(problem);
  CaseMemory memory(problem);
  set_row(memory.k, {.batch = 0, .row = 100, .head = 0}, kNaN);
  set_row(memory.q, {.batch = 0, .row = 90, .head = 0}, kNaN);
  attention_forward(memory.args());
  const AttentionForward args = memory.args();
  const reference::ForwardResult expected = reference::attention_forward(args);
  for (std::int64_t i = 0; i < args.lse.size(2); ++i) {
    const bool is_nan = std::isnan(reference::element(args.lse, i * args.lse.stride(2)));
    EXPECT_EQ(is_nan, std::isnan(expected.lse[static_cast<std::size_t>(i)])) << i;
    EXPECT_EQ(is_nan, i == 90 || i >= 100) << i;
  }
}

/// The same numbers without codes have the same codes, so the same bits come out: scales are powers of two.
TEST(RecipesOfCodes, HaveTheBitsOfTheirNumbers) {
  Case problem = case_with("fp8_static", Dtype::e4m3);
  problem.seqlen_q = problem.seqlen_kv = 200;
  problem.mask = causal();
  CaseMemory codes(problem);
  for (GuardedTensor* scale : {&codes.q_scale, &codes.k_scale, &codes.v_scale})
    scale->fill([](std::int64_t i) { return std::ldexp(1.0, -7 - static_cast<int>(i % 2)); });
  problem.dtype = Dtype::bf16;
  CaseMemory numbers(problem);
  const AttentionForward of_codes = codes.args();
  AttentionForward of_numbers = numbers.args();
  const auto copy = [](const TensorView& from, const TensorView& scale, GuardedTensor& to) {
    std::int64_t i = 0;
    const std::vector<double> values = reference::elements(from);
    const std::int64_t group = from.size(2) / scale.size(1), row = from.size(2) * from.size(3);
    to.fill([&](std::int64_t) {
      const std::int64_t batch = i / (row * from.size(1)), head = i % row / from.size(3) / group;
      return values[static_cast<std::size_t>(i++)] *
             static_cast<double>(scale_at(scale, batch, head));
    });
  };
  copy(of_codes.q, of_codes.q_scale, numbers.q);
  copy(of_codes.k, of_codes.k_scale, numbers.k);
  copy(of_codes.v, of_codes.v_scale, numbers.v);
  of_numbers.q_scale = of_codes.q_scale;
  of_numbers.k_scale = of_codes.k_scale;
  of_numbers.v_scale = of_codes.v_scale;
  attention_forward(of_codes);
  attention_forward(of_numbers);
  EXPECT_EQ(reference::elements(of_codes.out), reference::elements(of_numbers.out));
  EXPECT_EQ(reference::elements(of_codes.lse), reference::elements(of_numbers.lse));
}

INSTANTIATE_TEST_SUITE_P(Of, Recipes, ::testing::ValuesIn(recipes()), [](const auto& each) {
  std::string name;
  for (const char c : each.param)
    name += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  return name;
});

}  // namespace
}  // namespace fovea::testing
