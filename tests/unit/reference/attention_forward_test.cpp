#include "reference/attention_forward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "core/philox.hpp"
#include "support/case.hpp"
#include "support/compare.hpp"

namespace fovea::reference {
namespace {

using testing::Case;
using testing::CaseMemory;
using testing::values_of;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// One head, head_dim 1, q = 1 and scale 1, so that the scores are the keys: answers can be worked
/// out on paper.
struct Line {
  std::vector<float> q{1}, k{}, v{};
  std::vector<float> sink{};

  ForwardResult run(AttentionForward args = {}) const {
    const auto num_q = static_cast<std::int64_t>(q.size());
    const auto num_kv = static_cast<std::int64_t>(k.size());
    args.q = view(q.data(), {1, num_q, 1, 1});
    args.k = view(k.data(), {1, num_kv, 1, 1});
    args.v = view(v.data(), {1, num_kv, 1, 1});
    if (!args.softmax_scale) args.softmax_scale = 1;
    if (!sink.empty()) args.sinks = view(sink.data(), {1});
    return reference::attention_forward(args);
  }
};

const float kLog2 = std::log(2.F), kLog3 = std::log(3.F);

TEST(ReferenceForward, WeightsAreExponentialsOfScores) {
  const ForwardResult result = Line{.k = {0, kLog2, kLog3}, .v = {6, 12, 18}}.run();
  EXPECT_NEAR(result.out[0], (1 * 6 + 2 * 12 + 3 * 18) / 6.0, 1e-6);
  EXPECT_NEAR(result.lse[0], std::log(6), 1e-6);
  EXPECT_EQ(result.row_max[0], static_cast<double>(kLog3));
}

TEST(ReferenceForward, DefaultScaleIsInverseRootOfHeadDim) {
  const std::vector<float> q{1, 1, 1, 1};
  const std::vector<float> k{2, 2, 2, 2};
  const std::vector<float> v{1};
  AttentionForward args{.q = view(q.data(), {1, 1, 1, 4}),
                        .k = view(k.data(), {1, 1, 1, 4}),
                        .v = view(v.data(), {1, 1, 1, 1}),
                        .out = {}};
  EXPECT_EQ(reference::attention_forward(args).lse[0], 4);
  args.softmax_scale = -0.5F;
  EXPECT_EQ(reference::attention_forward(args).lse[0], -4);
  args.softmax_scale = 0.F;
  EXPECT_EQ(reference::attention_forward(args).lse[0], 0);
}

TEST(ReferenceForward, ScoreProgramSeesTheScaledScore) {
  AttentionForward args;
  args.softmax_scale = 0.5F;
  args.score = score_mod([](auto x) { return x.score * x.score + x.kv_idx; });
  const ForwardResult result = Line{.k = {4}, .v = {1}}.run(args);
  EXPECT_EQ(result.row_max[0], 4);
}

TEST(ReferenceForward, MaskedKeysAreNeverRead) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  AttentionForward args;
  args.mask = mask_mod([](auto x) { return x.kv_idx != 1; });
  const Line clean{.k = {0, 9, kLog3}, .v = {4, 9, 8}};
  const Line dirty{.k = {0, nan, kLog3}, .v = {4, std::numeric_limits<float>::infinity(), 8}};
  EXPECT_EQ(dirty.run(args).out, clean.run(args).out);
  EXPECT_EQ(dirty.run(args).lse, clean.run(args).lse);
  EXPECT_NEAR(dirty.run(args).out[0], 7, 1e-6);
}

TEST(ReferenceForward, ScoreOfMinusInfinityHidesTheKeyAndItsValue) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  AttentionForward args;
  args.score = score_mod([](auto x) { return select(x.kv_idx == 1, -INFINITY, x.score); });
  const ForwardResult result = Line{.k = {0, 1, kLog3}, .v = {4, nan, 8}}.run(args);
  EXPECT_NEAR(result.out[0], 7, 1e-6);
  EXPECT_NEAR(result.lse[0], std::log(4), 1e-6);
}

