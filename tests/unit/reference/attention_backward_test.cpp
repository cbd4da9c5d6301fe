#include "reference/attention_backward.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "core/philox.hpp"
#include "expr/node.hpp"
#include "reference/attention_forward.hpp"
#include "reference/element.hpp"
#include "support/features.hpp"
#include "support/gradient_case.hpp"
#include "support/numeric_gradient.hpp"
#include "support/random.hpp"

namespace fovea::reference {
namespace {

using testing::Case;
using testing::GradientCase;
using testing::GradientMemory;
using testing::GuardedTensor;
using testing::Layout;
using testing::NamedTensor;
using testing::Random;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// L = <dout, out> + <dlse, lse>, over what is finite: empty rows have lse -inf, and NaN as dout.
double loss(const AttentionBackward& args) {
  const ForwardResult result = reference::attention_forward(args.forward);
  const std::vector<double> dout = elements(args.dout);
  double sum = 0;
  for (std::size_t i = 0; i < dout.size(); ++i) {
    if (result.out[i] != 0) sum += dout[i] * result.out[i];
  }
  if (!args.dlse) return sum;
  const std::vector<double> dlse = elements(args.dlse);
  for (std::size_t i = 0; i < dlse.size(); ++i) {
    if (result.lse[i] != -kInfinity) sum += dlse[i] * result.lse[i];
  }
  return sum;
}

void expect_meets_differences(const Case& problem) {
  SCOPED_TRACE(problem.describe());
  GradientMemory memory({.forward = problem});
  for (GuardedTensor* each : {&memory.forward.q, &memory.forward.k, &memory.forward.v})
    testing::round_to_grid(*each);
  testing::round_to_grid(memory.forward.sinks);
  for (const auto& each : problem.captured) testing::round_to_grid(*each);

  const BackwardResult got = reference::attention_backward(memory.args());
  const auto l = [&] { return loss(memory.args()); };
  testing::expect_is_gradient(got.dq, memory.forward.q, l, "dq");
  testing::expect_is_gradient(got.dk, memory.forward.k, l, "dk");
  testing::expect_is_gradient(got.dv, memory.forward.v, l, "dv");
  if (problem.has_sinks) testing::expect_is_gradient(got.dsinks, memory.forward.sinks, l, "dsinks");
  for (const CapturedTensor& each : problem.score.captures().tensors) {
    for (const auto& owner : problem.captured) {
      if (owner->view().data() != each.view.data()) continue;
      if (expr::type_of(each.view.dtype()) != ExprType::floating) continue;
      testing::expect_is_gradient(got.dcaptured.at(each.name), *owner, l, each.name);
    }
  }
}

/// Seven keys: neither a power of two nor a multiple of the queries.
Case small() {
  return {.label = "small",
          .batch = 2,
          .seqlen_q = 4,
          .seqlen_kv = 7,
          .num_heads_q = 2,
          .num_heads_kv = 2,
          .head_dim_qk = 3,
          .head_dim_v = 2};
}

TEST(ReferenceBackward, PlainMeetsFiniteDifferences) { expect_meets_differences(small()); }

TEST(ReferenceBackward, GroupedHeadsAndCausalMeetFiniteDifferences) {
  Case problem = small();
  problem.num_heads_q = 6;
  problem.mask = causal();
  expect_meets_differences(problem);
  problem.num_heads_kv = 1;
  problem.mask = causal(Align::top_left);
  expect_meets_differences(problem);
}

TEST(ReferenceBackward, EveryLayoutMeetsFiniteDifferences) {
  for (const Layout layout : testing::kInputLayouts) {
    Case problem = small();
    problem.layout = layout;
    expect_meets_differences(problem);
  }
}

TEST(ReferenceBackward, SinksDropoutAndScaleMeetFiniteDifferences) {
  Case problem = small();
  problem.has_sinks = true;
  expect_meets_differences(problem);
  problem.dropout = {.p = 0.4F, .seed = 3, .offset = 1};
  problem.softmax_scale = -0.75F;
  expect_meets_differences(problem);
}

TEST(ReferenceBackward, PackedSequencesMeetFiniteDifferences) {
  Case problem = small();
  problem.sequences = {{3, 0}, {2, 5}, {0, 2}, {4, 3}};
  problem.trailing_rows = 2;
  problem.mask = causal();
  problem.has_sinks = true;
  expect_meets_differences(problem);
  problem.has_sinks = false;
  expect_meets_differences(problem);
}

/// The programs and masks of the library, by the names of support/features.hpp.
TEST(ReferenceBackward, EveryProgramMeetsFiniteDifferences) {
  for (const testing::Feature& feature : testing::features()) {
    Case problem = small();
    feature.add(problem);
    const bool is_program = !problem.score.is_identity() || !problem.mask.is_all_visible();
    if (is_program) expect_meets_differences(problem);
  }
}

TEST(ReferenceBackward, ProgramsInARowMeetFiniteDifferences) {
  Case problem = small();
  problem.has_sinks = true;
  for (const testing::Feature& feature : testing::features()) {
    for (const std::string_view name : {"softcap", "alibi", "bias", "broadcast_bias", "causal"}) {
      if (feature.name == name) feature.add(problem);
    }
  }
  expect_meets_differences(problem);
}

/// One head, head_dim 1, scale 1, q = 1: scores are the keys, and answers can be worked out on paper.
struct Line {
  std::vector<float> k, v;
  float dout = 1;
  std::vector<float> dlse{};
  std::vector<float> sink{};

