#include "expr/print.hpp"

#include <gtest/gtest.h>

#include <limits>

#include "expr/print_cuda.hpp"
#include "formula_test_data.hpp"

namespace fovea {
namespace {

const Arguments x = arguments();

TEST(Print, ReadsAsAPersonWouldWrite) {
  const Captured slopes = capture("slopes", testing::shape_only(Dtype::f32, {8}));
  EXPECT_EQ(to_string(x.score + slopes[x.q_head] * (x.kv_idx - x.q_idx)),
            "score + slopes[q_head] * (kv_idx - q_idx)");
  EXPECT_EQ(to_string(30.0 * tanh(x.score / 30.0)), "30.0 * tanh(score / 30.0)");
  EXPECT_EQ(to_string(select(x.q_idx < 3, x.score, -std::numeric_limits<double>::infinity())),
            "q_idx < 3 ? score : -inf");
}

TEST(Print, ParenthesesOnlyWhereTheyChangeTheMeaning) {
  EXPECT_EQ(to_string((x.q_idx - x.kv_idx) - 1), "q_idx - kv_idx - 1");
  EXPECT_EQ(to_string(x.q_idx - (x.kv_idx - 1)), "q_idx - (kv_idx - 1)");
  EXPECT_EQ(to_string((x.q_idx < 3) == (x.kv_idx < 3)), "(q_idx < 3) == (kv_idx < 3)");
  EXPECT_EQ(to_string(!(x.q_idx < 3) && (x.q_idx > 1 || x.q_idx > 2)),
            "!q_idx < 3 && (q_idx > 1 || q_idx > 2)");
  EXPECT_EQ(to_string(-(x.q_idx + 1) * -3), "-(q_idx + 1) * -3");
}

TEST(Print, ConversionsAreHiddenWhereTheTypesImplyThem) {
  EXPECT_EQ(to_string(x.score + x.q_idx), "score + q_idx");
  EXPECT_EQ(to_string(to_float(x.q_idx) + to_float(x.kv_idx)), "float(q_idx) + kv_idx");
  EXPECT_EQ(to_string(x.q_idx / x.kv_idx), "q_idx / kv_idx");
  EXPECT_EQ(to_string(x.q_idx + (x.kv_idx < 3)), "q_idx + (kv_idx < 3)");
  EXPECT_EQ(to_string(to_int(x.score)), "int(score)");
}

TEST(Print, ShownTextsEndWhereTheyAreToldTo) {
  const Expr sum = x.q_idx + x.kv_idx;
  EXPECT_EQ(expr::print_up_to(sum.node(), 14), "q_idx + kv_idx");
  EXPECT_EQ(expr::print_up_to(sum.node(), 13), "q_idx + kv_id ...");
  EXPECT_EQ(expr::print_up_to(sum.node(), 0), " ...");
  Expr power = x.score;
  for (int i = 0; i < 64; ++i) power = power * power;
  EXPECT_EQ(expr::print_up_to(power.node(), 20), "let t0 = score * sco ...");
}

TEST(PrintCuda, OfPartsThatRepeatIsAsLongAsTheirNumber) {
  Expr power = x.score;
  for (int i = 0; i < 64; ++i) power = power * power;
  const expr::CudaProgram program = expr::print_cuda(ScoreMod(power), {});
  EXPECT_LT(program.mods.size(), 20000U);
}

/// Tangents have slots behind those of the score, by the names that derivatives read them by.
TEST(PrintCuda, OfTangentsReadsThemBesideWhatTheyAreTangentsOf) {
  const TensorView slopes = testing::shape_only(Dtype::f32, {8});
  const ScoreMod score =
      parse_score_mod("score + slopes[q_head] * kv_idx", {.tensors = {{"slopes", slopes}}});
  const expr::CudaProgram moved = expr::print_cuda_tangent(score, {}, {{"slopes", slopes}});
  ASSERT_EQ(moved.tensors.size(), 2U);
  EXPECT_EQ(moved.tensors[0].name, "slopes");
  EXPECT_EQ(moved.tensors[1].name, "slopes_tangent");
  EXPECT_NE(moved.mods.find("has_score_tangent = true"), std::string::npos);
  const expr::CudaProgram still = expr::print_cuda_tangent(score, {}, {});
  EXPECT_EQ(still.tensors.size(), 1U);
  EXPECT_NE(still.mods.find("has_score_tangent = false"), std::string::npos);
  EXPECT_EQ(expr::print_cuda(score, {}).mods.find("score_tangent"), std::string::npos);
}

TEST(Print, FloatsLookLikeFloats) {
  EXPECT_EQ(to_string(Expr(3.0)), "3.0");
  EXPECT_EQ(to_string(Expr(0.1F)), "0.1");
  EXPECT_EQ(to_string(Expr(1e30)), "1e+30");
  EXPECT_EQ(to_string(Expr(-0.0)), "-0.0");
  EXPECT_EQ(to_string(Expr(std::numeric_limits<double>::quiet_NaN())), "nan");
}

TEST(Print, PartsThatStandSeveralTimesAreNamed) {
  const Expr part = abs(x.q_idx - x.kv_idx) * (x.seqlen_kv - x.seqlen_q) + x.q_head;
  EXPECT_EQ(to_string(part * part + part),
            "let t0 = abs(q_idx - kv_idx) * (seqlen_kv - seqlen_q) + q_head; t0 * t0 + t0");
  // Short ones, and those that stand once, are not.
  const Expr position = x.q_idx + (x.seqlen_kv - x.seqlen_q);
  EXPECT_EQ(to_string(position - x.kv_idx <= position),
            "q_idx + (seqlen_kv - seqlen_q) - kv_idx <= q_idx + (seqlen_kv - seqlen_q)");
  // A part of a part that has a name is written once.
  const Expr outer = tanh(to_float(part) / 3.0) * x.score - part * part;
  EXPECT_EQ(to_string(outer * outer),
            "let t0 = abs(q_idx - kv_idx) * (seqlen_kv - seqlen_q) + q_head; let t1 = tanh(t0 / "
            "3.0) * score - t0 * t0; t1 * t1");
  const Captured t0 = capture("t0", testing::shape_only(Dtype::i32, {8}));
  const Expr taken = part + t0[x.q_head];
  EXPECT_EQ(
      to_string(taken * taken * taken),
      "let t1 = abs(q_idx - kv_idx) * (seqlen_kv - seqlen_q) + q_head + t0[q_head]; t1 * t1 * "
      "t1");
}

TEST(Print, TextThatSharingWouldBlowUpParsesBack) {
  Expr power = x.score;
  for (int i = 0; i < 60; ++i) power = power * power;  // 2^60 factors when written out
  const std::string text = to_string(power);
  EXPECT_LT(text.size(), 2000U);
  EXPECT_TRUE(parse_score_mod(text) == ScoreMod(power));
}

TEST(Print, LongTextsAreRefused) {
  const Captured table =
      capture(std::string(std::size_t{1} << 20U, 'n'), testing::shape_only(Dtype::f32, {8}));
  EXPECT_EQ(testing::refusal_of([&] { to_string(table[x.q_head]); }),
            "formula: its text is beyond 1048576 bytes; expected less repetition");
}

}  // namespace
}  // namespace fovea
