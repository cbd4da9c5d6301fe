// Validation of gradients: each refusal with its whole message.
#include "problem/backward.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "unit/problem/problems.hpp"

namespace fovea::testing {
namespace {

/// Of dense_problem(), everything wanted.
BackwardProblem dense_gradients() {
  return {.forward = dense_problem(),
          .dout = spec_of(Dtype::f32, {2, 3, 4, 6}),
          .dq = spec_of(Dtype::f32, {2, 3, 4, 8}),
          .dk = spec_of(Dtype::f32, {2, 5, 2, 8}),
          .dv = spec_of(Dtype::f32, {2, 5, 2, 6})};
}

template <typename Change>
std::string refusal_with(const Change& change) {
  BackwardProblem problem = dense_gradients();
  change(problem);
  return refusal([&] { validate(problem, "plan"); });
}

TEST(BackwardProblem, EachGradientMayBeLeftOut) {
  EXPECT_EQ(refusal_with([](auto&) {}), "(not refused)");
  EXPECT_EQ(refusal_with([](auto& p) { p.dq = p.dk = p.dv = {}; }), "(not refused)");
  EXPECT_EQ(refusal_with([](auto& p) { p.dk.dtype = Dtype::bf16; }), "(not refused)");
}

TEST(BackwardProblem, StagesAreRefusedByName) {
  EXPECT_EQ(refusal_with([](auto& p) { p.forward.compile_mode = CompileMode::complete; }),
            "(not refused)");
  EXPECT_EQ(
      refusal_with([](auto& p) { p.forward.compile_mode = CompileMode::staged; }),
      "plan: compile_mode is staged; expected auto or complete: gradients have no kernel that "
      "compiles sooner than another");
}

TEST(BackwardProblem, LseIsImpliedAndRowMaxIsNot) {
  BackwardProblem problem = dense_gradients();
  problem.forward.wants_row_max = true;
  const GradientProblem g = validate(problem, "plan");
  EXPECT_TRUE(g.forward.problem.wants_lse);
  EXPECT_FALSE(g.forward.problem.wants_row_max);
}

TEST(BackwardProblem, ShapesFollowTheForwardProblem) {
  EXPECT_EQ(refusal_with([](auto& p) { p.dout = {}; }),
            "plan: dout is missing; expected f32 [2, 3, 4, 6]");
  EXPECT_EQ(refusal_with([](auto& p) { p.dq = p.dk; }),
            "plan: dq is f32 [2, 5, 2, 8]; expected f32 [2, 3, 4, 8]");
  EXPECT_EQ(refusal_with([](auto& p) { p.dk = {.rank = 9}; }),
            "plan: dk is f32 of rank 9; expected f32 [2, 5, 2, 8]");
  EXPECT_EQ(refusal_with([](auto& p) { p.dv.dtype = Dtype::i32; }),
            "plan: dv is i32; expected f32, f16 or bf16");
  EXPECT_EQ(refusal_with([](auto& p) { p.forward.k.shape[3] = 7; }),
            "plan: k has head_dim 7 but q has 8; expected equal head_dim_qk (v alone may differ)");
}

TEST(BackwardProblem, SinksHaveAGradientOnlyWhereThereAreSinks) {
  EXPECT_EQ(refusal_with([](auto& p) { p.wants_dsinks = true; }),
            "plan: dsinks is given and forward.sinks is not; expected both or neither");
}

TEST(BackwardProblem, CapturedNamesAreNamesOfFloatsOfTheScoreProgram) {
  const auto with = [](const std::string& name, const TensorSpec& spec) {
    return refusal_with([&](BackwardProblem& p) {
      const Captures captures = {
          .tensors = {{"slopes", TensorView(static_cast<void*>(nullptr), spec_of(Dtype::f32, {4}))},
                      {"rows", TensorView(static_cast<void*>(nullptr), spec_of(Dtype::i32, {4}))}},
          .scalars = {CapturedScalar::of("cap", 2.0), CapturedScalar::of("shift", 2)}};
      p.forward.score = parse_score_mod("cap * (score + slopes[rows[q_head] + shift])", captures);
      p.dcaptured = {{name, spec}};
    });
  };
  EXPECT_EQ(with("slopes", spec_of(Dtype::bf16, {4})), "(not refused)");
  EXPECT_EQ(with("cap", spec_of(Dtype::f32, {1, 1})), "(not refused)");
  EXPECT_EQ(with("slope", spec_of(Dtype::f32, {4})),
            "plan: dcaptured names 'slope'; expected one of 'slopes', 'cap'");
  EXPECT_EQ(with("rows", spec_of(Dtype::f32, {4})),
            "plan: dcaptured names 'rows', which is i32; expected a float");
  EXPECT_EQ(with("shift", spec_of(Dtype::f32, {1})),
            "plan: dcaptured names 'shift', which is an int scalar; expected a float");
  EXPECT_EQ(with("slopes", spec_of(Dtype::f32, {5})),
            "plan: dcaptured 'slopes' is f32 [5]; expected f32 [4]");
  EXPECT_EQ(with("cap", {.rank = 9}),
            "plan: dcaptured 'cap' is f32 of rank 9; expected one element of f32, f16 or bf16");
  EXPECT_EQ(with("slopes", {.rank = -1}),
            "plan: dcaptured 'slopes' is f32 of rank -1; expected f32 [4]");
  EXPECT_EQ(with("cap", spec_of(Dtype::f32, {2})),
            "plan: dcaptured 'cap' is f32 [2]; expected one element of f32, f16 or bf16");
}

TEST(BackwardProblem, ACapturedNameIsGivenOnce) {
  EXPECT_EQ(refusal_with([](BackwardProblem& p) {
              p.forward.score = parse_score_mod(
                  "cap * score", {.tensors = {}, .scalars = {CapturedScalar::of("cap", 2.0)}});
              p.dcaptured = {{"cap", spec_of(Dtype::f32, {1})}, {"cap", spec_of(Dtype::f32, {1})}};
            }),
            "plan: dcaptured names 'cap' twice; expected each name once");
}

TEST(BackwardProblem, KeysDifferWhereResultsDo) {
  const BackwardProblem base = dense_gradients();
  BackwardProblem other = base;
  other.dq = {};
  EXPECT_FALSE(problem_key(base) == problem_key(other));
  other = base;
  other.has_dlse = true;
  EXPECT_FALSE(problem_key(base) == problem_key(other));
  other = base;
  other.dcaptured = {{"cap", spec_of(Dtype::f32, {1})}};
  EXPECT_FALSE(problem_key(base) == problem_key(other));
  EXPECT_TRUE(problem_key(base) == problem_key(dense_gradients()));
}

struct Call {
  std::vector<float> q = std::vector<float>(2 * 3 * 4 * 8), k = std::vector<float>(2 * 5 * 2 * 8),
                     v = std::vector<float>(2 * 5 * 2 * 6), out = std::vector<float>(2 * 3 * 4 * 6),
                     lse = std::vector<float>(2 * 4 * 3), dout = out, dq = q, dk = k, dv = v;

