// Faults that readers and users found, one test each.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "support/compare.hpp"

namespace fovea::testing {
namespace {

TEST(CpuRegression, RowsUnderTheLowestFloatAverageTheValues) {
  // A common bias: the lowest float in place of -inf. Where all of a row has it, it tells no key from another.
  // 5 queries: a panel rather than a few rows, 3: a few rows. 150 keys: a second tile.
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const std::int64_t seqlen_q : {3, 5}) {
      for (const CpuTarget target : targets_for(dtype)) {
        for (const double low : {-1e12, -1e30, -3.4028234e38}) {
          SCOPED_TRACE(std::string(fovea::name(target)) + " " + std::to_string(low));
          Case problem{.label = "lowest", .seqlen_q = seqlen_q, .seqlen_kv = 150, .dtype = dtype};
          problem.score = score_mod([low](auto x) { return select(x.q_idx == 1, low, x.score); });
          CaseMemory memory(problem);
          const AttentionForward args = memory.args(target);
          attention_forward(args);
          const std::vector<double> out = values_of(args.out);
          const std::vector<double> values = values_of(args.v);
          for (std::size_t dim = 0; dim < 8; ++dim) {
            double mean = 0;
            for (std::size_t key = 0; key < 150; ++key) mean += values[key * 8 + dim] / 150;
            EXPECT_NEAR(out[8 + dim], mean, dtype == Dtype::f32 ? 1e-6 : 4e-3) << dim;
          }
        }
      }
    }
  }
}

TEST(CpuRegression, HugeScoresTakeTheValueOfTheLargest) {
  // Scores around 1e30: differences alone may be multiplied by log2(e).
  Case problem{.label = "huge", .seqlen_q = 40, .seqlen_kv = 150, .softmax_scale = 1e30F};
  for (const CpuTarget target : targets_for(problem.dtype)) {
    SCOPED_TRACE(fovea::name(target));
    CaseMemory memory(problem);
    const AttentionForward args = memory.args(target);
    attention_forward(args);
    const std::vector<double> q = values_of(args.q), k = values_of(args.k);
    const std::vector<double> values = values_of(args.v), out = values_of(args.out);
    const auto dot = [&](std::size_t row, std::size_t key) {
      return std::inner_product(&q[row * 8], &q[row * 8] + 8, &k[key * 8], 0.0);
    };
    for (std::size_t row = 0; row < 40; ++row) {
      std::size_t largest = 0;
      for (std::size_t key = 1; key < 150; ++key) {
        if (dot(row, key) > dot(row, largest)) largest = key;
      }
      for (std::size_t dim = 0; dim < 8; ++dim)
        EXPECT_NEAR(out[row * 8 + dim], values[largest * 8 + dim], 1e-6) << row;
    }
  }
}

TEST(CpuRegression, ValuesThatRoundToInfinityDoNotVanish) {
  // The largest floats are infinite in bf16: a row that sees one must not take it for 0.
  constexpr std::int64_t kQueries = 40, kKeys = 10, kDim = 8;
  for (const CpuTarget target : {CpuTarget::avx512_bf16, CpuTarget::amx_bf16}) {
    std::vector<float> q(kQueries * kDim, 0.5F), k(kKeys * kDim, 0.5F), v(kKeys * kDim, 1.0F);
    std::vector<float> out(kQueries * kDim);
    v[3] = 3.4e38F;
    AttentionForward args{.q = view(q.data(), {1, kQueries, 1, kDim}),
                          .k = view(k.data(), {1, kKeys, 1, kDim}),
                          .v = view(v.data(), {1, kKeys, 1, kDim}),
                          .out = view(out.data(), {1, kQueries, 1, kDim})};
    args.compute_dtype = ComputeDtype::bf16;
    args.cpu_target = target;
    try {
      attention_forward(args);
    } catch (const Unsupported&) {
      continue;  // this processor lacks the target
    }
    for (std::int64_t row = 0; row < kQueries; ++row) {
      EXPECT_FALSE(std::isfinite(out[static_cast<std::size_t>(row * kDim + 3)])) << row;
      EXPECT_NEAR(out[static_cast<std::size_t>(row * kDim)], 1.0F, 1e-2F) << row;
    }
  }
}

}  // namespace
}  // namespace fovea::testing
