// Gradients of gradients against the oracle, for every feature; what is refused and what explain says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "fovea/backward.hpp"

#include "reference/attention_backward.hpp"
#include "support/compare.hpp"
#include "support/features.hpp"
#include "support/gradient_case.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

/// The memory of a gradient problem, its tangents in the part of ddq, ddk, ddv, ddsinks and ddcaptured.
AttentionDoubleBackward call_of(GradientMemory& memory) {
  memory.poison_outputs();
  AttentionBackward backward = memory.args();
  const AttentionJvp tangents = memory.jvp_args();
  AttentionDoubleBackward args{.backward = backward,
                               .ddq = tangents.q_tangent,
                               .ddk = tangents.k_tangent,
                               .ddv = tangents.v_tangent,
                               .ddsinks = tangents.sinks_tangent,
                               .ddcaptured = tangents.captured_tangents,
                               .grad_dout = tangents.out_tangent,
                               .grad_dlse = tangents.lse_tangent,
                               .grad_q = backward.dq,
                               .grad_k = backward.dk,
                               .grad_v = backward.dv,
                               .grad_sinks = backward.dsinks,
                               .grad_captured = backward.dcaptured};
  args.backward.dq = args.backward.dk = args.backward.dv = args.backward.dsinks = {};
  args.backward.dcaptured.clear();
  return args;
}

/// Products and sums are fp64: what differs are programs in fp32, and one rounding.
void expect_near(const TensorView& got, const std::vector<double>& expected,
                 const std::string& what) {
  const std::vector<double> values = values_of(got);
  ASSERT_EQ(values.size(), expected.size()) << what;
  double largest = 0;
  for (const double value : expected) {
    ASSERT_TRUE(std::isfinite(value)) << what;
    largest = std::max(largest, std::fabs(value));
  }
  const double rounding = got.dtype() == Dtype::f32   ? 0x1p-24
                          : got.dtype() == Dtype::f16 ? 0x1p-11
                                                      : 0x1p-8;
  const double programs = 64 * 0x1p-24 * largest;  // scores of tens, some roundings each
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(values[i], expected[i], programs + rounding * std::fabs(expected[i]) + 0x1p-25)
        << what << ' ' << i;
  }
}

void expect_equals_oracle(const Case& problem, const std::string& label) {
  GradientMemory memory({.forward = problem, .gradient_dtype = Dtype::f32});
  const AttentionDoubleBackward args = call_of(memory);
  attention_double_backward(args);
  const reference::DoubleBackwardResult expected = reference::attention_double_backward(args);
  expect_near(args.grad_dout, expected.grad_dout, label + ": grad_dout");
  expect_near(args.grad_dlse, expected.grad_dlse, label + ": grad_dlse");
  expect_near(args.grad_q, expected.grad_q, label + ": grad_q");
  expect_near(args.grad_k, expected.grad_k, label + ": grad_k");
  expect_near(args.grad_v, expected.grad_v, label + ": grad_v");
  if (args.grad_sinks) expect_near(args.grad_sinks, expected.grad_sinks, label + ": grad_sinks");
  for (const CapturedTensor& each : args.grad_captured) {
    expect_near(each.view, expected.grad_captured.at(each.name),
                label + ": gradient of " + each.name);
  }
  EXPECT_EQ(memory.damage(), "") << label;
}

TEST(DoubleBackward, EveryFeatureEqualsTheOracle) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    expect_equals_oracle(plain_case(dtype), "plain");
    for (const Feature& feature : features()) {
      Case problem = plain_case(dtype);
      feature.add(problem);
      expect_equals_oracle(problem, std::string(feature.name) + ' ' + std::string(name(dtype)));
    }
  }
}

/// A program whose second derivative is not 0, heads that share a panel, several panels.
Case curved_case() {
  Case problem = plain_case(Dtype::f32);
  problem.seqlen_q = 37;
  problem.num_heads_q = 4;
  problem.num_heads_kv = 2;
  problem.score = softcap(3) | parse_score_mod("score + 0.1 * score * score");
  problem.mask = causal();
  problem.has_sinks = true;
  problem.dropout = {.p = 0.2F, .seed = 11};
  return problem;
}

TEST(DoubleBackward, CurvedProgramsEqualTheOracle) {
  expect_equals_oracle(curved_case(), "curved");
}

