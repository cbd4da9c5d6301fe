// Gradients at the sizes where loops end: panels, tiles, chunks of keys, blocks of accumulators. Values against the
// oracle.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "fovea/mask.hpp"

#include "support/compare.hpp"
#include "support/gradient_compare.hpp"

namespace fovea::testing {
namespace {

/// bf16 too: there are kernels that multiply in it.
void expect_right(GradientCase problem) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    problem.forward.dtype = dtype;
    const std::string difference = backward_difference(problem);
    EXPECT_TRUE(difference.empty()) << name(dtype) << " " << difference;
  }
}

/// 1, around a block of tiles (32) and of accumulators (64 floats of AVX-512), widths that split into uneven blocks
/// (80: 3 and 2 vectors), no multiple of 4, and the largest.
TEST(BackwardShapes, HeadDims) {
  for (const std::int64_t head_dim : {1, 7, 16, 31, 32, 33, 63, 64, 65, 80, 96, 200, 512, 576}) {
    expect_right(
        {.forward = {.label = fmt::format("head_dim {}", head_dim),
                     .seqlen_q = 5,
                     .seqlen_kv = 37,
                     .head_dim_qk = head_dim,
                     .head_dim_v = head_dim % 2 == 0 ? head_dim : 3 * head_dim % 200 + 1}});
  }
}

/// Around a block of 32 rows, panels of 48 and of 64 and a walk of 4 panels, heads of a group sharing a panel.
TEST(BackwardShapes, Rows) {
  for (const std::int64_t seqlen_q : {0, 1, 11, 16, 22, 47, 48, 49, 64, 65, 97, 193}) {
    expect_right({.forward = {.label = fmt::format("seqlen_q {}", seqlen_q),
                              .seqlen_q = seqlen_q,
                              .seqlen_kv = 40,
                              .num_heads_q = 3,
                              .num_heads_kv = 1}});
  }
}

/// Around a block of 6, 8 and 32 keys, a tile of 128, a chunk of 512, and past 8 chunks of 512, where chunks grow.
TEST(BackwardShapes, Keys) {
  for (const std::int64_t seqlen_kv :
       {0, 1, 5, 6, 9, 31, 32, 33, 127, 128, 129, 511, 512, 513, 1025, 4200}) {
    expect_right({.forward = {.label = fmt::format("seqlen_kv {}", seqlen_kv),
                              .seqlen_q = 3,
                              .seqlen_kv = seqlen_kv,
                              .num_heads_q = 2}});
  }
}

TEST(BackwardShapes, WithoutHeadsOrBatchNothingIsRead) {
  expect_right({.forward = {.label = "no batch", .batch = 0, .seqlen_q = 3, .seqlen_kv = 4}});
}

/// Private sums for up to 16,384 elements, one sum for more; the last element stands for indices beyond it.
TEST(BackwardShapes, CapturedTensors) {
  const auto wave = [](std::int64_t i) { return std::sin(static_cast<double>(i)); };
  struct Table {
    const char* label;
    std::vector<std::int64_t> shape;
    const char* score;
  };
  for (const Table& table : {
           Table{"one number per key", {20000}, "score + t[kv_idx]"},
           Table{"clamped", {30}, "score + t[kv_idx - q_idx]"},
           Table{"clamped and large", {17000}, "score * t[100 * kv_idx]"},
           Table{"read twice", {40, 600}, "score + t[q_idx, kv_idx] * t[q_head, q_idx]"},
           Table{"transposed", {600, 40}, "score + t[kv_idx, q_idx]"},
           Table{"by score", {9}, "score + t[int(score) + 4] * score"},
           Table{"not at all", {9}, "score + float(int(t[q_head]))"},
           Table{"bf16 sums", {2, 40, 600}, "score + t[batch, q_idx, kv_idx]"},
       }) {
    GradientCase problem{.forward = {.label = table.label,
                                     .batch = 2,
                                     .seqlen_q = 40,
                                     .seqlen_kv = 600,
                                     .num_heads_q = 2,
                                     .mask = causal()}};
    if (table.label == std::string("bf16 sums")) problem.gradient_dtype = Dtype::bf16;
    const TensorView view = problem.forward.capture(Dtype::f32, table.shape, wave);
    problem.forward.score = parse_score_mod(table.score, {.tensors = {{"t", view}}, .scalars = {}});
    expect_right(problem);
  }
}

/// Sequences of different lengths add to the same elements of a large bias: chunks begin at different keys.
TEST(BackwardShapes, PackedSequencesShareALargeBias) {
  GradientCase problem{.forward = {.label = "shared bias",
                                   .sequences = {{30, 600}, {40, 5000}, {7, 5}},
                                   .num_heads_q = 2}};
  const TensorView view = problem.forward.capture(Dtype::f32, {1, 1, 40, 5000}, [](std::int64_t i) {
    return std::sin(static_cast<double>(i));
  });
  problem.forward.score = bias(view);
  const auto pool = make_thread_pool(3);
  const std::string difference = backward_difference(problem, {.executor = pool.get()});
  EXPECT_TRUE(difference.empty()) << difference;
}

}  // namespace
}  // namespace fovea::testing
