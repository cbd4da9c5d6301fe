// Probabilities against the oracle, for every feature; their layout; what is refused.
#include "fovea/probabilities.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "reference/attention_probabilities.hpp"
#include "support/compare.hpp"
#include "support/features.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// A case and where its probabilities are written: NaN between guards.
struct Probed {
  explicit Probed(const Case& of, Dtype dtype = Dtype::f32, std::int64_t more_rows = 0)
      : problem(of), memory(of) {
    rows = of.max_seqlen_q() + more_rows;
    columns = of.max_seqlen_kv() + 2 * more_rows;
    out = GuardedTensor(of.drawn(dtype,
                                 std::vector{of.num_sequences(), of.num_heads_q, rows, columns},
                                 1500, Strides::of_output));
    out.poison();
  }

  AttentionProbabilities args() {
    AttentionForward forward = memory.args();
    forward.v = forward.out = {};  // neither matters
    return {.forward = forward, .probabilities = out.mutable_view()};
  }

  Case problem;
  CaseMemory memory;
  std::int64_t rows = 0, columns = 0;
  GuardedTensor out;
};

/// Relative to p: twice the error of a score, which has the rounding of a product and some of programs, at most 16 of
/// the larger of the score and 1; and the result's own. What is far below a row's largest is 0.
double allowed(Dtype dtype, double p, double score) {
  return 32 * 0x1p-24 * std::max(1.0, std::fabs(score)) * p + rounding(dtype, p) + 0x1p-99;
}

void expect_equals_oracle(Probed& probed, const std::string& label) {
  const AttentionProbabilities args = probed.args();
  attention_probabilities(args);
  const auto expected =
      reference::attention_probabilities(args.forward, probed.rows, probed.columns);
  const std::vector<double> values = values_of(args.probabilities);
  ASSERT_EQ(values.size(), expected.values.size()) << label;
  double largest = 0;
  for (const double score : expected.final_score) largest = std::max(largest, std::fabs(score));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double want = expected.values[i];
    ASSERT_NEAR(values[i], want, allowed(args.probabilities.dtype(), std::fabs(want), largest))
        << label << ' ' << i;
    ASSERT_EQ(std::signbit(values[i]), expected.is_dropped[i]) << label << ' ' << i;
  }
  EXPECT_EQ(probed.memory.damage(), "") << label;
  EXPECT_TRUE(probed.out.has_intact_guards()) << label;
}

TEST(Probabilities, EveryFeatureEqualsTheOracle) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (const Feature& feature : features()) {
      Case problem = plain_case(dtype);
      feature.add(problem);
      Probed probed(problem, dtype);
      expect_equals_oracle(probed, std::string(feature.name) + ' ' + std::string(name(dtype)));
    }
  }
}

/// Rows of several panels, heads that share keys, all kinds of features at once.
Case mixed_case() {
  Case problem = plain_case(Dtype::f32);
  problem.seqlen_q = 37;
  problem.num_heads_q = 4;
  problem.num_heads_kv = 2;
  problem.score = softcap(3) | parse_score_mod("score + 0.1 * (kv_head - q_head) * q_idx");
  problem.mask = causal() && !parse_mask_mod("kv_idx % 7 == 3");
  problem.has_sinks = true;
  problem.dropout = {.p = 0.2F, .seed = 11};
  return problem;
}

TEST(Probabilities, CombinationsEqualTheOracle) {
  Case problem = mixed_case();
  Probed dense(problem);
  expect_equals_oracle(dense, "dense");
  problem.sequences = {{3, 0}, {20, 50}, {0, 2}, {40, 30}};
  problem.trailing_rows = 2;
  Probed packed(problem);
  expect_equals_oracle(packed, "packed");
  Probed larger(problem, Dtype::bf16, 5);
  expect_equals_oracle(larger, "packed, more rows and columns than the longest");
  problem.dropout.p = 1;
  Probed dropped(problem);
  expect_equals_oracle(dropped, "all dropped");
}

TEST(Probabilities, OddSizesEqualTheOracle) {
  for (const std::int64_t seqlen_q : {0, 1, 15, 16, 17}) {   // around the widest panel
    for (const std::int64_t seqlen_kv : {0, 1, 128, 129}) {  // around what a program takes at once
      Case problem = mixed_case();
      problem.mask = causal();
      problem.seqlen_q = seqlen_q;
      problem.seqlen_kv = seqlen_kv;
      problem.layout_seed = static_cast<std::uint64_t>(seqlen_q + seqlen_kv);
      Probed probed(problem);
      expect_equals_oracle(probed, problem.describe());
    }
  }
}

TEST(Probabilities, KeptOnesTimesValuesAreTheOutput) {
  Case problem = plain_case(Dtype::f32);
  problem.mask = causal();
  problem.has_sinks = true;
  problem.dropout = kSomeDropped;
  Probed probed(problem);
  attention_forward(probed.memory.args());
  attention_probabilities(probed.args());
  const std::vector<double> p = values_of(probed.out.view());
  const std::vector<double> v = values_of(probed.memory.v.view());
  const std::vector<double> out = values_of(probed.memory.out.view());
  const std::int64_t heads = problem.num_heads_q, group = heads / problem.num_heads_kv;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    const std::int64_t d = at % problem.head_dim_v, head = at / problem.head_dim_v % heads;
    const std::int64_t row = at / problem.head_dim_v / heads % problem.seqlen_q;
    const std::int64_t batch = at / problem.head_dim_v / heads / problem.seqlen_q;
    double sum = 0;
    for (std::int64_t key = 0; key < problem.seqlen_kv; ++key) {
      const auto p_at = static_cast<std::size_t>(
          ((batch * heads + head) * problem.seqlen_q + row) * problem.seqlen_kv + key);
      const auto v_at = static_cast<std::size_t>(
          ((batch * problem.seqlen_kv + key) * problem.num_heads_kv + head / group) *
              problem.head_dim_v +
          d);
      // What nobody sees is poison there.
      if (p[p_at] > 0) sum += p[p_at] / (1 - static_cast<double>(problem.dropout.p)) * v[v_at];
    }
    ASSERT_NEAR(out[i], sum, 1e-5) << i;
  }
}