/// A table and slopes that meet the score, each other and themselves; and a scalar.
Case captured_case() {
  Case problem = curved_case();
  const auto wave = [](double step) {
    return [step](std::int64_t i) { return 0.5 * std::sin(step * static_cast<double>(i + 1)); };
  };
  const TensorView slopes = problem.capture(Dtype::f32, {4}, wave(1.3));
  const TensorView table = problem.capture(Dtype::bf16, {5, 9}, wave(0.7));  // most indices clamped
  problem.score = parse_score_mod(
      "gain * score * slopes[q_head] + table[q_idx, kv_idx] * tanh(score + slopes[kv_head]) + "
      "exp(0.3 * table[kv_idx - q_idx, 2] * slopes[q_head])",
      {.tensors = {{"slopes", slopes}, {"table", table}},
       .scalars = {CapturedScalar::of("gain", 0.75)}});
  return problem;
}

TEST(DoubleBackward, CapturedFloatsEqualTheOracle) {
  Case problem = captured_case();
  expect_equals_oracle(problem, "captured");
  problem.mask = mask_mod([](auto x) { return x.kv_idx < x.q_idx; });  // row 0 sees its sink alone
  expect_equals_oracle(problem, "captured, a row of a sink alone");
  problem.sequences = {{3, 0}, {20, 50}, {0, 2}, {40, 30}};
  problem.trailing_rows = 2;
  expect_equals_oracle(problem, "captured, packed");
}

/// 72 items are more than the tasks that share them out.
TEST(DoubleBackward, SumsOfManyItemsEqualTheOracle) {
  Case problem = captured_case();
  problem.batch = 9;
  problem.num_heads_q = problem.num_heads_kv = 8;
  problem.seqlen_q = 5;
  problem.seqlen_kv = 7;
  expect_equals_oracle(problem, "many items");
}

double inner(const TensorView& a, const TensorView& b) {
  const std::vector<double> x = values_of(a), y = values_of(b);
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (x[i] != 0) sum += x[i] * y[i];  // what nobody sees has gradient 0, and tangents of NaN
  }
  return sum;
}

/// What is differentiated twice is one function of q, k, v, sinks and captured floats: <b, H a> = <a, H b>.
TEST(DoubleBackward, SecondDerivativesAreSymmetric) {
  Case problem = captured_case();
  GradientMemory first({.forward = problem, .gradient_dtype = Dtype::f32});
  problem.label = "another direction";
  GradientMemory second({.forward = problem, .gradient_dtype = Dtype::f32});
  for (GuardedTensor* each :
       {&second.q_tangent, &second.k_tangent, &second.v_tangent, &second.sinks_tangent}) {
    const std::vector<double> values = values_of(each->view());
    each->fill([&](std::int64_t i) {
      return std::cos(3.0 * values[static_cast<std::size_t>(i)] + static_cast<double>(i));
    });
  }
  for (NamedTensor& each : second.captured_tangents)
    each.tensor.fill([](std::int64_t i) { return std::cos(static_cast<double>(2 * i + 1)); });
  AttentionDoubleBackward a = call_of(first);
  AttentionDoubleBackward b = call_of(second);
  b.backward.forward = a.backward.forward;
  b.backward.dout = a.backward.dout;
  b.backward.dlse = a.backward.dlse;
  attention_double_backward(a);
  attention_double_backward(b);
  const auto along = [](const AttentionDoubleBackward& gradients,
                        const AttentionDoubleBackward& direction) {
    double sum = inner(gradients.grad_q, direction.ddq) + inner(gradients.grad_k, direction.ddk) +
                 inner(gradients.grad_v, direction.ddv) +
                 inner(gradients.grad_sinks, direction.ddsinks);
    for (std::size_t i = 0; i < gradients.grad_captured.size(); ++i)
      sum += inner(gradients.grad_captured[i].view, direction.ddcaptured[i].view);
    return sum;
  };
  const double forth = along(a, b), back = along(b, a);
  EXPECT_NEAR(forth, back, 1e-4 * std::max(1.0, std::fabs(forth)));
  EXPECT_GT(std::fabs(forth), 0.1);
}

