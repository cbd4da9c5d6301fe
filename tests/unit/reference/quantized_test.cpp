// The oracle of recipes against the same arithmetic written out for one small problem each, and its own limits.
#include "reference/quantized.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "fovea/mask.hpp"

#include "quant/formats.hpp"
#include "quant/groups.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

constexpr int kRows = 5, kKeys = 70, kDim = 16;
const float kScale = 0.25F;  // 1 / √16

struct Small {
  CaseMemory memory;
  std::vector<double> q, k, v;  // row-major

  explicit Small(const char* recipe) : memory(case_of(recipe)) {
    q = values_of(memory.q.view());
    k = values_of(memory.k.view());
    v = values_of(memory.v.view());
  }
  static Case case_of(const char* recipe) {
    Case problem;
    problem.seqlen_q = kRows;
    problem.seqlen_kv = kKeys;
    problem.head_dim_qk = problem.head_dim_v = kDim;
    problem.quant = parse_quantization(recipe);
    return problem;
  }
};

int at(int row, int d) { return row * kDim + d; }

float amax(const std::vector<double>& of, int begin, int end) {
  float most = 0;
  for (int i = begin; i < end; ++i)
    most = std::max(most, std::fabs(static_cast<float>(of[static_cast<std::size_t>(i)])));
  return most;
}

/// "int8" without smoothing: rows of q and k by their maxima, v by columns of tiles, probabilities by 255.
TEST(QuantizedOracle, IsTheIntegerArithmeticOfInt8) {
  Small s("int8,smooth_k=none,smooth_v=none");
  const reference::ForwardResult got = reference::attention_forward(s.memory.args());
  const auto code = [](double x, float scale) {
    return std::nearbyint(static_cast<float>(x) * (1 / scale));
  };
  constexpr int kTile = 64;
  for (int i = 0; i < kRows; ++i) {
    std::vector<double> score;
    for (int j = 0; j < kKeys; ++j) {
      const float q_scale = amax(s.q, at(i, 0), at(i + 1, 0)) / 127;
      const float k_scale = amax(s.k, at(j, 0), at(j + 1, 0)) / 127;
      long sum = 0;
      for (int d = 0; d < kDim; ++d)
        sum += static_cast<long>(code(s.q[static_cast<std::size_t>(at(i, d))], q_scale)) *
               static_cast<long>(code(s.k[static_cast<std::size_t>(at(j, d))], k_scale));
      score.push_back(static_cast<double>(sum) * q_scale * k_scale * kScale);
    }
    double denominator = 0;
    for (const double each : score) denominator += std::exp(each);
    EXPECT_NEAR(got.lse[static_cast<std::size_t>(i)], std::log(denominator), 1e-12);
    for (int d = 0; d < kDim; ++d) {
      double numerator = 0;
      for (int tile = 0; tile * kTile < kKeys; ++tile) {
        const int begin = tile * kTile;
        const int end = std::min(kKeys, begin + kTile);
        const double most = *std::max_element(score.begin() + begin, score.begin() + end);
        float v_most = 0;
        for (int j = begin; j < end; ++j)
          v_most = std::max(v_most,
                            std::fabs(static_cast<float>(s.v[static_cast<std::size_t>(at(j, d))])));
        long sum = 0;
        for (int j = begin; j < end; ++j)
          sum += std::lrint(255 * std::exp(score[static_cast<std::size_t>(j)] - most)) *
                 static_cast<long>(code(s.v[static_cast<std::size_t>(at(j, d))], v_most / 127));
        numerator += static_cast<double>(sum) / 255 * (v_most / 127) * std::exp(most);
      }
      EXPECT_NEAR(got.out[static_cast<std::size_t>(at(i, d))], numerator / denominator, 1e-6);
    }
  }
}

/// "fast" on equal scores: every code is that of the reference, so the result is the mean of rounded values.
TEST(QuantizedOracle, OfFastAveragesRoundedValuesWhereScoresAreEqual) {
  Small s("fast");
  s.memory.q.fill([](std::int64_t) { return 0.0; });
  s.memory.q.seal();
  const reference::ForwardResult got = reference::attention_forward(s.memory.args());
  const float v_scale = amax(s.v, 0, at(kKeys, 0)) / 448;
  for (int d = 0; d < kDim; ++d) {
    double mean = 0;
    for (int j = 0; j < kKeys; ++j)
      mean += quant::e4m3_code(static_cast<float>(s.v[static_cast<std::size_t>(at(j, d))]) *
                               (1 / v_scale)) *
              static_cast<double>(v_scale) / kKeys;
    EXPECT_NEAR(got.out[static_cast<std::size_t>(d)], mean, 1e-9);
  }
  // All codes are exact powers of two; on average codes are larger by 1.0407, and lse is corrected for that.
  EXPECT_NEAR(got.lse[0], std::log(kKeys / quant::kLinearMean), 1e-9);
}

TEST(QuantizedOracle, RoundsAsTheBitRulesOfE4m3) {
  for (int i = -40000; i <= 40000; ++i) {
    const float x = static_cast<float>(i) * 0x1p-6F * (i % 3 == 0 ? 0x1p-9F : 1.0F);
    ASSERT_EQ(reference::nearest_e4m3(x), quant::e4m3_code(x)) << x;
  }
}