  BackwardResult run(AttentionBackward args = {}) const {
    const auto num_kv = static_cast<std::int64_t>(k.size());
    const float q = 1;
    args.forward.q = view(&q, {1, 1, 1, 1});
    args.forward.k = view(k.data(), {1, num_kv, 1, 1});
    args.forward.v = view(v.data(), {1, num_kv, 1, 1});
    if (!args.forward.softmax_scale) args.forward.softmax_scale = 1;
    if (!sink.empty()) args.forward.sinks = view(sink.data(), {1});
    args.dout = view(&dout, {1, 1, 1, 1});
    if (!dlse.empty()) args.dlse = view(dlse.data(), {1, 1, 1});
    return reference::attention_backward(args);
  }
};

const float kLog3 = std::log(3.F);

TEST(ReferenceBackward, TwoKeysAreWorkedOutOnPaper) {
  // p = 1/4, 3/4; dp = v; delta = 1/4 · 4 + 3/4 · 8 = 7; ds = 1/4 · -3, 3/4 · 1.
  const BackwardResult got = Line{.k = {0, kLog3}, .v = {4, 8}}.run();
  EXPECT_NEAR(got.dk[0], -0.75, 1e-7);
  EXPECT_NEAR(got.dk[1], 0.75, 1e-7);
  EXPECT_NEAR(got.dq[0], 0.75 * static_cast<double>(kLog3), 1e-7);
  EXPECT_NEAR(got.dv[0], 0.25, 1e-7);
  EXPECT_NEAR(got.dv[1], 0.75, 1e-7);
}

TEST(ReferenceBackward, GradientOfLseIsTheSoftmax) {
  const BackwardResult got = Line{.k = {0, kLog3}, .v = {4, 8}, .dout = 0, .dlse = {2}}.run();
  EXPECT_NEAR(got.dk[0], 0.5, 1e-7);
  EXPECT_NEAR(got.dk[1], 1.5, 1e-7);
  EXPECT_EQ(got.dv[0], 0);
}

TEST(ReferenceBackward, SinkTakesWhatKeysGive) {
  // p = 1/5, 3/5 and the sink's 1/5: delta = 4/5 + 24/5.
  const BackwardResult got = Line{.k = {0, kLog3}, .v = {4, 8}, .sink = {0}}.run();
  ASSERT_EQ(got.dsinks.size(), 1U);
  EXPECT_NEAR(got.dsinks[0], -5.6 / 5, 1e-7);
  EXPECT_NEAR(got.dk[0] + got.dk[1] + got.dsinks[0], 0, 1e-12);
}

TEST(ReferenceBackward, RowWithASinkAloneGivesItTheGradientOfLse) {
  AttentionBackward args;
  args.forward.mask = mask_mod([](auto x) { return x.kv_idx < 0; });
  const Line line{.k = {1}, .v = {2}, .dlse = {3}, .sink = {0.5F}};
  EXPECT_EQ(line.run(args).dsinks[0], 3);
  EXPECT_EQ(line.run(args).dk[0], 0);
}

TEST(ReferenceBackward, EmptyRowPassesNothingWhateverItsGradients) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  AttentionBackward args;
  args.forward.mask = mask_mod([](auto x) { return x.kv_idx < 0; });
  const BackwardResult got = Line{.k = {nan}, .v = {nan}, .dout = nan, .dlse = {nan}}.run(args);
  EXPECT_EQ(got.dq[0], 0);
  EXPECT_EQ(got.dk[0], 0);
  EXPECT_EQ(got.dv[0], 0);
}

TEST(ReferenceBackward, HiddenKeysHaveNoEffectAndGradientZero) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  AttentionBackward masked;
  masked.forward.mask = mask_mod([](auto x) { return x.kv_idx != 1; });
  AttentionBackward biased;
  biased.forward.score =
      score_mod([](auto x) { return select(x.kv_idx == 1, -INFINITY, x.score); });
  const Line clean{.k = {0, 9, kLog3}, .v = {4, 9, 8}};
  const Line dirty{.k = {0, nan, kLog3}, .v = {4, infinity, 8}};
  for (const AttentionBackward& args : {masked, biased}) {
    const BackwardResult got = dirty.run(args);
    EXPECT_EQ(got.dq, clean.run(args).dq);
    EXPECT_EQ(got.dk, clean.run(args).dk);
    EXPECT_EQ(got.dv, clean.run(args).dv);
    EXPECT_EQ(got.dk[1], 0);
    EXPECT_EQ(got.dv[1], 0);
  }
}

