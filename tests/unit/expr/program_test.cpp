#include <gtest/gtest.h>

#include "expr/passes.hpp"
#include "formula_test_data.hpp"

namespace fovea {
namespace {

using testing::refusal_of;
using testing::shape_only;

TEST(Program, LambdaTextAndCopiesAreOneFormula) {
  const TensorView view = shape_only(Dtype::f32, {8});
  const Captured slopes = capture("slopes", view);
  const ScoreMod traced =
      score_mod([&](auto x) { return x.score - slopes[x.q_head] * abs(x.q_idx - x.kv_idx); });
  const ScoreMod parsed = parse_score_mod("score - slopes[q_head] * abs(q_idx - kv_idx)",
                                          {.tensors = {{"slopes", view}}});
  EXPECT_TRUE(traced == parsed);
  EXPECT_EQ(traced.to_string(), "score - slopes[q_head] * abs(q_idx - kv_idx)");
  ASSERT_EQ(traced.captures().tensors.size(), 1U);
  EXPECT_EQ(traced.captures().tensors[0].name, "slopes");
}

TEST(Program, DefaultsChangeNothing) {
  EXPECT_TRUE(ScoreMod().is_identity());
  EXPECT_TRUE(MaskMod().is_all_visible());
  const MaskMod causal = parse_mask_mod("kv_idx <= q_idx");
  EXPECT_TRUE((MaskMod() && causal) == causal);
  EXPECT_TRUE((causal && MaskMod()) == causal);
  EXPECT_TRUE((causal || MaskMod()).is_all_visible());
  const ScoreMod twice = parse_score_mod("score * 2");
  EXPECT_TRUE((ScoreMod() | twice) == twice);
  EXPECT_TRUE((twice | ScoreMod()) == twice);
}

TEST(Program, PipesFeedTheFirstScoreToTheSecond) {
  const ScoreMod piped = parse_score_mod("score * 2") | parse_score_mod("score - score / 3");
  EXPECT_EQ(piped.to_string(), "score * 2.0 - score * 2.0 / 3.0");
}

TEST(Program, ClashingNamesOfDifferentDataAreRenamed) {
  float data[2][4] = {};
  TensorSpec spec = shape_only(Dtype::f32, {4}).spec();
  const Captures first{.tensors = {{"bias", TensorView(data[0], spec)}}};
  const Captures second{.tensors = {{"bias", TensorView(data[1], spec)}}};
  const ScoreMod a = parse_score_mod("score + bias[kv_idx]", first);
  const ScoreMod b = parse_score_mod("score + bias[kv_idx]", second);
  EXPECT_EQ((a | a).to_string(), "score + bias[kv_idx] + bias[kv_idx]");
  EXPECT_EQ((a | b).to_string(), "score + bias[kv_idx] + bias_2[kv_idx]");
  EXPECT_EQ((a | b | b).to_string(), "score + bias[kv_idx] + bias_2[kv_idx] + bias_3[kv_idx]");
  ASSERT_EQ((a | b).captures().tensors.size(), 2U);
  EXPECT_EQ((a | b).captures().tensors[1].view.data(), data[1]);
}

TEST(Program, OneNameForTwoThingsInOneFormulaIsRefused) {
  const Captured a = capture("t", shape_only(Dtype::f32, {4}));
  const Captured b = capture("t", shape_only(Dtype::f32, {5}));
  const auto both = [&](auto x) { return x.score + a[x.q_idx] + b[x.q_idx]; };
  EXPECT_NE(refusal_of([&] { static_cast<void>(score_mod(both)); }).find("'t' stands for two"),
            std::string::npos);
}

TEST(Program, KindsRefuseFormulasOfOtherTypes) {
  EXPECT_NE(refusal_of([] { static_cast<void>(score_mod([](auto x) { return x.q_idx < 3; })); }),
            "");
  EXPECT_NE(refusal_of([] { static_cast<void>(mask_mod([](auto x) { return x.q_idx; })); }), "");
  EXPECT_NE(refusal_of([] { static_cast<void>(mask_mod([](auto x) { return x.score > 0; })); }),
            "");
}

TEST(StructuralKey, TellsStructuresApartAndNotNames) {
  const Captures captures{
      .tensors = {{"a", shape_only(Dtype::i32, {4})}, {"b", shape_only(Dtype::i32, {4})}}};
  const auto key = [&](const char* text) {
    return expr::structural_key(parse_mask_mod(text, captures).expr().shared());
  };
  EXPECT_EQ(key("a[q_idx] == b[kv_idx]"), key("b[q_idx] == a[kv_idx]"));
  EXPECT_EQ(key("a[q_idx] == a[kv_idx]"), key("b[q_idx] == b[kv_idx]"));
  EXPECT_NE(key("a[q_idx] == a[kv_idx]"), key("a[q_idx] == b[kv_idx]"));
}

}  // namespace
}  // namespace fovea