TEST(DoubleBackward, BitsDoNotDependOnThreads) {
  GradientMemory memory({.forward = captured_case()});
  AttentionDoubleBackward args = call_of(memory);
  const auto bits = [&](Executor& executor) {
    args.executor = &executor;
    attention_double_backward(args);
    std::vector<std::uint64_t> all;
    for (const TensorView& view :
         std::initializer_list<TensorView>{args.grad_dout, args.grad_dlse, args.grad_q, args.grad_k,
                                           args.grad_v, args.grad_sinks}) {
      const std::vector<std::uint64_t> some = bits_of(view);
      all.insert(all.end(), some.begin(), some.end());
    }
    for (const CapturedTensor& each : args.grad_captured) {
      const std::vector<std::uint64_t> some = bits_of(each.view);
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  };
  const auto one = make_thread_pool(1), three = make_thread_pool(3);
  EXPECT_EQ(bits(*one), bits(*three));
}

TEST(DoubleBackward, WhatIsNotGivenIsZeroAndWhatIsNotWantedIsNotWritten) {
  GradientMemory memory({.forward = curved_case()});
  AttentionDoubleBackward args = call_of(memory);
  args.ddq = args.ddk = args.ddv = args.ddsinks = {};
  args.ddcaptured.clear();
  args.grad_k = {};
  attention_double_backward(args);
  for (const TensorView& view : std::initializer_list<TensorView>{
           args.grad_dout, args.grad_dlse, args.grad_q, args.grad_v, args.grad_sinks}) {
    for (const double value : values_of(view)) ASSERT_EQ(value, 0);
  }
}

std::string refusal(const AttentionDoubleBackward& args) {
  try {
    attention_double_backward(args);
  } catch (const Error& error) {
    return error.what();
  }
  return "(not refused)";
}

TEST(DoubleBackward, RefusesShapesAndOverlaps) {
  GradientMemory memory({.forward = curved_case()});
  const AttentionDoubleBackward right = call_of(memory);
  EXPECT_EQ(refusal(right), "(not refused)");
  AttentionDoubleBackward args = right;
  args.ddk = args.ddq;
  EXPECT_THAT(refusal(args), HasSubstr("attention_double_backward: ddk is f32 [2, 37, 4"));
  args = right;
  args.backward.dout = {};
  EXPECT_THAT(refusal(args), HasSubstr("attention_double_backward: dout is missing; expected f32"));
  args = right;
  args.backward.forward.out = {};
  EXPECT_EQ(refusal(args),
            "attention_double_backward: forward.out is missing; expected what attention_forward "
            "wrote");
  args = right;
  args.grad_q = args.ddq;
  EXPECT_EQ(refusal(args),
            "attention_double_backward: grad_q is read-only; expected a view of writable memory");
  args.grad_q = TensorView(const_cast<void*>(args.ddq.data()), args.ddq.spec());
  EXPECT_EQ(refusal(args),
            "attention_double_backward: grad_q overlaps ddq; expected memory of its own");
}

TEST(DoubleBackward, RefusesWrongSinksAndCapturedFloats) {
  GradientMemory memory({.forward = captured_case()});
  const AttentionDoubleBackward right = call_of(memory);
  EXPECT_EQ(refusal(right), "(not refused)");
  AttentionDoubleBackward args = right;
  args.backward.forward.sinks = {};
  EXPECT_EQ(refusal(args),
            "attention_double_backward: ddsinks is given without forward.sinks; expected both or "
            "neither");
  args.ddsinks = {};
  EXPECT_EQ(refusal(args),
            "attention_double_backward: grad_sinks is given without forward.sinks; expected both "
            "or neither");
  args = right;
  args.ddcaptured[0].name = "slope";
  EXPECT_THAT(refusal(args),
              HasSubstr("attention_double_backward: ddcaptured names 'slope'; expected one of"));
  args = right;
  args.grad_captured.push_back(args.grad_captured[0]);
  EXPECT_THAT(refusal(args), HasSubstr("grad_captured names 'slopes' twice; expected each name"));
  args = right;
  std::swap(args.grad_captured[0].view, args.grad_captured[1].view);
  EXPECT_THAT(refusal(args), HasSubstr("attention_double_backward: grad_captured 'slopes' is"));
  args = right;
  const TensorView& own = right.grad_captured[0].view;
  args.grad_captured[0].view = TensorView(own.data(), own.spec());
  EXPECT_THAT(refusal(args), HasSubstr("grad_captured 'slopes' is read-only"));
}

TEST(DoubleBackward, ExplainNamesThePlainPath) {
  GradientMemory memory({.forward = curved_case()});
  const Explanation explanation = explain_double_backward(call_of(memory));
  EXPECT_EQ(explanation.kernel, "cpu/attention_double_backward, the plain path");
  EXPECT_THAT(explanation.print(), HasSubstr("f64 products, fp64 sums"));
  EXPECT_THAT(explanation.print(), HasSubstr("refused    tiled kernels: none for gradients of"));
}

}  // namespace
}  // namespace fovea::testing