TEST(ReferenceBackward, NaNInSightReachesItsRowAndItsKeys) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const BackwardResult got = Line{.k = {0, nan}, .v = {4, 8}}.run();
  EXPECT_TRUE(std::isnan(got.dq[0]) && std::isnan(got.dk[0]) && std::isnan(got.dv[1]));
  Case problem = small();
  problem.batch = 1;
  problem.seqlen_kv = 4;
  problem.mask = causal();
  GradientMemory memory({.forward = problem});
  testing::set_row(memory.forward.k, {.batch = 0, .row = 2, .head = 0}, kInfinity);
  const BackwardResult spoiled = reference::attention_backward(memory.args());
  const auto is_spoiled = [](const std::vector<double>& values, std::size_t row, std::size_t dim) {
    return !std::isfinite(values[row * 2 * dim]);  // of head 0
  };
  EXPECT_FALSE(is_spoiled(spoiled.dq, 1, 3));
  EXPECT_TRUE(is_spoiled(spoiled.dq, 2, 3));
  EXPECT_TRUE(is_spoiled(spoiled.dk, 0, 3));  // rows 2 and 3 see key 0
  EXPECT_TRUE(std::isfinite(spoiled.dk[3]));  // head 1
}

TEST(ReferenceBackward, DroppedKeysPassNothingToTheirValues) {
  AttentionBackward args;
  args.forward.dropout = {.p = 0.5F, .seed = 11, .offset = 3};
  const std::vector<float> zeros(8, 0.F);
  const BackwardResult got = Line{.k = zeros, .v = {1, 2, 3, 4, 5, 6, 7, 8}}.run(args);
  const philox::Key key = philox::dropout_key(11, 3);
  for (std::int64_t j = 0; j < 8; ++j) {
    const bool keeps = philox::random_word(key, 0, 0, 0, j) >= 0x80000000U;
    EXPECT_NEAR(got.dv[static_cast<std::size_t>(j)], keeps ? 0.25 : 0, 1e-12);
  }
  args.forward.dropout.p = 1;
  EXPECT_EQ((Line{.k = {1, 2}, .v = {3, 4}}.run(args).dq[0]), 0);
}