TEST(ReferenceForward, EmptyRowGivesZero) {
  AttentionForward args;
  args.mask = mask_mod([](auto x) { return x.kv_idx < x.q_idx; });
  const ForwardResult result = Line{.q = {1, 1}, .k = {5, 6}, .v = {7, 8}}.run(args);
  EXPECT_EQ(result.out[0], 0);
  EXPECT_EQ(result.lse[0], -kInfinity);
  EXPECT_EQ(result.row_max[0], -kInfinity);
  EXPECT_EQ(result.out[1], 7);
  EXPECT_EQ(result.lse[1], 5);
}

TEST(ReferenceForward, NoKeysAtAllGiveZero) {
  const ForwardResult result = Line{.q = {1, 1}, .k = {}, .v = {}}.run();
  EXPECT_EQ(result.out, (std::vector<double>{0, 0}));
  EXPECT_EQ(result.lse, (std::vector<double>{-kInfinity, -kInfinity}));
}

TEST(ReferenceForward, SinkJoinsTheDenominatorAndLseButNotRowMax) {
  const ForwardResult result = Line{.k = {0}, .v = {8}, .sink = {kLog3}}.run();
  EXPECT_NEAR(result.out[0], 2, 1e-6);
  EXPECT_NEAR(result.lse[0], std::log(4), 1e-6);
  EXPECT_EQ(result.row_max[0], 0);
}

TEST(ReferenceForward, EmptyRowWithSinkHasLseOfTheSink) {
  const ForwardResult result = Line{.k = {}, .v = {}, .sink = {1.5F}}.run();
  EXPECT_EQ(result.out[0], 0);
  EXPECT_EQ(result.lse[0], 1.5);
  EXPECT_EQ(result.row_max[0], -kInfinity);
}

TEST(ReferenceForward, SinkOfMinusInfinityIsNoSink) {
  const Line with{.k = {1, 2}, .v = {3, 4}, .sink = {-std::numeric_limits<float>::infinity()}};
  const Line without{.k = {1, 2}, .v = {3, 4}};
  EXPECT_EQ(with.run().out, without.run().out);
  EXPECT_EQ(with.run().lse, without.run().lse);
}

TEST(ReferenceForward, HugeScoresDoNotOverflow) {
  const ForwardResult result = Line{.k = {3e4F, 3e4F, -3e4F}, .v = {1, 3, 100}}.run();
  EXPECT_EQ(result.out[0], 2);
  EXPECT_NEAR(result.lse[0], 3e4 + std::log(2), 1e-9);
}

TEST(ReferenceForward, NaNInSightReachesItsRowsOnly) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  AttentionForward args;
  args.mask = causal();
  const ForwardResult key = Line{.q = {1, 1}, .k = {1, nan}, .v = {3, 4}}.run(args);
  EXPECT_EQ(key.out[0], 3);
  EXPECT_TRUE(std::isnan(key.out[1]) && std::isnan(key.lse[1]) && std::isnan(key.row_max[1]));
  const ForwardResult value = Line{.q = {1, 1}, .k = {1, 2}, .v = {3, nan}}.run(args);
  EXPECT_EQ(value.out[0], 3);
  EXPECT_TRUE(std::isnan(value.out[1]));
  EXPECT_FALSE(std::isnan(value.lse[1]));
}

TEST(ReferenceForward, DropoutKeepsByPositionAndRescales) {
  AttentionForward args;
  args.dropout = {.p = 0.5F, .seed = 11, .offset = 3};
  const std::vector<float> values{1, 2, 4, 8, 16, 32, 64, 128};
  const ForwardResult result = Line{.k = std::vector<float>(8, 0.F), .v = values}.run(args);
  double kept = 0;
  for (std::int64_t j = 0; j < 8; ++j) {
    const auto word = philox::random_word(philox::dropout_key(11, 3), 0, 0, 0, j);
    if (word >= 0x80000000U) kept += values[static_cast<std::size_t>(j)];
  }
  EXPECT_NEAR(result.out[0], kept / 8 / 0.5, 1e-12);
  EXPECT_NEAR(result.lse[0], std::log(8), 1e-12);
  args.dropout.p = 1;
  EXPECT_EQ((Line{.k = {1, 2}, .v = {3, 4}}.run(args).out[0]), 0);
}

