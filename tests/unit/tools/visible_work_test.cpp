#include "tools/visible_work.hpp"

#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace fovea::tools {
namespace {

constexpr std::int64_t kBatch = 2, kHeadsQ = 4, kHeadsKv = 2, kHeadDim = 8;

AttentionForward dense(std::int64_t seqlen_q, std::int64_t seqlen_kv, const MaskMod& mask) {
  const float* nothing = nullptr;
  return {.q = view(nothing, {kBatch, seqlen_q, kHeadsQ, kHeadDim}),
          .k = view(nothing, {kBatch, seqlen_kv, kHeadsKv, kHeadDim}),
          .v = view(nothing, {kBatch, seqlen_kv, kHeadsKv, kHeadDim}),
          .mask = mask};
}

TEST(VisibleWork, CausalCountsTheTriangle) {
  const VisibleWork work = visible_work(dense(10, 10, causal()), 4, 4);
  EXPECT_DOUBLE_EQ(work.share, 0.55);
  EXPECT_DOUBLE_EQ(work.flops, 2.0 * kBatch * kHeadsQ * 55 * 2 * kHeadDim);
  EXPECT_DOUBLE_EQ(work.backward_flops, 2.0 * kBatch * kHeadsQ * 55 * 5 * kHeadDim);
  EXPECT_EQ(work.tiles.total(), 9 * kBatch * kHeadsQ);
  EXPECT_EQ(work.tiles.empty, 3 * kBatch * kHeadsQ);
}

TEST(VisibleWork, GradientsHaveThreeProductsOverKeysAndTwoOverValues) {
  constexpr std::int64_t kSeqlenQ = 3, kSeqlenKv = 5, kHeadDimV = 6;
  const float some = 0,
              others = 0;  // what is absent has no bytes, and v in k's memory is read with it
  const AttentionForward args{.q = view(&some, {kBatch, kSeqlenQ, kHeadsQ, kHeadDim}),
                              .k = view(&some, {kBatch, kSeqlenKv, kHeadsKv, kHeadDim}),
                              .v = view(&others, {kBatch, kSeqlenKv, kHeadsKv, kHeadDimV}),
                              .out = view(&some, {kBatch, kSeqlenQ, kHeadsQ, kHeadDimV}),
                              .lse = view(&some, {kBatch, kHeadsQ, kSeqlenQ})};
  const VisibleWork work = visible_work(args, 4, 4);
  EXPECT_DOUBLE_EQ(work.backward_flops,
                   2.0 * kBatch * kHeadsQ * kSeqlenQ * kSeqlenKv * (3 * kHeadDim + 2 * kHeadDimV));
  const double of_queries = kHeadsQ * kSeqlenQ * (kHeadDim + kHeadDimV + 1);
  const double of_keys = kHeadsKv * kSeqlenKv * (kHeadDim + kHeadDimV);
  EXPECT_DOUBLE_EQ(work.backward_bytes, 2 * 4 * kBatch * (of_queries + of_keys));
}

TEST(VisibleWork, LargeProblemsAreCountedByTiles) {
  // 8192^2 is above a million elements; tiles on the diagonal count half, as the diagonal does.
  EXPECT_NEAR(visible_work(dense(8192, 8192, causal()), 128, 128).share, 0.5, 1e-3);
}

TEST(VisibleWork, SequencesOfABatchMayDiffer) {
  const std::array<std::int32_t, 8> ids{0, 0, 0, 0, 0, 0, 1, 1};
  const VisibleWork work = visible_work(dense(4, 4, documents(view(ids.data(), {2, 4}))), 4, 4);
  EXPECT_DOUBLE_EQ(work.share, (16 + 8) / 32.0);
}

TEST(VisibleWork, NothingIsVisibleOfNothing) {
  EXPECT_EQ(visible_work(dense(5, 0, causal()), 4, 4).flops, 0);
  EXPECT_EQ(visible_work(dense(0, 5, causal()), 4, 4).flops, 0);
}

TEST(VisibleWork, PackedSequencesCountTheirOwnLengths) {
  const std::array<std::int32_t, 3> offsets{0, 3, 5};
  const float* nothing = nullptr;
  const AttentionForward args{.q = view(nothing, {6, kHeadsQ, kHeadDim}),
                              .k = view(nothing, {6, kHeadsKv, kHeadDim}),
                              .v = view(nothing, {6, kHeadsKv, kHeadDim}),
                              .cu_seqlens_q = view(offsets.data(), {3}),
                              .cu_seqlens_kv = view(offsets.data(), {3})};
  EXPECT_DOUBLE_EQ(visible_work(args, 4, 4).flops, 2.0 * kHeadsQ * (9 + 4) * 2 * kHeadDim);
}

}  // namespace
}  // namespace fovea::tools
