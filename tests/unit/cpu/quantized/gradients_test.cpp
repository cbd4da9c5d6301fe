// Gradients through recipes: straight through the rounding, against the oracle's.
#include <gtest/gtest.h>

#include <string>

#include "fovea/backward.hpp"
#include "fovea/mask.hpp"

#include "support/compare.hpp"
#include "support/gradient_compare.hpp"

namespace fovea::testing {
namespace {

GradientCase case_of(const std::string& recipe, Dtype dtype) {
  GradientCase problem{.forward = {.label = recipe, .dtype = dtype}};
  Case& f = problem.forward;
  f.quant = parse_quantization(recipe);
  f.batch = 2;
  f.seqlen_q = 70;
  f.seqlen_kv = 141;
  f.num_heads_q = 4;
  f.num_heads_kv = 2;
  f.head_dim_qk = 24;
  f.head_dim_v = 40;
  f.mask = causal() && window(90, 0);
  f.has_sinks = true;
  return problem;
}

void expect_right(const GradientCase& problem) {
  const std::string difference = backward_difference(problem, {.targets = targets_for(Dtype::f32)});
  EXPECT_TRUE(difference.empty()) << difference;
}

TEST(QuantizedGradients, EqualOracleByEachRecipe) {
  for (const NamedQuantization& named : quantizations()) {
    if (named.quant.is_none()) continue;
    expect_right(case_of(std::string(named.name), Dtype::f32));
  }
  expect_right(case_of("pv=e4m3,v_scales=tile_channel,smooth_v=sequence,p_max=448", Dtype::f16));
}

/// Means and rotations of both sides, and a program that is not blind to them.
TEST(QuantizedGradients, EqualOracleWithMeansAndRotations) {
  GradientCase problem =
      case_of("int8,smooth_q=block,block_q=16,warp_q=16,hadamard=yes", Dtype::bf16);
  problem.forward.score = softcap(3);
  expect_right(problem);
}

TEST(QuantizedGradients, EqualOracleOfPackedSequencesWithDropout) {
  GradientCase problem = case_of("accurate", Dtype::bf16);
  problem.forward.sequences = {{5, 70}, {0, 4}, {50, 60}, {3, 0}};
  problem.forward.dropout = {.p = 0.3F, .seed = 5};
  expect_right(problem);
}

/// Rounding shows: gradients differ from those without a recipe, and by about what forward does.
TEST(QuantizedGradients, DifferFromThoseWithoutARecipe) {
  GradientCase problem = case_of("int8", Dtype::f32);
  GradientMemory rounded(problem);
  problem.forward.quant = {};
  GradientMemory exact(problem);
  for (GradientMemory* memory : {&rounded, &exact}) {
    attention_forward(memory->args().forward);
    attention_backward(memory->args());
  }
  const auto got = values_of(rounded.args().dq), expected = values_of(exact.args().dq);
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - expected[i]) * (got[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  EXPECT_GT(error, 1e-5 * norm);
  EXPECT_LT(error, 1e-3 * norm);
}

}  // namespace
}  // namespace fovea::testing
