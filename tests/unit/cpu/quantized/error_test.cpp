// What recipes cost: the error of out and lse beside the problem without a recipe, on inputs that recipes are known to
// be good or bad at.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/quant.hpp"

#include "support/random.hpp"

namespace fovea::testing {
namespace {

constexpr std::int64_t kQueries = 192, kKeys = 2048, kHeads = 2;

/// One of q, k and v.
enum Operand : std::uint64_t { kQuery, kKey, kValue };

struct Pattern {
  const char* name;
  /// A normal number of [row, head, channel] becomes that of the pattern.
  std::function<float(Operand which, std::int64_t element, std::int64_t channel, float normal)>
      shape;
};

float uniform_of(std::int64_t element, std::uint64_t stream) {
  return static_cast<float>(Random(9, stream).uniform(element));
}

std::vector<Pattern> patterns() {
  return {
      {"normal", [](Operand, std::int64_t, std::int64_t, float x) { return x; }},
      {"sharp", [](Operand which, std::int64_t, std::int64_t,
                   float x) { return which == kQuery ? 3 * x : x; }},
      // Three patterns of outliers. Channels of keys with a bias, as rotary embeddings leave them:
      {"biased",
       [](Operand which, std::int64_t, std::int64_t d, float x) {
         return which == kKey && d % 8 == 0 ? x + (d % 16 == 0 ? 20.0F : -20.0F) : x;
       }},
      // single numbers ten times as large, anywhere:
      {"spikes",
       [](Operand which, std::int64_t i, std::int64_t, float x) {
         return uniform_of(i, 50 + which) < 0.001F
                    ? x + 10 * static_cast<float>(Random(8, which).normal(i))
                    : x;
       }},
      // a few channels of keys ten times as large, which queries weigh less:
      {"gains",
       [](Operand which, std::int64_t, std::int64_t d, float x) {
         return d % 32 != 5 ? x : which == kKey ? 10 * x : which == kQuery ? 0.3F * x : x;
       }},
  };
}

struct Inputs {
  std::vector<float> q, k, v;
  std::int64_t head_dim = 0;
};

std::vector<float> drawn(Operand which, std::int64_t rows, std::int64_t head_dim,
                         const Pattern& pattern) {
  std::vector<float> values;
  const Random random(7, which);
  for (std::int64_t i = 0; i < rows * kHeads * head_dim; ++i)
    values.push_back(pattern.shape(which, i, i % head_dim, static_cast<float>(random.normal(i))));
  return values;
}

struct Result {
  std::vector<float> out, lse;
};

Result attend(Inputs& in, const Quantization& quant) {
  Result result{std::vector<float>(in.q.size()),
                std::vector<float>(static_cast<std::size_t>(kHeads * kQueries))};
  attention_forward({.q = view(in.q.data(), {1, kQueries, kHeads, in.head_dim}),
                     .k = view(in.k.data(), {1, kKeys, kHeads, in.head_dim}),
                     .v = view(in.v.data(), {1, kKeys, kHeads, in.head_dim}),
                     .out = view(result.out.data(), {1, kQueries, kHeads, in.head_dim}),
                     .lse = view(result.lse.data(), {1, kHeads, kQueries}),
                     .quant = quant});
  return result;
}

/// ‖got - exact‖ / ‖exact‖
double relative_error(const std::vector<float>& got, const std::vector<float>& exact) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - exact[i], 2);
    norm += std::pow(static_cast<double>(exact[i]), 2);
  }
  return std::sqrt(error / norm);
}

double largest_error(const std::vector<float>& got, const std::vector<float>& exact) {
  double largest = 0;
  for (std::size_t i = 0; i < got.size(); ++i)
    largest = std::max(largest, std::fabs(static_cast<double>(got[i]) - exact[i]));
  return largest;
}

/// Bars of a recipe, by the names of patterns: relative errors of out over many rows of many heads; and the largest
/// error of lse on normal and biased numbers.
struct Bars {
  const char* recipe;
  double normal, sharp, biased, spikes, gains;
  double lse = 1e-2;
};
constexpr Bars kBars[] = {
    {"accurate", .0115, .0230, .0115, .0230, .0680},
    {"accurate,hadamard=yes", .0115, .0230, .0115, .0120, .0220},
    {"fast", .0430, .0430, .0430, .0490, .0790},
    {"fast,hadamard=yes", .0430, .0430, .0430, .0430, .0490},
    {"int8", .0125, .0220, .0125, .0250, .0460},
    {"sage2", .0390, .0380, .0390, .0400, .0790},
    {"nvfp4", .2000, .3000, .2000, .2050, .3050, .08},
    {"nvfp4,hadamard=yes", .2000, .2950, .2000, .1800, .3650, .08},
    {"mxfp4", .2600, .3650, .2600, .3700, .5350, .10},
    {"mxfp4,hadamard=yes", .2600, .3750, .2600, .2150, .4400, .10},
};

