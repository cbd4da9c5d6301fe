// The oracle of recipes against the same arithmetic written out for one small problem each, and its own limits.
#include "reference/quantized.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "fovea/mask.hpp"

#include "quant/formats.hpp"
#include "support/compare.hpp"

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
