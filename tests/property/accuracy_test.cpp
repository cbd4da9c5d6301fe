// The claim of attention.hpp: at most twice the error of the plain formula in the same dtype,
// without the small print. Here problems are large enough that no floor is needed, only the
// rounding of the output.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "fovea/mask.hpp"

#include "reference/attention_forward.hpp"
#include "support/compare.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {
namespace {

struct Error {
  double absolute = 0;  // beyond one rounding of the element
  double norm = 0;
};

Error error_of(const TensorView& view, const std::vector<double>& expected) {
  const std::vector<double> got = values_of(view);
  Error error;
  double squares = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double difference = std::fabs(got[i] - expected[i]);
    error.absolute = std::max(error.absolute, difference - rounding(view.dtype(), expected[i]));
    squares += difference * difference;
  }
  error.norm = std::sqrt(squares);
  return error;
}

double norm_of_roundings(Dtype dtype, const std::vector<double>& values) {
  double squares = 0;
  for (const double value : values) squares += rounding(dtype, value) * rounding(dtype, value);
  return std::sqrt(squares);
}

struct Setting {
  std::string name;
  Distribution distribution = Distribution::normal;
  std::int64_t head_dim = 64;
  MaskMod mask{};
  ScoreMod score{};
};

class Accuracy : public ::testing::TestWithParam<Setting> {};

TEST_P(Accuracy, AtMostTwiceTheErrorOfThePlainFormula) {
  const Setting& setting = GetParam();
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    // 300 queries in several panels, 700 keys in six tiles, the last one cut.
    Case problem{.label = setting.name,
                 .seqlen_q = 300,
                 .seqlen_kv = 700,
                 .num_heads_q = 1,
                 .head_dim_qk = setting.head_dim,
                 .head_dim_v = setting.head_dim,
                 .dtype = dtype,
                 .distribution = setting.distribution,
                 .seed = 31,
                 .score = setting.score,
                 .mask = setting.mask};
    CaseMemory memory(problem);
    const reference::ForwardResult expected = reference::attention_forward(memory.args());
    std::optional<Tolerances> of_dtype[2];
    for (const CpuTarget target : targets_for(dtype)) {
      const ComputeDtype compute_dtype = compute_dtype_on(target, dtype, ComputeDtype::automatic);
      std::optional<Tolerances>& plain = of_dtype[compute_dtype == ComputeDtype::bf16 ? 1 : 0];
      if (!plain) plain = tolerances(memory.args(), expected, compute_dtype);
      memory.poison_outputs();
      const AttentionForward args = memory.args(target);
      attention_forward(args);
      const std::string where = problem.describe() + " on " + std::string(fovea::name(target));
      const Error out = error_of(args.out, expected.out);
      EXPECT_LE(out.absolute, 2 * plain->out.plain_absolute) << where;
      EXPECT_LE(out.norm, 2 * plain->out.plain_norm + norm_of_roundings(dtype, expected.out))
          << where;
      const Error lse = error_of(args.lse, expected.lse);
      EXPECT_LE(lse.absolute, 2 * plain->lse.plain_absolute) << where;
      EXPECT_LE(lse.norm, 2 * plain->lse.plain_norm + norm_of_roundings(Dtype::f32, expected.lse))
          << where;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Of, Accuracy,
                         ::testing::Values(Setting{.name = "normal"},
                                           Setting{.name = "heavy_tailed",
                                                   .distribution = Distribution::heavy_tailed},
                                           Setting{.name = "head_dim_128", .head_dim = 128},
                                           Setting{.name = "causal", .mask = causal()},
                                           Setting{.name = "softcap", .score = softcap(5)}),
                         [](const auto& each) { return each.param.name; });

/// The yardstick itself: the plain formula is close to the oracle, so that twice its error is not
/// a wide gate.
TEST(Accuracy, PlainFormulaIsCloseToTheOracle) {
  for (const ComputeDtype compute_dtype : {ComputeDtype::f32, ComputeDtype::bf16}) {
    const Case problem{.label = "yardstick",
                       .seqlen_q = 100,
                       .seqlen_kv = 300,
                       .head_dim_qk = 64,
                       .head_dim_v = 64,
                       .dtype = Dtype::bf16};
    CaseMemory memory(problem);
    const reference::ForwardResult expected = reference::attention_forward(memory.args());
    const Tolerances plain = tolerances(memory.args(), expected, compute_dtype);
    double squares = 0;
    for (const double value : expected.out) squares += value * value;
    const double unit = compute_dtype == ComputeDtype::f32 ? 0x1p-24 : 0x1p-8;
    EXPECT_LT(plain.out.plain_norm, 8 * unit * std::sqrt(squares));
    EXPECT_GT(plain.out.plain_norm, unit / 64 * std::sqrt(squares));
  }
}

}  // namespace
}  // namespace fovea::testing
