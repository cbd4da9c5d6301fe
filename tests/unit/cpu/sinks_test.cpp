// Sinks that are no number, or infinite: forward, backward and forward mode, on every target and in the oracle.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "reference/attention_backward.hpp"
#include "reference/attention_forward.hpp"
#include "reference/attention_jvp.hpp"
#include "support/compare.hpp"
#include "support/gradient_case.hpp"
#include "support/gradient_compare.hpp"

namespace fovea::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::size_t kDim = 8;

/// Query 0 sees no key. Head 0 has the sink in question, head 1 an ordinary one and keys of its own. 1 + 2 queries are
/// few rows, 20 a panel.
GradientCase two_heads(Dtype dtype, std::int64_t seqlen_q) {
  return {.forward = {.label = "sinks",
                      .seqlen_q = seqlen_q,
                      .seqlen_kv = 150,
                      .num_heads_q = 2,
                      .num_heads_kv = 2,
                      .dtype = dtype,
                      .mask = mask_mod([](auto x) { return x.q_idx != 0; }),
                      .has_sinks = true,
                      .wants_row_max = false}};
}

template <typename Test>
void on_all(const Test& test) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (const std::int64_t seqlen_q : {3, 20}) {
      for (const double sink : {kNaN, kInfinity}) {
        SCOPED_TRACE(std::string(name(dtype)) + ", " + std::to_string(seqlen_q) +
                     " queries, sink " + std::to_string(sink));
        GradientMemory memory(two_heads(dtype, seqlen_q));
        memory.forward.sinks.set(0, sink);
        memory.forward.sinks.seal();
        test(memory, dtype, sink);
      }
    }
  }
}

/// Where NaN stands for every NaN.
void expect_is(double got, double expected, const std::string& what) {
  EXPECT_TRUE(std::isnan(expected) ? std::isnan(got) : got == expected) << what << " is " << got;
}

/// Of head 0: `blind` in the row that sees no key, `seeing` in the others. Head 1 is finite.
void expect_rows(const std::vector<double>& values, std::size_t width, double blind, double seeing,
                 const std::string& what) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t head = i / width % 2, row = i / width / 2;
    if (head == 0) {
      expect_is(values[i], row == 0 ? blind : seeing, what + " of row " + std::to_string(row));
    } else {
      EXPECT_TRUE(std::isfinite(values[i])) << what << " of the other head";
    }
  }
}

/// [heads, rows] as [rows, heads].
std::vector<double> by_row(const std::vector<double>& values) {
  std::vector<double> turned;
  for (std::size_t row = 0; row < values.size() / 2; ++row) {
    turned.push_back(values[row]);
    turned.push_back(values[values.size() / 2 + row]);
  }
  return turned;
}

void expect_forward(const std::vector<double>& out, const std::vector<double>& lse, double sink) {
  expect_rows(out, kDim, 0, std::isnan(sink) ? kNaN : 0, "out");
  expect_rows(by_row(lse), 1, sink, sink, "lse");
}

TEST(CpuSinks, OfInfinityTakeAllTheWeightAndNaNReachesRowsThatSeeAKey) {
  on_all([](GradientMemory& memory, Dtype dtype, double sink) {
    const auto oracle = reference::attention_forward(memory.forward.args());
    expect_forward(oracle.out, oracle.lse, sink);
    for (const CpuTarget target : targets_for(dtype)) {
      SCOPED_TRACE(fovea::name(target));
      memory.forward.poison_outputs();
      const AttentionForward args = memory.forward.args(target);
      attention_forward(args);
      expect_forward(values_of(args.out), values_of(args.lse), sink);
    }
  });
}

struct Gradients {
  std::vector<double> dq, dk, dv, dsinks;
};

void expect_backward(const Gradients& got, const std::vector<double>& dlse, double sink) {
  const double other = std::isnan(sink) ? kNaN : 0;
  expect_rows(got.dq, kDim, 0, other, "dq");
  expect_rows(got.dk, kDim, other, other, "dk");
  expect_rows(got.dv, kDim, other, other, "dv");
  EXPECT_TRUE(std::isfinite(got.dsinks[1]));
  if (std::isnan(sink)) return expect_is(got.dsinks[0], kNaN, "dsinks");
  double sum = 0;
  for (std::size_t row = 0; row < dlse.size() / 2; ++row) sum += dlse[row];
  EXPECT_NEAR(got.dsinks[0], sum, 1e-5);
}

TEST(CpuSinks, OfInfinityPassOnDlseAloneAndNaNReachesItsGradients) {
  on_all([](GradientMemory& memory, Dtype dtype, double sink) {
    const std::vector<double> dlse = values_of(memory.dlse.view());
    attention_forward(memory.forward.args());
    const auto oracle = reference::attention_backward(memory.args());
    expect_backward({oracle.dq, oracle.dk, oracle.dv, oracle.dsinks}, dlse, sink);
    for (const CpuTarget target : gradient_targets_for(dtype)) {
      SCOPED_TRACE(fovea::name(target));
      memory.poison_outputs();
      const AttentionBackward args = memory.args(target);
      attention_backward(args);
      expect_backward(
          {values_of(args.dq), values_of(args.dk), values_of(args.dv), values_of(args.dsinks)},
          dlse, sink);
    }
  });
}

void expect_jvp(const std::vector<double>& out, const std::vector<double>& lse, double sink_tangent,
                double sink) {
  const double other = std::isnan(sink) ? kNaN : 0;
  expect_rows(out, kDim, 0, other, "out_tangent");
  const std::vector<double> tangents = by_row(lse);
  for (std::size_t i = 0; i < tangents.size(); i += 2) {
    if (std::isnan(sink)) {
      expect_is(tangents[i], kNaN, "lse_tangent");
    } else {
      EXPECT_NEAR(tangents[i], sink_tangent, 1e-6);
    }
    EXPECT_TRUE(std::isfinite(tangents[i + 1]));
  }
}

TEST(CpuSinks, OfInfinityHaveTheTangentOfLseAndNaNReachesTangents) {
  on_all([](GradientMemory& memory, Dtype, double sink) {
    const double sink_tangent = values_of(memory.sinks_tangent.view())[0];
    const auto oracle = reference::attention_jvp(memory.jvp_args());
    expect_jvp(oracle.out_tangent, oracle.lse_tangent, sink_tangent, sink);
    for (const CpuTarget target : targets_for(Dtype::f32)) {
      SCOPED_TRACE(fovea::name(target));
      memory.poison_outputs();
      const AttentionJvp args = memory.jvp_args(target);
      attention_jvp(args);
      expect_forward(values_of(args.forward.out), values_of(args.forward.lse), sink);
      expect_jvp(values_of(args.out_tangent), values_of(args.lse_tangent), sink_tangent, sink);
    }
  });
}

TEST(CpuSinks, OfInfinityMakeGradientsOfGradientsZeroAndNaNReachesThem) {
  on_all([](GradientMemory& memory, Dtype, double sink) {
    attention_forward(memory.forward.args());
    AttentionDoubleBackward args{.backward = memory.args(), .ddq = memory.q_tangent.view()};
    args.grad_q = args.backward.dq;
    args.backward.dq = {};
    attention_double_backward(args);
    expect_rows(values_of(args.grad_q), kDim, 0, std::isnan(sink) ? kNaN : 0, "grad_q");
    const auto oracle = reference::attention_double_backward(args);
    expect_rows(oracle.grad_q, kDim, 0, std::isnan(sink) ? kNaN : 0, "grad_q of the oracle");
  });
}

}  // namespace
}  // namespace fovea::testing