TEST(ReferenceForward, InfinityReachesARowWhateverItWeighs) {
  const Line line{.k = {0, 1000}, .v = {-std::numeric_limits<float>::infinity(), 2}};
  EXPECT_EQ(line.run().out[0], -kInfinity);  // e^-1000 is 0
  AttentionForward args;
  args.dropout.p = 1;
  EXPECT_EQ(line.run(args).out[0], -kInfinity);
}

TEST(ReferenceForward, PackedRowsAfterTheLastSequenceAreEmpty) {
  Case problem{.label = "packed", .sequences = {{2, 3}, {0, 1}, {1, 0}}, .trailing_rows = 2};
  CaseMemory memory(problem);
  const ForwardResult result = reference::attention_forward(memory.args());
  ASSERT_EQ(result.lse.size(), 5U);
  EXPECT_TRUE(std::isfinite(result.lse[0]) && std::isfinite(result.lse[1]));
  for (std::size_t row = 2; row < 5; ++row) {
    EXPECT_EQ(result.lse[row], -kInfinity);
    EXPECT_EQ(result.out[row * 8], 0);
  }
}

/// The definition in one line per element, without passes, maxima or programs; in long double.
struct Definition {
  std::function<bool(std::int64_t q_idx, std::int64_t kv_idx)> is_visible = [](auto, auto) {
    return true;
  };
  std::function<long double(long double score, std::int64_t q_head)> score = [](auto s, auto) {
    return s;
  };

  struct Result {
    std::vector<double> out, lse;
  };
  Result run(CaseMemory& memory, const Case& problem) const {
    const std::vector<double> q = values_of(memory.q.view());
    const std::vector<double> k = values_of(memory.k.view());
    const std::vector<double> v = values_of(memory.v.view());
    const std::int64_t heads = problem.num_heads_q;
    const std::int64_t group = heads / problem.num_heads_kv;
    const std::int64_t dim_qk = problem.head_dim_qk;
    const std::int64_t dim_v = problem.head_dim_v;
    Result result{.out = std::vector<double>(
                      static_cast<std::size_t>(problem.batch * problem.seqlen_q * heads * dim_v)),
                  .lse = std::vector<double>(
                      static_cast<std::size_t>(problem.batch * heads * problem.seqlen_q))};
    for (std::int64_t b = 0; b < problem.batch; ++b) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t i = 0; i < problem.seqlen_q; ++i) {
          long double denominator = 0;
          std::vector<long double> numerators(static_cast<std::size_t>(dim_v));
          for (std::int64_t j = 0; j < problem.seqlen_kv; ++j) {
            if (!is_visible(i, j)) continue;
            const std::int64_t kv_row =
                (b * problem.seqlen_kv + j) * problem.num_heads_kv + h / group;
            const double* q_row =
                &q[static_cast<std::size_t>(((b * problem.seqlen_q + i) * heads + h) * dim_qk)];
            const double* k_row = &k[static_cast<std::size_t>(kv_row * dim_qk)];
            const long double product = std::inner_product(q_row, q_row + dim_qk, k_row, 0.0L);
            const long double weight =
                std::exp(score(product / std::sqrt(static_cast<long double>(dim_qk)), h));
            denominator += weight;
            for (std::int64_t d = 0; d < dim_v; ++d) {
              numerators[static_cast<std::size_t>(d)] +=
                  weight * v[static_cast<std::size_t>(kv_row * dim_v + d)];
            }
          }
          result.lse[static_cast<std::size_t>((b * heads + h) * problem.seqlen_q + i)] =
              static_cast<double>(std::log(denominator));
          for (std::int64_t d = 0; d < dim_v; ++d) {
            result.out[static_cast<std::size_t>(((b * problem.seqlen_q + i) * heads + h) * dim_v +
                                                d)] =
                static_cast<double>(numerators[static_cast<std::size_t>(d)] / denominator);
          }
        }
      }
    }
    return result;
  }
};

