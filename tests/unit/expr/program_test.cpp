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

TEST(Program, UnsignedNumbersOf64BitsAreNotNegative) {
  for (const std::uint64_t value : {std::uint64_t{1} << 31U, ~std::uint64_t{0}}) {
    EXPECT_EQ(refusal_of([&] { (void)(arguments().kv_idx < value); }),
              "formula: the constant " + std::to_string(value) +
                  " is beyond 32 bits; expected -2147483648 to 2147483647");
  }
  EXPECT_EQ(to_string(Expr(std::uint64_t{2147483647})), "2147483647");
  EXPECT_EQ(to_string(Expr(7U)), "7");
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

TEST(Program, WithCapturesIsTheFormulaOverOtherData) {
  float data[2][8] = {};
  const auto slopes = [&](int i) { return view(data[i], {8}); };
  const Captures first{.tensors = {{"slopes", slopes(0)}},
                       .scalars = {CapturedScalar::of("reach", 3)}};
  const ScoreMod program =
      parse_score_mod("score + slopes[q_head] * min(q_idx - kv_idx, reach)", first);
  // In another order, and with what the formula does not read.
  const ScoreMod other = program.with_captures(
      {.tensors = {{"unread", slopes(0)}, {"slopes", slopes(1)}},
       .scalars = {CapturedScalar::of("unread_too", 1), CapturedScalar::of("reach", 7)}});
  EXPECT_TRUE(other == program);
  EXPECT_EQ(other.to_string(), program.to_string());
  EXPECT_EQ(other.captures().tensors.at(0).view.data(), data[1]);
  EXPECT_EQ(other.captures().scalars.at(0).value, 7);
  EXPECT_EQ(program.captures().tensors.at(0).view.data(), data[0]);
  // Whoever takes the formula gets what it is bound to now.
  const ScoreMod taken(other.expr());
  EXPECT_EQ(taken.captures().tensors.at(0).view.data(), data[1]);
  EXPECT_EQ(taken.captures().scalars.at(0).value, 7);
  const ScoreMod both = program | other;
  EXPECT_EQ(both.captures().tensors.at(1).view.data(), data[1]);
  EXPECT_EQ(both.captures().tensors.at(1).name, "slopes_2");
  const MaskMod mask = parse_mask_mod("kv_idx < reach", first)
                           .with_captures({.scalars = {CapturedScalar::of("reach", 9)}});
  EXPECT_EQ((!mask).captures().scalars.at(0).value, 9);
  EXPECT_EQ((mask && parse_mask_mod("q_idx > 2")).captures().scalars.at(0).value, 9);
}

TEST(Program, IsParsedWithSlotsAndGivenTensorsLater) {
  const Captures slots{.tensors = {tensor_slot("table", Dtype::f16, 2)}};
  // Which indices there will be is not known yet.
  const ScoreMod program = parse_score_mod("score + table[3, kv_idx]", slots);
  const TensorView table = shape_only(Dtype::f16, {4, 8});
  const ScoreMod bound = program.with_captures({.tensors = {{"table", table}}});
  EXPECT_TRUE(bound ==
              parse_score_mod("score + table[3, kv_idx]", {.tensors = {{"table", table}}}));
  EXPECT_EQ(bound.captures().tensors.at(0).view, table);
}

TEST(Program, WithCapturesRefusesWhatTheFormulaWasNotMadeFor) {
  const ScoreMod program = parse_score_mod(
      "score + slopes[q_head] * n",
      {.tensors = {tensor_slot("slopes", Dtype::f32, 1)}, .scalars = {CapturedScalar::of("n", 1)}});
  const auto refusal = [&](CapturedTensor tensor, CapturedScalar scalar) {
    return refusal_of([&] { program.with_captures({{tensor}, {scalar}}); });
  };
  const CapturedTensor slopes{"slopes", shape_only(Dtype::f32, {8})};
  const CapturedScalar n = CapturedScalar::of("n", 2);
  EXPECT_EQ(refusal(slopes, n), "");
  EXPECT_EQ(refusal({"slope", slopes.view}, n),
            "score: captured 'slopes' is missing; expected f32 of rank 1");
  EXPECT_EQ(refusal({"slopes", shape_only(Dtype::f16, {8})}, n),
            "score: captured 'slopes' is f16 of rank 1; expected f32 of rank 1");
  EXPECT_EQ(refusal({"slopes", shape_only(Dtype::f32, {8, 1})}, n),
            "score: captured 'slopes' is f32 of rank 2; expected f32 of rank 1");
  EXPECT_EQ(refusal(slopes, CapturedScalar::of("n", 2.0)),
            "score: captured 'n' is float; expected int");
  EXPECT_EQ(refusal(slopes, {"n", ExprType::integer, 1.5}),
            "score: 'n' is 1.5; expected a whole number of 32 bits for an int");
  EXPECT_EQ(refusal(slopes, {"m", ExprType::integer, 1}),
            "score: captured 'n' is missing; expected int");
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
