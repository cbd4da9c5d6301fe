// Index maps against the layouts of accumulators that they were made for.
#include "quant/groups.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "quant/hadamard.hpp"

namespace fovea::quant {
namespace {

constexpr Quantization kThreads{.q_scales = ScaleGranularity::thread,
                                .k_scales = ScaleGranularity::thread,
                                .block_q = 64,
                                .warp_q = 16,
                                .block_kv = 64};

/// Lane l of an m16n8 accumulator holds rows l / 4 and l / 4 + 8, columns 2 (l mod 4) and the next.
TEST(Groups, OfThreadsAreOneForAllThatALaneHolds) {
  for (std::int64_t lane = 0; lane < 32; ++lane) {
    for (std::int64_t tile = 0; tile < 3; ++tile) {
      std::set<std::int64_t> rows, columns;
      for (const std::int64_t row : {lane / 4, lane / 4 + 8})
        rows.insert(q_group(kThreads, 16 * tile + row));
      for (std::int64_t slab = 0; slab < 8; ++slab)
        for (const std::int64_t column : {2 * (lane % 4), 2 * (lane % 4) + 1})
          columns.insert(k_group(kThreads, 64 * tile + 8 * slab + column));
      EXPECT_EQ(rows, (std::set<std::int64_t>{8 * tile + lane / 4}));
      EXPECT_EQ(columns, (std::set<std::int64_t>{4 * tile + lane % 4}));
    }
  }
}

TEST(Groups, StartAtTheirFirstRowAndAreCounted) {
  using G = ScaleGranularity;
  for (const std::int64_t rows : {1, 7, 8, 63, 64, 65, 200}) {
    for (const G granularity : {G::tensor, G::block, G::warp, G::thread, G::token}) {
      Quantization quant = kThreads;
      quant.q_scales = quant.k_scales = granularity;
      std::set<std::int64_t> q_groups, k_groups;
      for (std::int64_t n = 0; n < rows; ++n) {
        const std::int64_t first = first_of_q_group(quant, n);
        EXPECT_LE(first, n);
        EXPECT_EQ(q_group(quant, first), q_group(quant, n));
        const bool is_new = q_groups.insert(q_group(quant, n)).second;
        EXPECT_EQ(is_new, first == n);
        const std::int64_t first_key = first_of_k_group(quant, n);
        EXPECT_LE(first_key, n);
        EXPECT_EQ(k_group(quant, first_key), k_group(quant, n));
        const bool is_new_key = k_groups.insert(k_group(quant, n)).second;
        EXPECT_EQ(is_new_key, first_key == n);
      }
      EXPECT_LT(*q_groups.rbegin(), num_q_groups(quant, rows));
      EXPECT_LT(*k_groups.rbegin(), num_k_groups(quant, rows));
    }
  }
}

/// In rows of their own, each with its scale.
TEST(Groups, OfE2m1AreOfOneRow) {
  for (const ScaleGranularity groups : {ScaleGranularity::group_16, ScaleGranularity::group_32}) {
    const Quantization quant{.q_scales = groups, .k_scales = groups};
    for (const std::int64_t n : {0, 1, 15, 16, 200}) {
      EXPECT_EQ(first_of_q_group(quant, n), n);
      EXPECT_EQ(first_of_k_group(quant, n), n);
    }
    EXPECT_EQ(num_q_groups(quant, 200), 200);
    EXPECT_EQ(num_k_groups(quant, 200), 200);
  }
  EXPECT_EQ(group_size(ScaleGranularity::group_16), 16);
  EXPECT_EQ(group_size(ScaleGranularity::group_32), 32);
  EXPECT_EQ(group_scale(ScaleGranularity::group_16, 6 * 1.125F), 1.125F);
  EXPECT_EQ(group_scale(ScaleGranularity::group_32, 6 * 1.125F), 2);
  EXPECT_EQ(group_reciprocal(group_scale(ScaleGranularity::group_16, 1e-4F)), 0);
}

TEST(Sample, IsSpreadOverAllRowsAndTakesAllOfAFew) {
  for (const std::int64_t rows : {1, 63, 64, 65, 1000}) {
    std::set<std::int64_t> sampled;
    for (std::int64_t i = 0; i < num_sampled(rows); ++i) sampled.insert(sampled_row(i, rows));
    EXPECT_EQ(static_cast<std::int64_t>(sampled.size()), std::min<std::int64_t>(rows, 64));
    EXPECT_LT(*sampled.rbegin(), rows);
    EXPECT_GE(*sampled.rbegin(), rows - 1 - rows / 64);
  }
}

TEST(Rotation, KeepsProductsAndSpreadsSpikes) {
  for (const std::size_t head_dim : {2, 24, 64, 128, 80}) {
    std::vector<float> spike(head_dim), row(head_dim);
    spike[head_dim / 2] = 8;
    double product = 0, rotated = 0;
    for (std::size_t d = 0; d < head_dim; ++d) {
      row[d] = static_cast<float>(d % 7) - 2.5F;
      product += spike[d] * row[d];
    }
    rotate(spike);
    rotate(row);
    for (std::size_t d = 0; d < head_dim; ++d) rotated += spike[d] * row[d];
    EXPECT_NEAR(rotated, product, 1e-4) << head_dim;
    const auto block = static_cast<float>(hadamard_block(static_cast<std::int64_t>(head_dim)));
    float greatest = 0;
    for (const float x : spike) greatest = std::max(greatest, std::fabs(x));
    EXPECT_NEAR(greatest, 8 / std::sqrt(block), 1e-5) << head_dim;
  }
}

/// A row of equal numbers is not made a spike.
TEST(Rotation, HasSignsThatBreakUpConstants) {
  std::vector<float> row(64, 1.0F);
  rotate(row);
  for (const float x : row) EXPECT_LT(std::fabs(x), 4);
}

}  // namespace
}  // namespace fovea::quant