TEST(Probabilities, NanInSightReachesItsRowsAlone) {
  Case problem = plain_case(Dtype::f32);
  Probed probed(problem);
  probed.memory.q.set(0, std::nan(""));  // query 0 of head 0
  attention_probabilities(probed.args());
  const std::vector<double> p = values_of(probed.out.view());
  for (std::size_t i = 0; i < p.size(); ++i)
    ASSERT_EQ(std::isnan(p[i]), i < static_cast<std::size_t>(problem.seqlen_kv)) << i;
}

TEST(Probabilities, PanelsAndTilesEqualTheOracle) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (const Lengths& lengths : {Lengths{97, 300}, {48, 128}, {49, 257}, {2, 500}}) {
      Case problem{.label = "panels",
                   .batch = 2,
                   .seqlen_q = lengths.q,
                   .seqlen_kv = lengths.kv,
                   .num_heads_q = 2,
                   .head_dim_qk = 40,
                   .dtype = dtype};
      for (const bool has_sinks : {false, true}) {
        problem.has_sinks = has_sinks;
        for (const MaskMod& mask : {MaskMod(), causal() && parse_mask_mod("q_idx % 5 != 2")}) {
          problem.mask = mask;
          problem.layout_seed += 1;
          Probed probed(problem, dtype);
          expect_equals_oracle(probed, problem.describe());
        }
      }
    }
  }
}

TEST(Probabilities, HiddenKeysOfRowsThatSeeNanAreZero) {
  Case problem = plain_case(Dtype::f32);
  problem.seqlen_q = problem.seqlen_kv = 60;
  problem.mask = causal();
  problem.poisons_hidden_keys = false;
  for (const double value : {std::nan(""), static_cast<double>(kInfinity)}) {
    Probed probed(problem);
    set_row(probed.memory.k, {.batch = 0, .row = 20, .head = 0}, value);
    attention_probabilities(probed.args());
    const std::vector<double> p = values_of(probed.out.view());
    for (std::int64_t row = 0; row < 60; ++row) {
      for (std::int64_t key = 0; key < 60; ++key) {
        const double got = p[static_cast<std::size_t>(row * 60 + key)];
        if (key > row) {
          ASSERT_EQ(got, 0) << row << ' ' << key;
          ASSERT_FALSE(std::signbit(got)) << row << ' ' << key;
        } else if (row < 20) {
          ASSERT_TRUE(std::isfinite(got)) << row << ' ' << key;
        } else if (std::isnan(value)) {
          ASSERT_TRUE(std::isnan(got)) << row << ' ' << key;
        }
      }
    }
  }
}

TEST(Probabilities, SinksThatAreNotFiniteAgreeWithTheFormula) {
  Case problem = plain_case(Dtype::f32);
  problem.has_sinks = true;
  for (const double sink :
       {std::nan(""), static_cast<double>(kInfinity), -static_cast<double>(kInfinity), 1e4}) {
    Probed probed(problem);
    for (std::int64_t head = 0; head < problem.num_heads_q; ++head)
      probed.memory.sinks.set(head * probed.memory.sinks.view().stride(0), sink);
    attention_probabilities(probed.args());
    for (const double p : values_of(probed.out.view())) {
      if (std::isnan(sink)) {
        ASSERT_TRUE(std::isnan(p));
      } else if (sink > 0) {
        ASSERT_EQ(p, 0) << sink;
      } else {
        ASSERT_TRUE(0 < p && p < 1) << sink;
      }
    }
  }
}

std::string refusal(const AttentionProbabilities& args) {
  try {
    attention_probabilities(args);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(Probabilities, RefusesByNameBeforeAnythingIsWritten) {
  Case problem = plain_case(Dtype::f32);
  Probed probed(problem);
  probed.out.seal();
  AttentionProbabilities args = probed.args();
  args.probabilities = {};
  EXPECT_THAT(refusal(args), HasSubstr("attention_probabilities: probabilities is missing; "
                                       "expected f32, f16 or bf16 ["));
  args = probed.args();
  args.forward.k = {};
  EXPECT_THAT(refusal(args), HasSubstr("k is missing"));
  args = probed.args();
  args.forward.dropout.p = 2;
  EXPECT_THAT(refusal(args), HasSubstr("dropout.p is 2; expected a probability in [0, 1]"));
  problem.seqlen_kv += 1;
  Probed longer(problem);
  args = longer.args();
  args.probabilities = probed.out.mutable_view();
  EXPECT_THAT(refusal(args), HasSubstr("probabilities is f32"));
  args = probed.args();
  args.probabilities =
      TensorView(const_cast<void*>(args.forward.q.data()), args.probabilities.spec());
  EXPECT_THAT(refusal(args), HasSubstr("overlap"));
  EXPECT_TRUE(probed.out.is_unchanged());
}

}  // namespace
}  // namespace fovea::testing
