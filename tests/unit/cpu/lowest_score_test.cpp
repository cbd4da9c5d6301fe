// The lowest finite number as a bias, which people use to hide keys, is an ordinary score: rows whose visible keys all
// have it are uniform averages.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "fovea/mask.hpp"

#include "support/compare.hpp"
#include "support/gradient_compare.hpp"

namespace fovea::testing {
namespace {

constexpr double kLowest = std::numeric_limits<float>::lowest();
constexpr double kLowestBf16 = -0x1.fep127;

/// Queries of every third row have `lowest` on all keys, of every third on those before key 130, and the last on some.
struct Shape {
  std::int64_t seqlen_q, seqlen_kv;
};

TensorView lowest_bias(Case& problem, Dtype dtype, double lowest) {
  const Shape shape{problem.seqlen_q, problem.seqlen_kv};
  return problem.capture(dtype, {shape.seqlen_q, shape.seqlen_kv}, [=](std::int64_t i) {
    const std::int64_t q_idx = i / shape.seqlen_kv, kv_idx = i % shape.seqlen_kv;
    const bool is_low = q_idx % 3 == 0 || (q_idx % 3 == 1 ? kv_idx < 130 : kv_idx % 5 == 2);
    return is_low ? lowest : 0.0;
  });
}

/// A panel and more; few rows; few rows whose keys are split; a panel whose keys are split.
constexpr Shape kShapes[] = {{50, 180}, {3, 150}, {2, 2100}, {13, 2100}};

/// Alone, and beside what else makes scores.
std::vector<ScoreMod> scores_with(Case& problem, Dtype dtype, double lowest) {
  const TensorView low = lowest_bias(problem, dtype, lowest);
  const TensorView slopes =
      problem.capture(Dtype::f32, {problem.num_heads_q},
                      [](std::int64_t head) { return 0.1 + 0.1 * static_cast<double>(head); });
  const auto value = static_cast<float>(lowest);
  return {bias(low), softcap(5) | bias(low), bias(low) | alibi(slopes),
          softcap(5) | alibi(slopes) | bias(low),
          score_mod([value](auto x) { return select(x.q_idx % 3 != 1, value, x.score); })};
}

template <typename Test>
void on_every_problem(const Test& test) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    for (const auto& [element, lowest] :
         {std::pair{Dtype::f32, kLowest}, {Dtype::bf16, kLowestBf16}}) {
      for (const Shape shape : kShapes) {
        for (const MaskMod& mask : {MaskMod(), causal()}) {
          Case problem{.label = "lowest",
                       .seqlen_q = shape.seqlen_q,
                       .seqlen_kv = shape.seqlen_kv,
                       .num_heads_q = 2,
                       .dtype = dtype,
                       .mask = mask};
          for (const ScoreMod& score : scores_with(problem, element, lowest)) {
            problem.score = score;
            test(problem);
          }
        }
      }
    }
  }
}

TEST(CpuLowestScore, ForwardEqualsOracle) {
  on_every_problem([](const Case& problem) { expect_equals_oracle(problem); });
}

TEST(CpuLowestScore, GradientsEqualOracle) {
  on_every_problem([](const Case& problem) {
    if (problem.seqlen_kv > 1000) return;  // splits are forward's
    EXPECT_EQ(backward_difference({.forward = problem}), "");
  });
}

TEST(CpuLowestScore, TangentsEqualOracle) {
  on_every_problem([](const Case& problem) {
    if (problem.seqlen_kv > 1000) return;
    EXPECT_EQ(jvp_difference({.forward = problem}), "");
  });
}

/// Programs compute in f32: two of the lowest floats sum up to -inf, which hides a key as a mask does.
TEST(CpuLowestScore, ASumBelowTheLowestFloatHidesTheKey) {
  for (const Shape shape : kShapes) {
    Case problem{.label = "below the lowest",
                 .seqlen_q = shape.seqlen_q,
                 .seqlen_kv = shape.seqlen_kv,
                 .num_heads_q = 2};
    const TensorView low = lowest_bias(problem, Dtype::f32, kLowest);
    problem.score = bias(low) | bias(low);
    expect_equals_oracle(problem);
    if (shape.seqlen_kv > 1000) continue;
    EXPECT_EQ(backward_difference({.forward = problem}), "");
    EXPECT_EQ(jvp_difference({.forward = problem}), "");
  }
}

}  // namespace
}  // namespace fovea::testing