void expect_meets_definition(const Case& problem, const Definition& definition) {
  CaseMemory memory(problem);
  const Definition::Result expected = definition.run(memory, problem);
  const ForwardResult got = reference::attention_forward(memory.args());
  ASSERT_EQ(got.out.size(), expected.out.size());
  for (std::size_t i = 0; i < got.out.size(); ++i)
    ASSERT_NEAR(got.out[i], expected.out[i], 1e-12) << i;
  for (std::size_t i = 0; i < got.lse.size(); ++i)
    ASSERT_NEAR(got.lse[i], expected.lse[i], 1e-12) << i;
}

TEST(ReferenceForward, MeetsTheDefinition) {
  Case problem{.label = "definition",
               .batch = 2,
               .seqlen_q = 5,
               .seqlen_kv = 9,
               .num_heads_q = 6,
               .num_heads_kv = 2,
               .head_dim_qk = 7,
               .head_dim_v = 3};
  for (const testing::Layout layout : testing::kInputLayouts) {
    problem.layout = layout;
    expect_meets_definition(problem, {});
  }
  for (const Dtype dtype : {Dtype::f16, Dtype::bf16}) {
    problem.dtype = dtype;
    expect_meets_definition(problem, {});
  }
}

TEST(ReferenceForward, ProgramsMeetTheDefinition) {
  Case problem{.label = "definition",
               .batch = 1,
               .seqlen_q = 6,
               .seqlen_kv = 11,
               .num_heads_q = 2,
               .head_dim_qk = 4,
               .head_dim_v = 4};
  problem.score = score_mod([](auto x) { return 2.0 * tanh(x.score / 2.0) + x.q_head; });
  problem.mask = mask_mod([](auto x) { return x.kv_idx <= x.q_idx + (x.seqlen_kv - x.seqlen_q); });
  expect_meets_definition(
      problem,
      {.is_visible = [](auto i, auto j) { return j <= i + 5; },
       .score = [](auto s, auto h) { return 2 * std::tanh(s / 2) + static_cast<long double>(h); }});
}

TEST(ReferenceForward, PackedEqualsEverySequenceAlone) {
  Case packed{.label = "packed", .sequences = {{3, 5}, {4, 1}, {2, 7}}, .num_heads_q = 2};
  packed.cu_seqlens_dtype = Dtype::i64;
  packed.mask = causal();
  packed.score = score_mod([](auto x) { return x.score + 0.5 * x.batch; });
  CaseMemory memory(packed);
  const ForwardResult all = reference::attention_forward(memory.args());
  const auto* q = static_cast<const float*>(memory.q.view().data());
  const auto* k = static_cast<const float*>(memory.k.view().data());
  const auto* v = static_cast<const float*>(memory.v.view().data());
  const std::int64_t q_begin[] = {0, 3, 7}, kv_begin[] = {0, 5, 6};
  for (std::int64_t i = 0; i < 3; ++i) {
    const testing::Lengths lengths = packed.lengths(i);
    AttentionForward one{.q = view(q + q_begin[i] * 16, {1, lengths.q, 2, 8}),
                         .k = view(k + kv_begin[i] * 8, {1, lengths.kv, 1, 8}),
                         .v = view(v + kv_begin[i] * 8, {1, lengths.kv, 1, 8}),
                         .out = {}};
    one.mask = packed.mask;
    one.score = score_mod([i](auto x) { return x.score + 0.5 * static_cast<double>(i); });
    const ForwardResult alone = reference::attention_forward(one);
    for (std::size_t j = 0; j < alone.out.size(); ++j) {
      ASSERT_DOUBLE_EQ(alone.out[j], all.out[static_cast<std::size_t>(q_begin[i] * 16) + j]);
    }
    for (std::int64_t head = 0; head < 2; ++head) {
      for (std::int64_t row = 0; row < lengths.q; ++row) {
        ASSERT_DOUBLE_EQ(alone.lse[static_cast<std::size_t>(head * lengths.q + row)],
                         all.lse[static_cast<std::size_t>(head * 9 + q_begin[i] + row)]);
      }
    }
  }
}

}  // namespace
}  // namespace fovea::reference