TEST(ReferenceBackward, EveryCapturedFloatHasAGradientByItsName) {
  const float slopes[] = {2, 3};
  const std::int32_t table[] = {1, 0};
  const Captures captures{.tensors = {{"slopes", view(slopes, {2})}, {"table", view(table, {2})}},
                          .scalars = {CapturedScalar::of("gain", 0.5), CapturedScalar::of("n", 4)}};
  AttentionBackward args;
  args.forward.score = parse_score_mod("gain * score + slopes[table[kv_idx]] + float(n)", captures);
  const BackwardResult got = Line{.k = {0, 1}, .v = {4, 8}}.run(args);
  ASSERT_EQ(got.dcaptured.size(), 2U);
  // Key 0 reads slopes[1], key 1 slopes[0]; ds sums to 0 over the keys.
  const std::vector<double>& by_slopes = got.dcaptured.at("slopes");
  EXPECT_NEAR(by_slopes[0], got.dk[1] / 0.5, 1e-12);
  EXPECT_NEAR(by_slopes[1], got.dk[0] / 0.5, 1e-12);
  EXPECT_NEAR(by_slopes[0] + by_slopes[1], 0, 1e-12);
  EXPECT_NEAR(got.dcaptured.at("gain")[0], by_slopes[0], 1e-12);  // scores are 0 and 1
}

// ---- Backward of backward ----

double inner(const std::vector<double>& a, const TensorView& b) {
  const std::vector<double> other = elements(b);
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] != 0) sum += a[i] * other[i];  // tangents of rows that see nothing are NaN
  }
  return sum;
}

AttentionDoubleBackward double_args(GradientMemory& memory) {
  const AttentionJvp direction = memory.jvp_args();
  return {.backward = memory.args(),
          .ddq = direction.q_tangent,
          .ddk = direction.k_tangent,
          .ddv = direction.v_tangent,
          .ddsinks = direction.sinks_tangent,
          .ddcaptured = direction.captured_tangents};
}

/// <ddq, dq> and so on, of the oracle's backward.
double inner(const BackwardResult& gradients, const AttentionDoubleBackward& args) {
  double sum =
      inner(gradients.dq, args.ddq) + inner(gradients.dk, args.ddk) + inner(gradients.dv, args.ddv);
  if (args.ddsinks) sum += inner(gradients.dsinks, args.ddsinks);
  for (const CapturedTensor& each : args.ddcaptured)
    sum += inner(gradients.dcaptured.at(each.name), each.view);
  return sum;
}

void expect_double_meets_differences(const Case& problem) {
  SCOPED_TRACE(problem.describe());
  GradientMemory memory({.forward = problem});
  for (GuardedTensor* each : {&memory.forward.q, &memory.forward.k, &memory.forward.v,
                              &memory.forward.sinks, &memory.dout, &memory.dlse})
    testing::round_to_grid(*each);
  for (const auto& each : problem.captured) testing::round_to_grid(*each);
  const DoubleBackwardResult got = reference::attention_double_backward(double_args(memory));
  const auto l = [&] {
    return inner(reference::attention_backward(memory.args()), double_args(memory));
  };
  testing::expect_is_gradient(got.grad_q, memory.forward.q, l, "grad_q");
  testing::expect_is_gradient(got.grad_k, memory.forward.k, l, "grad_k");
  testing::expect_is_gradient(got.grad_v, memory.forward.v, l, "grad_v");
  testing::expect_is_gradient(got.grad_dout, memory.dout, l, "grad_dout");
  testing::expect_is_gradient(got.grad_dlse, memory.dlse, l, "grad_dlse");
  if (problem.has_sinks)
    testing::expect_is_gradient(got.grad_sinks, memory.forward.sinks, l, "grad_sinks");
  for (const CapturedTensor& each : problem.score.captures().tensors) {
    for (const auto& owner : problem.captured) {
      if (owner->view().data() == each.view.data())
        testing::expect_is_gradient(got.grad_captured.at(each.name), *owner, l, each.name);
    }
  }
}

