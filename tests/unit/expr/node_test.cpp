#include "expr/node.hpp"

#include <gtest/gtest.h>

#include <limits>

#include "formula_test_data.hpp"

namespace fovea {
namespace {

using expr::Op;
using testing::refusal_of;
using testing::shape_only;

const Arguments x = arguments();

TEST(Node, EqualFormulasHaveEqualDigestsAndOthersDoNot) {
  EXPECT_TRUE(identical(x.q_idx + 1, x.q_idx + 1));
  EXPECT_FALSE(identical(x.q_idx + 1, x.q_idx + 2));
  EXPECT_FALSE(identical(x.q_idx + 1, x.kv_idx + 1));
  EXPECT_FALSE(identical(x.q_idx - x.kv_idx, x.kv_idx - x.q_idx));
  EXPECT_FALSE(identical(Expr(0.0), Expr(-0.0)));
  EXPECT_FALSE(identical(Expr(1), Expr(1.0)));
  EXPECT_TRUE(identical(Expr(std::numeric_limits<double>::quiet_NaN()),
                        -Expr(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Node, DigestIsTheSameOnEveryMachine) {
  // Written once; a change here changes the key of every stored kernel.
  const expr::Digest digest = (x.score + 1.0).node().digest;
  EXPECT_EQ(digest, (x.score + Expr(1.0F)).node().digest);
  EXPECT_EQ(digest.lo, 12841989401830691039U);
  EXPECT_EQ(digest.hi, 6265401400839493544U);
}

TEST(Node, DtypeAndRankOfALoadAreStructureItsDataAreNot) {
  const Captured a = capture("t", shape_only(Dtype::f32, {8}));
  EXPECT_TRUE(identical(a[x.q_idx], capture("t", shape_only(Dtype::f32, {99}))[x.q_idx]));
  EXPECT_FALSE(identical(a[x.q_idx], capture("t", shape_only(Dtype::f16, {8}))[x.q_idx]));
  EXPECT_FALSE(identical(a[x.q_idx], capture("u", shape_only(Dtype::f32, {8}))[x.q_idx]));
}

TEST(Node, TypesFollowTheRules) {
  EXPECT_EQ((x.q_idx + x.kv_idx).type(), ExprType::integer);
  EXPECT_EQ((x.q_idx + x.score).type(), ExprType::floating);
  EXPECT_EQ((x.q_idx / x.kv_idx).type(), ExprType::floating);
  EXPECT_EQ(floor_div(x.q_idx, x.kv_idx).type(), ExprType::integer);
  EXPECT_EQ((Expr(true) + true).type(), ExprType::integer);
  EXPECT_EQ((Expr(true) & true).node().op, Op::logical_and);
  EXPECT_EQ((Expr(true) | true).node().op, Op::logical_or);
  EXPECT_EQ((Expr(true) ^ true).node().op, Op::ne);
  EXPECT_EQ((~(x.q_idx < 3)).node().op, Op::logical_not);
  EXPECT_EQ((Expr(true) & x.q_idx).node().op, Op::bit_and);
  EXPECT_EQ(select(true, x.q_idx, 1.0).type(), ExprType::floating);
  EXPECT_EQ(select(true, x.q_idx < 3, true).type(), ExprType::boolean);
  EXPECT_EQ(exp(x.q_idx).type(), ExprType::floating);
}

TEST(Node, CastsAndSignsOfLiteralsAreLiterals) {
  EXPECT_TRUE(identical(to_float(3), Expr(3.0)));
  EXPECT_TRUE(identical(to_int(-2.9), Expr(-2)));
  EXPECT_TRUE(identical(to_int(3e9), Expr(2147483647)));
  EXPECT_TRUE(identical(to_int(std::numeric_limits<double>::quiet_NaN()), Expr(0)));
  EXPECT_TRUE(identical(-Expr(3), Expr(-3)));
  EXPECT_TRUE(identical(-Expr(0.0), Expr(-0.0)));
  EXPECT_EQ((Expr(1) + 2).node().op, Op::add);
}

TEST(Node, WhatCannotBeBuiltIsRefusedWithItsTypes) {
  EXPECT_EQ(refusal_of([] { x.score && true; }),
            "formula: '&&' got float and bool; expected bool, compare a number first (x != 0)");
  EXPECT_NE(refusal_of([] { x.score | x.q_idx; }), "");
  EXPECT_NE(refusal_of([] { select(x.q_idx, 1, 2); }), "");
  EXPECT_NE(refusal_of([] { x.q_idx % 0; }), "");
  EXPECT_NE(refusal_of([] { x.score / 0; }), "");
  EXPECT_NE(refusal_of([] { Expr(std::int64_t{1} << 31); }), "");
  EXPECT_NE(refusal_of([] { scalar(CapturedScalar::of("n", std::int64_t{1} << 31)); }), "");
  const Captured table = capture("table", shape_only(Dtype::f32, {4, 4}));
  EXPECT_NE(refusal_of([&] { table[x.q_idx]; }), "");
  EXPECT_NE(refusal_of([&] { table(x.q_idx, x.score); }), "");
  EXPECT_NE(refusal_of([&] { table(x.q_idx, 4); }), "");
  EXPECT_NE(refusal_of([] { capture("q_idx", shape_only(Dtype::f32, {4})); }), "");
}

TEST(Node, TopologicalOrderHasEachNodeOnceOperandsFirst) {
  const Expr shared = x.q_idx - x.kv_idx;
  const Expr root = abs(shared) + shared * (x.q_idx - x.kv_idx);
  const auto order = expr::topological(root.node());
  EXPECT_EQ(order.size(), 6U);  // q_idx, kv_idx, -, abs, *, +
  EXPECT_EQ(order.back()->op, Op::add);
}

TEST(Node, ChainsOfAHundredThousandNodesAreReleased) {
  Expr sum = x.score;
  for (int i = 0; i < 100000; ++i) sum = sum + 1.0;  // a recursive release would overflow the stack
  EXPECT_EQ(expr::topological(sum.node()).size(), 100002U);
}

}  // namespace
}  // namespace fovea
