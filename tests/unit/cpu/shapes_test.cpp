// Shapes: every small one, head dims around vector lengths, long keys around the places where work
// is cut.
#include <gtest/gtest.h>

#include <string>

#include "fovea/mask.hpp"

#include "support/compare.hpp"

namespace fovea::testing {
namespace {

constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::f16, Dtype::bf16};

/// 17 queries: one more than a vector of 16 lanes. 130 keys: two more than a tile. The dtype
/// changes from shape to shape.
class CpuSmallShapes : public ::testing::TestWithParam<Align> {};

TEST_P(CpuSmallShapes, CausalEqualsOracle) {
  Case problem{
      .label = "small shape", .head_dim_qk = 6, .head_dim_v = 5, .mask = causal(GetParam())};
  for (problem.seqlen_q = 1; problem.seqlen_q <= 17; ++problem.seqlen_q) {
    for (problem.seqlen_kv = 1; problem.seqlen_kv <= 130; ++problem.seqlen_kv) {
      problem.seed = static_cast<std::uint64_t>(problem.seqlen_q * 1000 + problem.seqlen_kv);
      problem.dtype = kDtypes[problem.seed % 3];
      expect_equals_oracle(problem);
      if (HasFailure()) return;  // one shape tells enough
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Both, CpuSmallShapes,
                         ::testing::Values(Align::bottom_right, Align::top_left),
                         [](const auto& each) {
                           return std::string(each.param == Align::top_left ? "top_left"
                                                                            : "bottom_right");
                         });

TEST(CpuShapes, AxesOfSizeZero) {
  for (const Dtype dtype : kDtypes) {
    expect_equals_oracle(
        {.label = "no keys", .batch = 2, .seqlen_q = 3, .seqlen_kv = 0, .dtype = dtype});
    expect_equals_oracle(
        {.label = "no queries", .batch = 2, .seqlen_q = 0, .seqlen_kv = 3, .dtype = dtype});
    expect_equals_oracle(
        {.label = "no batch", .batch = 0, .seqlen_q = 2, .seqlen_kv = 3, .dtype = dtype});
    expect_equals_oracle({.label = "no heads",
                          .seqlen_q = 2,
                          .seqlen_kv = 3,
                          .num_heads_q = 0,
                          .num_heads_kv = 0,
                          .dtype = dtype});
    expect_equals_oracle({.label = "no keys, sinks",
                          .seqlen_q = 3,
                          .seqlen_kv = 0,
                          .num_heads_q = 2,
                          .dtype = dtype,
                          .has_sinks = true});
  }
}

class CpuHeadDims : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(CpuHeadDims, EqualsOracle) {
  // 150 keys: a second tile, so that output is rescaled; 3 queries of 2 heads share a panel.
  Case problem{.label = "head_dim", .seqlen_q = 3, .seqlen_kv = 150, .num_heads_q = 2};
  for (const Dtype dtype : kDtypes) {
    problem.dtype = dtype;
    problem.head_dim_qk = problem.head_dim_v = GetParam();
    expect_equals_oracle(problem);
    problem.head_dim_qk = 8;
    expect_equals_oracle(problem);
    problem.head_dim_qk = GetParam();
    problem.head_dim_v = 8;
    expect_equals_oracle(problem);
  }
}

// 1, 2, 3; around 8 and 16 lanes; around 2, 4, 8, 16 and 32 vectors of 16; the field's 80, 96,
// 160, 192; latent keys (576), the widest.
INSTANTIATE_TEST_SUITE_P(Spot, CpuHeadDims,
                         ::testing::Values(1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 80, 96,
                                           127, 128, 129, 160, 192, 256, 257, 511, 512, 513, 576));

TEST(CpuDecode, LongKeysEqualOracle) {
  // Around two splits of 2048 keys, and a prime several splits away.
  for (const std::int64_t seqlen_kv : {2047, 2049, 4095, 4096, 4097, 10007}) {
    for (const Dtype dtype : kDtypes) {
      Case problem{.label = "decode",
                   .seqlen_q = 1,
                   .seqlen_kv = seqlen_kv,
                   .num_heads_q = 4,
                   .num_heads_kv = 2,
                   .head_dim_qk = 16,
                   .head_dim_v = 16,
                   .dtype = dtype};
      problem.distribution = Distribution::heavy_tailed;
      expect_equals_oracle(problem);
    }
  }
}

TEST(CpuDecode, MaskedSplitsAndSinksEqualOracle) {
  // The window leaves the first splits empty; packed mates have lengths of their own.
  Case problem{.label = "decode window", .seqlen_q = 1, .seqlen_kv = 6000, .num_heads_q = 3};
  problem.mask = window(700, 0);
  problem.has_sinks = true;
  problem.dropout = {.p = 0.2F, .seed = 3, .offset = 0};
  expect_equals_oracle(problem);
  problem.label = "packed decode";
  problem.sequences = {{1, 5000}, {1, 1}, {2, 4097}, {1, 0}};
  problem.mask = causal();
  for (const Dtype dtype : kDtypes) {
    problem.dtype = dtype;
    expect_equals_oracle(problem);
  }
}

TEST(CpuShapes, SeveralPanelsAndTilesEqualOracle) {
  // 211 queries, a prime, in panels of at most 48; 389 keys in four tiles.
  Case problem{.label = "several panels",
               .seqlen_q = 211,
               .seqlen_kv = 389,
               .num_heads_q = 2,
               .num_heads_kv = 1,
               .head_dim_qk = 40,
               .head_dim_v = 24};
  for (const Dtype dtype : kDtypes) {
    problem.dtype = dtype;
    problem.mask = MaskMod();
    expect_equals_oracle(problem);
    problem.mask = causal() && window(100, std::nullopt);
    expect_equals_oracle(problem);
  }
}

TEST(CpuScores, OverflowingExponentialsEqualOracle) {
  // Scores of several hundred: only differences to the running maximum may be exponentiated.
  Case problem{.label = "steep", .seqlen_q = 20, .seqlen_kv = 300, .softmax_scale = 60.F};
  for (const Dtype dtype : kDtypes) {
    problem.dtype = dtype;
    expect_equals_oracle(problem);
  }
}

}  // namespace
}  // namespace fovea::testing