double bar_of(const Bars& bars, const std::string& pattern) {
  return pattern == "normal"   ? bars.normal
         : pattern == "sharp"  ? bars.sharp
         : pattern == "biased" ? bars.biased
         : pattern == "spikes" ? bars.spikes
                               : bars.gains;
}

class Errors : public ::testing::TestWithParam<std::int64_t> {
 protected:
  Inputs inputs(const Pattern& pattern) const {
    const std::int64_t head_dim = GetParam();
    return {drawn(kQuery, kQueries, head_dim, pattern), drawn(kKey, kKeys, head_dim, pattern),
            drawn(kValue, kKeys, head_dim, pattern), head_dim};
  }
  /// Errors of v are common to all rows, so a norm is one of kHeads head_dim draws: two of its standard deviations.
  double slack() const { return 1 + 2 / std::sqrt(2.0 * kHeads * static_cast<double>(GetParam())); }
};

TEST_P(Errors, StayBelowTheBarsOfEachRecipe) {
  for (const Pattern& pattern : patterns()) {
    Inputs in = inputs(pattern);
    const Result exact = attend(in, {});
    for (const Bars& bars : kBars) {
      const Result got = attend(in, parse_quantization(bars.recipe));
      const double error = relative_error(got.out, exact.out);
      const double bar = bar_of(bars, pattern.name);
      EXPECT_LE(error, bar * slack()) << bars.recipe << " on " << pattern.name;
      EXPECT_GE(error, bar / 2) << bars.recipe << " on " << pattern.name << " rounds nothing?";
    }
  }
}

/// What plans choose by.
TEST_P(Errors, AreThoseThatRecipesState) {
  Inputs in = inputs(patterns().front());
  const Result exact = attend(in, {});
  for (const NamedQuantization& named : quantizations()) {
    if (named.error == 0) continue;
    const double error = relative_error(attend(in, named.quant).out, exact.out);
    EXPECT_LE(error, named.error * slack()) << named.name;
    EXPECT_GE(error, named.error / slack() * 0.8) << named.name;
  }
}

TEST_P(Errors, OfLseStayBelowTheirBars) {
  for (const Pattern& pattern : patterns()) {
    if (pattern.name != std::string("normal") && pattern.name != std::string("biased")) continue;
    Inputs in = inputs(pattern);
    const Result exact = attend(in, {});
    for (const Bars& bars : kBars) {
      const Result got = attend(in, parse_quantization(bars.recipe));
      EXPECT_LE(largest_error(got.lse, exact.lse), bars.lse)
          << bars.recipe << " on " << pattern.name;
    }
  }
}

/// The patterns are hard: what a recipe leaves out shows.
TEST_P(Errors, GrowWithoutWhatARecipeDoesAgainstThem) {
  const auto error_on = [&](std::size_t pattern, const char* recipe) {
    Inputs in = inputs(patterns()[pattern]);
    return relative_error(attend(in, parse_quantization(recipe)).out, attend(in, {}).out);
  };
  EXPECT_GE(error_on(2, "accurate,smooth_k=none"), 3 * error_on(2, "accurate"));
  EXPECT_GE(error_on(3, "accurate"), 1.5 * error_on(3, "accurate,hadamard=yes"));
  EXPECT_GE(error_on(4, "accurate"), 2 * error_on(4, "accurate,hadamard=yes"));
  EXPECT_GE(error_on(0, "int8,v_scales=tensor,p_max=255"), error_on(0, "int8"));
}

/// Rows, keys, values and channels of zeros or of one number: no code divides by 0.
TEST_P(Errors, ConstantOperandsGiveNumbers) {
  const Pattern constant{"constant", [](Operand which, std::int64_t, std::int64_t d, float) {
                           return which == kValue && d % 2 == 1 ? 3.0F : 0.0F;
                         }};
  Inputs in = inputs(constant);
  for (const NamedQuantization& named : quantizations()) {
    if (named.quant.scales == ScaleSource::given) continue;
    const Result got = attend(in, named.quant);
    for (std::size_t i = 0; i < got.out.size(); ++i)
      ASSERT_NEAR(got.out[i], i % 2 == 1 ? 3 : 0, .01) << named.name;
    for (const float lse : got.lse) ASSERT_NEAR(lse, std::log(kKeys), .06) << named.name;
  }
}

INSTANTIATE_TEST_SUITE_P(OfHeadDim, Errors, ::testing::Values(64, 128));

}  // namespace
}  // namespace fovea::testing