/// Captured floats that meet the score and each other in every way: sums, products, inside a function, twice.
Case captured_case() {
  Case problem = small();
  problem.num_heads_q = 4;
  const auto wave = [](double step) {
    return [step](std::int64_t i) { return std::sin(step * static_cast<double>(i + 1)); };
  };
  const TensorView slopes = problem.capture(Dtype::f32, {4}, wave(1.3));
  const TensorView table = problem.capture(Dtype::f32, {4, 7}, wave(0.7));
  problem.score = parse_score_mod(
      "gain * score * slopes[q_head] + table[q_idx, kv_idx] * tanh(score + slopes[kv_head]) + "
      "exp(0.3 * table[kv_idx, q_idx] * slopes[q_head])",
      {.tensors = {{"slopes", slopes}, {"table", table}},
       .scalars = {CapturedScalar::of("gain", 0.75)}});
  return problem;
}

TEST(ReferenceDoubleBackward, MeetsFiniteDifferencesOfBackward) {
  Case problem = small();
  expect_double_meets_differences(problem);
  problem.num_heads_q = 4;
  problem.has_sinks = true;
  problem.mask = causal();
  problem.dropout = {.p = 0.3F, .seed = 1, .offset = 2};
  expect_double_meets_differences(problem);
}

TEST(ReferenceDoubleBackward, CurvedProgramsMeetFiniteDifferences) {
  Case problem = small();
  problem.score = softcap(1.5F) | score_mod([](auto x) {
                    return x.score * sigmoid(x.score) / (2.0 + exp2(-x.score)) +
                           log(3.0 + x.score * x.score) + rsqrt(4.0 + exp(x.score));
                  });
  expect_double_meets_differences(problem);
  problem.sequences = {{3, 0}, {2, 5}, {0, 2}, {4, 3}};
  problem.trailing_rows = 1;
  problem.mask = causal();
  expect_double_meets_differences(problem);
}

TEST(ReferenceDoubleBackward, CapturedFloatsAndSinksMeetFiniteDifferences) {
  Case problem = captured_case();
  expect_double_meets_differences(problem);
  problem.has_sinks = true;
  problem.mask = mask_mod([](auto x) { return x.kv_idx < x.q_idx; });  // row 0: its sink alone
  problem.dropout = {.p = 0.3F, .seed = 1, .offset = 2};
  expect_double_meets_differences(problem);
}

/// A scalar's value lies in the program, not in memory: two programs tell the slope.
TEST(ReferenceDoubleBackward, CapturedScalarsMeetFiniteDifferences) {
  const auto with_gain = [](double gain) {
    Case problem = small();
    problem.score = parse_score_mod("score * gain + gain * gain * tanh(score)",
                                    {.tensors = {}, .scalars = {CapturedScalar::of("gain", gain)}});
    return problem;
  };
  const auto l = [&](double gain) {
    GradientMemory memory({.forward = with_gain(gain)});
    return inner(reference::attention_backward(memory.args()), double_args(memory));
  };
  GradientMemory memory({.forward = with_gain(0.75)});
  const DoubleBackwardResult got = reference::attention_double_backward(double_args(memory));
  const double step = 0x1p-12;
  const double slope = (l(0.75 + step) - l(0.75 - step)) / (2 * step);
  EXPECT_NEAR(got.grad_captured.at("gain")[0], slope, 1e-6 * (1 + std::fabs(slope)));
}

TEST(ReferenceDoubleBackward, WhatIsNotGivenIsZero) {
  GradientMemory memory({.forward = small()});
  AttentionDoubleBackward args = double_args(memory);
  args.ddq = args.ddk = {};
  const DoubleBackwardResult got = reference::attention_double_backward(args);
  for (const double each : got.grad_dlse) EXPECT_EQ(each, 0);  // dv does not know of dlse
}

}  // namespace
}  // namespace fovea::reference