  AttentionBackward args() {
    return {.dout = view(dout.data(), {2, 3, 4, 6}),
            .forward = {.q = view(q.data(), {2, 3, 4, 8}),
                        .k = view(k.data(), {2, 5, 2, 8}),
                        .v = view(v.data(), {2, 5, 2, 6}),
                        .out = view(static_cast<const float*>(out.data()), {2, 3, 4, 6}),
                        .lse = view(static_cast<const float*>(lse.data()), {2, 4, 3})},
            .dq = view(dq.data(), {2, 3, 4, 8}),
            .dk = view(dk.data(), {2, 5, 2, 8}),
            .dv = view(dv.data(), {2, 5, 2, 6})};
  }
};

std::string refusal_of(const AttentionBackward& args) {
  return refusal([&] { validate_arguments(validate(dense_gradients(), "plan"), args, "run"); });
}

TEST(BackwardArguments, OutAndLseAreInputs) {
  Call call;
  AttentionBackward args = call.args();
  EXPECT_EQ(refusal_of(args), "(not refused)");
  args.forward.lse = {};
  EXPECT_EQ(refusal_of(args),
            "run: forward.lse is missing; expected what attention_forward wrote with lse given");
  args.forward.lse = view(call.lse.data(), {2, 3, 4});
  EXPECT_EQ(refusal_of(args), "run: lse is f32 [2, 3, 4]; expected f32 [2, 4, 3]");
}

TEST(BackwardArguments, WhatThePlanLeftOutIsRefused) {
  Call call;
  AttentionBackward args = call.args();
  args.dq = {};
  EXPECT_EQ(refusal_of(args), "run: dq is missing; the plan was made with it");
  args = call.args();
  args.dlse = args.forward.lse;
  EXPECT_EQ(refusal_of(args), "run: dlse is given; the plan was made without it");
  args = call.args();
  args.dcaptured = {{"slopes", args.dq}};
  EXPECT_EQ(refusal_of(args),
            "run: dcaptured has other names than the plan; expected the same in the same order");
}

TEST(BackwardArguments, DoutMayHaveStrideZeroAndOutputsMayNot) {
  Call call;
  AttentionBackward args = call.args();
  args.dout = view(call.dout.data(), {2, 3, 4, 6}, {0, 0, 0, 0});
  EXPECT_EQ(refusal_of(args), "(not refused)");
  args.dv = view(call.dv.data(), {2, 5, 2, 6}, {60, 0, 6, 1});
  EXPECT_EQ(refusal_of(args),
            "run: dv is f32 [2, 5, 2, 6] strides [60, 0, 6, 1]; expected strides that give every "
            "element its own place");
}

TEST(BackwardArguments, CapturedTensorsKeepTheShapeOfThePlan) {
  Call call;
  std::vector<float> slopes(4), dslopes(3);
  const auto program = [&](std::int64_t extent) {
    return parse_score_mod("score * slopes[q_head]",
                           {.tensors = {{"slopes", view(slopes.data(), {extent})}}, .scalars = {}});
  };
  BackwardProblem problem = dense_gradients();
  problem.forward.score = program(3);
  problem.dcaptured = {{"slopes", spec_of(Dtype::f32, {3})}};
  AttentionBackward args = call.args();
  args.dcaptured = {{"slopes", view(dslopes.data(), {3})}};
  const auto refusal_with = [&](std::int64_t extent) {
    args.forward.score = program(extent);
    return refusal([&] { validate_arguments(validate(problem, "plan"), args, "run"); });
  };
  EXPECT_EQ(refusal_with(3), "(not refused)");
  EXPECT_EQ(refusal_with(4),
            "run: captured 'slopes' is f32 [4]; expected the shape of its gradient, f32 [3]");
}

TEST(BackwardArguments, GradientsNeedMemoryOfTheirOwn) {
  Call call;
  AttentionBackward args = call.args();
  args.dq = view(call.q.data(), {2, 3, 4, 8});
  EXPECT_EQ(refusal_of(args), "run: dq overlaps q; expected memory of its own");
  args = call.args();
  args.dk = view(call.dq.data(), {2, 5, 2, 8});
  EXPECT_EQ(refusal_of(args), "run: dk overlaps dq; expected memory of its own");
  args = call.args();
  args.dv = view(call.out.data(), {2, 5, 2, 6});
  EXPECT_EQ(refusal_of(args), "run: dv overlaps out; expected memory of its own");
  args = call.args();
  args.dv = view(static_cast<const float*>(call.dv.data()), {2, 5, 2, 6});
  EXPECT_EQ(refusal_of(args), "run: dv is read-only; expected a view of writable memory");
}

}  // namespace
}  // namespace fovea::testing