/// Numbers of e2m1 by the greatest of them, as src/quant has it.
std::vector<double> group_by_bit_rules(const std::vector<float>& group, ScaleGranularity groups) {
  float most = 0;
  for (const float x : group) most = std::max(most, std::fabs(x));
  const float scale = quant::group_scale(groups, most);
  std::vector<double> rounded;
  for (const float x : group) {
    const float code = quant::e2m1_code(x * quant::group_reciprocal(scale));
    rounded.push_back(static_cast<double>(code) * scale);
  }
  return rounded;
}

/// From groups that a scale of e4m3 loses to those that it saturates.
TEST(QuantizedOracle, RoundsGroupsAsTheBitRulesOfE2m1) {
  for (const ScaleGranularity groups : {ScaleGranularity::group_16, ScaleGranularity::group_32}) {
    for (int draw = 0; draw < 4000; ++draw) {
      std::vector<float> group(static_cast<std::size_t>(draw % 3 == 0 ? 5 : 16));
      const Random random(3, static_cast<std::uint64_t>(draw));
      for (std::size_t i = 0; i < group.size(); ++i)
        group[i] = static_cast<float>(
            std::ldexp(random.normal(static_cast<std::int64_t>(i)), draw % 35 - 16));
      ASSERT_EQ(reference::rounded_group(group, groups), group_by_bit_rules(group, groups)) << draw;
    }
  }
}

/// Rows of 16 channels are a group each; so are 16 keys of a column of v and of a row of probabilities, which are
/// relative to 2688.
TEST(QuantizedOracle, IsTheArithmeticOfGroupsOfNvfp4) {
  constexpr auto kGroups = ScaleGranularity::group_16;
  Small s("nvfp4,smooth_q=none,smooth_k=none");
  const reference::ForwardResult got = reference::attention_forward(s.memory.args());
  const auto row_of = [](const std::vector<double>& of, int row) {
    return group_by_bit_rules({of.begin() + at(row, 0), of.begin() + at(row + 1, 0)}, kGroups);
  };
  for (int i = 0; i < kRows; ++i) {
    std::vector<double> score(kKeys);
    for (int j = 0; j < kKeys; ++j) {
      const std::vector<double> q = row_of(s.q, i), k = row_of(s.k, j);
      score[static_cast<std::size_t>(j)] =
          std::inner_product(q.begin(), q.end(), k.begin(), 0.0) * kScale;
    }
    const double most = std::ranges::max(score);
    double denominator = 0;
    std::vector<double> numerators(kDim);
    for (int begin = 0; begin < kKeys; begin += 16) {
      const int end = std::min(begin + 16, kKeys);
      std::vector<float> p;
      for (int j = begin; j < end; ++j) {
        const double exact = std::exp(score[static_cast<std::size_t>(j)] - most);
        denominator += exact;
        p.push_back(static_cast<float>(2688 * exact));
      }
      const std::vector<double> codes = group_by_bit_rules(p, kGroups);
      for (int d = 0; d < kDim; ++d) {
        std::vector<float> column;
        for (int j = begin; j < end; ++j)
          column.push_back(static_cast<float>(s.v[static_cast<std::size_t>(at(j, d))]));
        const std::vector<double> v = group_by_bit_rules(column, kGroups);
        numerators[static_cast<std::size_t>(d)] +=
            std::inner_product(codes.begin(), codes.end(), v.begin(), 0.0) / 2688;
      }
    }
    EXPECT_NEAR(got.lse[static_cast<std::size_t>(i)], most + std::log(denominator), 1e-12);
    for (int d = 0; d < kDim; ++d)
      EXPECT_NEAR(got.out[static_cast<std::size_t>(at(i, d))],
                  numerators[static_cast<std::size_t>(d)] / denominator, 1e-12);
  }
}

/// A constant added to keys moves scores of a row alike: with the mean removed not a code changes, and lse, softcap and
/// sinks see the scores as they are.
TEST(QuantizedOracle, MeansOfKeysAreGivenBackToLseProgramsAndSinks) {
  for (const char* recipe : {"accurate", "int8", "sage2", "accurate,hadamard=yes"}) {
    Case problem = Small::case_of(recipe);
    problem.has_sinks = true;
    problem.score = softcap(2);
    CaseMemory memory(problem);
    memory.k.fill([](std::int64_t i) { return static_cast<double>(i % 7 - 3) * 0.125 + 4; });
    memory.k.seal();
    AttentionForward args = memory.args();
    const reference::ForwardResult rounded = reference::attention_forward(args);
    args.quant = {};
    const reference::ForwardResult exact = reference::attention_forward(args);
    for (std::size_t i = 0; i < exact.lse.size(); ++i)
      EXPECT_NEAR(rounded.lse[i], exact.lse[i], 5e-3) << recipe;
    for (std::size_t i = 0; i < exact.out.size(); ++i)
      EXPECT_NEAR(rounded.out[i], exact.out[i], 0.1) << recipe;
  }
}

}  // namespace
}  // namespace fovea::testing
