// Gradients of captured tensors that are multiplied by large numbers. Rows of dS sum to 0, so what all keys of a row
// have in common must drop out: a slope over distances of 850 +- 10 depends on the 10, and an error of delta is
// multiplied by the 850.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "core/philox.hpp"
#include "support/compare.hpp"
#include "support/gradient_case.hpp"
#include "support/gradient_compare.hpp"

namespace fovea::testing {
namespace {

constexpr std::int64_t kQueries = 1024, kKeys = 178, kHeads = 2, kDim = 16;
constexpr std::int64_t kLeft = 10, kRight = 5;

/// Rows that see keys are some 850 behind them. Beside a sink, slopes are such that it leaves weight to the keys.
GradientCase far_keys(Dtype dtype, bool has_sinks) {
  GradientCase problem{.forward = {.label = "far keys",
                                   .seqlen_q = kQueries,
                                   .seqlen_kv = kKeys,
                                   .num_heads_q = kHeads,
                                   .head_dim_qk = kDim,
                                   .head_dim_v = kDim,
                                   .dtype = dtype,
                                   .mask = window(kLeft, kRight)}};
  problem.forward.has_sinks = has_sinks;
  const double slope = has_sinks ? 0.002 : 0.1;
  const TensorView slopes = problem.forward.capture(
      Dtype::f32, {kHeads}, [slope](std::int64_t head) { return head == 0 ? slope : -slope / 2; });
  const Captured table = capture("slopes", slopes);
  problem.forward.score =
      score_mod([&](auto x) { return x.score + table[x.q_head] * (x.kv_idx - x.q_idx); });
  return problem;
}

/// The gradient of one head's slope, and the sum of the sizes of what it is a sum of.
struct SlopeGradient {
  double value = 0, size = 0;
};

struct Inputs {
  std::vector<double> q, k, v, dout, dlse;
  double sink = -std::numeric_limits<double>::infinity();
  double slope = 0;
  philox::Key key{};
  std::uint64_t threshold = 0;
  double keep_scale = 1;
};

double dot(const std::vector<double>& a, std::int64_t row_a, const std::vector<double>& b,
           std::int64_t row_b) {
  double sum = 0;
  for (std::int64_t d = 0; d < kDim; ++d)
    sum += a[static_cast<std::size_t>(row_a * kDim + d)] *
           b[static_cast<std::size_t>(row_b * kDim + d)];
  return sum;
}

/// By the formula, in fp64.
SlopeGradient slope_gradient(const Inputs& in, std::int64_t head) {
  SlopeGradient sum;
  for (std::int64_t q_idx = 0; q_idx < kQueries; ++q_idx) {
    const std::int64_t at = q_idx + kKeys - kQueries, row = q_idx * kHeads + head;
    const std::int64_t begin = std::max<std::int64_t>(0, at - kLeft);
    const std::int64_t end = std::min(kKeys, at + kRight + 1);
    std::vector<double> p, dp;
    double largest = in.sink;
    for (std::int64_t key = begin; key < end; ++key) {
      const bool is_kept = philox::random_word(in.key, 0, static_cast<std::uint32_t>(head),
                                               static_cast<std::uint32_t>(q_idx),
                                               static_cast<std::uint32_t>(key)) >= in.threshold;
      p.push_back(dot(in.q, row, in.k, key) / std::sqrt(kDim) +
                  in.slope * static_cast<double>(key - q_idx));
      dp.push_back(is_kept ? in.keep_scale * dot(in.dout, row, in.v, key) : 0);
      largest = std::max(largest, p.back());
    }
    if (p.empty()) continue;
    double total = std::exp(in.sink - largest);
    for (double& each : p) total += each = std::exp(each - largest);
    double delta = -in.dlse[static_cast<std::size_t>(head * kQueries + q_idx)];
    for (std::size_t i = 0; i < p.size(); ++i) delta += (p[i] /= total) * dp[i];
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double distance = static_cast<double>(begin + static_cast<std::int64_t>(i) - q_idx);
      sum.value += p[i] * (dp[i] - delta) * distance;
      sum.size += p[i] * (std::fabs(dp[i]) + std::fabs(delta)) * std::fabs(distance);
    }
  }
  return sum;
}

/// Sums in f32 of terms whose parts are f32: scores of up to 90 have an error of 2^-18, which moves P of keys 15 apart,
/// 40 times less than 850; P, dP, delta and dS are rounded once each, ΣP of rows with a sink is known as well as their
/// lse.
constexpr double kBound = 32 * 0x1p-24;

void expect_slopes(const GradientCase& problem, CpuTarget target) {
  GradientMemory memory(problem);
  const AttentionForward forward = memory.forward.args();
  attention_forward(forward);
  const AttentionBackward args = memory.args(target);
  attention_backward(args);
  Inputs in{.q = values_of(forward.q),
            .k = values_of(forward.k),
            .v = values_of(forward.v),
            .dout = values_of(args.dout),
            .dlse = std::vector<double>(kHeads * kQueries)};
  if (args.dlse) in.dlse = values_of(args.dlse);
  const Dropout& dropout = problem.forward.dropout;
  in.key = philox::dropout_key(dropout.seed, dropout.offset);
  if (dropout.p > 0) {
    in.threshold = philox::drop_threshold(dropout.p);
    in.keep_scale = 1 / (1 - static_cast<double>(dropout.p));
  }
  const std::vector<double> got = values_of(args.dcaptured.front().view);
  for (std::int64_t head = 0; head < kHeads; ++head) {
    const auto h = static_cast<std::size_t>(head);
    in.slope = values_of(problem.forward.captured.front()->view())[h];
    if (forward.sinks) in.sink = values_of(forward.sinks)[h];
    const SlopeGradient expected = slope_gradient(in, head);
    EXPECT_NEAR(got[h], expected.value, kBound * expected.size)
        << problem.describe() << " on " << name(target) << ", head " << head;
  }
}

TEST(BackwardLargeFactors, LoseNoDigitsToTheRoundingOfOut) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    for (const CpuTarget target : gradient_targets_for(dtype)) {
      expect_slopes(far_keys(dtype, /*has_sinks=*/false), target);
      GradientCase cut = far_keys(dtype, /*has_sinks=*/false);
      cut.has_dlse = false;
      cut.forward.dropout = kSomeDropped;
      expect_slopes(cut, target);
      cut = far_keys(dtype, /*has_sinks=*/true);
      cut.has_dlse = false;
      expect_slopes(cut, target);
    }
  }
}

/// What rows that see nothing, or only their sink, hold in out is of no effect there either.
TEST(BackwardLargeFactors, EqualOracleInEveryGradient) {
  for (const bool has_sinks : {false, true})
    EXPECT_EQ(backward_difference(far_keys(Dtype::bf16, has_sinks)), "");
}

}  // namespace
}  // namespace fovea::testing
