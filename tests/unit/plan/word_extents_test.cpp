// Tensors of library words have an element for each index of a call. An index beyond an end would read the last
// element again, as it does in other programs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "unit/problem/problems.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;
using Shape = std::vector<std::int64_t>;

constexpr std::string_view kAccepted = "(not refused)";

TensorView of(Dtype dtype, const Shape& shape) {
  return {static_cast<const void*>(nullptr), spec_of(dtype, shape)};
}
TensorView ints(const Shape& shape) { return of(Dtype::i32, shape); }

std::string refusal_of(Problem problem, const ScoreMod& score, const MaskMod& mask = {}) {
  problem.score = score;
  problem.mask = mask;
  return refusal([&] { (void)validate(problem, "plan"); });
}
std::string refusal_of(const ScoreMod& score) { return refusal_of(dense_problem(), score); }
std::string refusal_of(const MaskMod& mask) { return refusal_of(dense_problem(), {}, mask); }

TEST(WordExtents, OfPairsFitOrBroadcast) {
  for (const Shape& shape : {Shape{3, 5},
                             {1, 5},
                             {3, 1},
                             {4, 9},
                             {4, 3, 5},
                             {1, 3, 5},
                             {2, 4, 3, 5},
                             {3, 1, 8, 8},
                             {1, 1, 1, 1}}) {
    EXPECT_EQ(refusal_of(bias(of(Dtype::f32, shape))), kAccepted);
    EXPECT_EQ(refusal_of(dense_mask(of(Dtype::boolean, shape))), kAccepted);
  }
  for (const Shape& shape : {Shape{3, 4}, {2, 5}, {5, 3, 5}, {3, 3, 5}, {1, 2, 3, 5}}) {
    EXPECT_THAT(refusal_of(bias(of(Dtype::f32, shape))), HasSubstr("plan: bias is f32 ["));
    EXPECT_THAT(refusal_of(dense_mask(of(Dtype::u8, shape))),
                HasSubstr("dense_mask: mask is u8 ["));
  }
  EXPECT_EQ(refusal_of(bias(of(Dtype::f32, {3, 4}))),
            "plan: bias is f32 [3, 4]; expected [3, 5], of which all but heads may be more, or 1 "
            "where all share an element");
}

TEST(WordExtents, OfHeadsAndSequences) {
  for (const Shape& shape : {Shape{4}, {1}, {2, 4}, {3, 4}, {1, 4}})
    EXPECT_EQ(refusal_of(alibi(of(Dtype::f32, shape))), kAccepted);
  for (const Shape& shape : {Shape{3}, {5}, {2, 2}})
    EXPECT_THAT(refusal_of(alibi(of(Dtype::f32, shape))), HasSubstr("alibi: slopes is f32 ["));

  const Expr bucket = arguments().kv_idx - arguments().q_idx;
  EXPECT_EQ(refusal_of(relative_bias(of(Dtype::f32, {4, 2}), bucket)), kAccepted);
  EXPECT_THAT(refusal_of(relative_bias(of(Dtype::f32, {2, 9}), bucket)),
              HasSubstr("relative_bias: table is f32 [2, 9]; expected [4, any]"));

  EXPECT_EQ(refusal_of(prefix_lm(ints({2}))), kAccepted);
  Problem three = dense_problem();
  for (TensorSpec* spec : {&three.q, &three.k, &three.v}) spec->shape[0] = 3;
  EXPECT_THAT(refusal_of(three, {}, prefix_lm(ints({2}))),
              HasSubstr("prefix_lm: prefix_lengths is i32 [2]; expected [3]"));

  // Positions behind the end of a table of tiles are as its last ones.
  EXPECT_EQ(refusal_of(tile_mask(of(Dtype::u8, {4, 2, 2}), 1, 1)), kAccepted);
  EXPECT_THAT(refusal_of(tile_mask(of(Dtype::u8, {3, 2, 2}), 1, 1)),
              HasSubstr("tile_mask: table is u8 [3, 2, 2]; expected [4, any, any]"));
}

TEST(WordExtents, OfDocuments) {
  EXPECT_EQ(refusal_of(documents(ints({2, 3}), ints({2, 5}))), kAccepted);
  EXPECT_EQ(refusal_of(documents(ints({1, 3}), ints({1, 5}))), kAccepted);
  EXPECT_EQ(refusal_of(documents(ints({2, 5}))), kAccepted);
  EXPECT_THAT(refusal_of(documents(ints({2, 2}), ints({2, 5}))),
              HasSubstr("documents: segments_q is i32 [2, 2]; expected [2, 3]"));
  EXPECT_THAT(refusal_of(documents(ints({2, 3}), ints({2, 4}))),
              HasSubstr("documents: segments_kv is i32 [2, 4]; expected [2, 5]"));
  EXPECT_THAT(refusal_of(documents(ints({2, 3}))),
              HasSubstr("documents: segments is i32 [2, 3]; expected [2, 5]"));
}

TEST(WordExtents, OfPackedDocuments) {
  const auto packed = [](std::int64_t ids_q, std::int64_t ids_kv, std::int64_t offsets) {
    return refusal_of(packed_problem(), {},
                      documents({.segments_q = ints({ids_q}),
                                 .segments_kv = ints({ids_kv}),
                                 .cu_seqlens_q = ints({offsets}),
                                 .cu_seqlens_kv = ints({4})}));
  };
  EXPECT_EQ(packed(7, 9, 4), kAccepted);
  EXPECT_THAT(packed(6, 9, 4), HasSubstr("documents: segments_q is i32 [6]; expected [7]"));
  EXPECT_THAT(packed(7, 1, 4), HasSubstr("documents: segments_kv is i32 [1]; expected [9]"));
  EXPECT_THAT(packed(7, 9, 3), HasSubstr("documents: cu_seqlens_q is i32 [3]; expected [4]"));
  const MaskMod one = documents({.segments_q = ints({8}), .cu_seqlens_q = ints({4})});
  EXPECT_THAT(refusal_of(packed_problem(), {}, one),
              HasSubstr("documents: segments_q is i32 [8]; expected [9]"));
}

/// Lengths of packed sequences are in memory; heads and sequences are not.
TEST(WordExtents, OfPackedSequencesAreThoseOfTheLongest) {
  EXPECT_EQ(refusal_of(packed_problem(), bias(of(Dtype::f32, {3, 4, 2, 2}))), kAccepted);
  EXPECT_THAT(refusal_of(packed_problem(), bias(of(Dtype::f32, {2, 4, 9, 9}))),
              HasSubstr("expected [3, 4, any, any]"));
}

TEST(WordExtents, OfATreeAreItsWordsToo) {
  Problem problem = dense_problem();
  problem.q.shape[1] = 40;
  problem.k.shape[1] = problem.v.shape[1] = 50;
  EXPECT_EQ(refusal_of(problem, {}, tree(ints({40, 2}))), kAccepted);
  EXPECT_THAT(refusal_of(problem, {}, tree(ints({40, 1}))),
              HasSubstr("tree: tree_bits is i32 [40, 1]; expected [40, 2]"));
  EXPECT_THAT(refusal_of(problem, {}, tree(ints({2, 39, 2}))), HasSubstr("expected [2, 40, 2]"));
}

TEST(WordExtents, StayWithAProgramThatIsJoinedAndBoundAnew) {
  const ScoreMod joined = bias(of(Dtype::f32, {3, 5})) | softcap(2) | bias(of(Dtype::f16, {3, 4}));
  EXPECT_THAT(refusal_of(joined), HasSubstr("bias: bias_2 is f16 [3, 4]; expected [3, 5]"));
  EXPECT_EQ(refusal_of(alibi(tensor_slot("any", Dtype::f32, 1).view)), kAccepted);
  const ScoreMod of_slot = bias(tensor_slot("any", Dtype::f32, 3).view);
  const auto bound = [&](const ScoreMod& score, const Shape& shape) {
    return refusal_of(score.with_captures({.tensors = {{"bias", of(Dtype::f32, shape)}}}));
  };
  EXPECT_EQ(bound(of_slot, {1, 3, 5}), kAccepted);
  EXPECT_THAT(bound(of_slot, {2, 3, 5}), HasSubstr("bias is f32 [2, 3, 5]; expected [4, 3, 5]"));
  // Made for one that all share, it would read the first row alone.
  EXPECT_THAT(bound(bias(of(Dtype::f32, {1, 5})), {3, 5}),
              HasSubstr("bias is f32 [3, 5]; expected [1, 5]"));
}

/// The same formula as a program of one's own: an index beyond the end reads the nearest element.
TEST(WordExtents, AreAskedOfWordsAlone) {
  const TensorView table = of(Dtype::f32, {3, 4});
  const ScoreMod own = score_mod(
      [&](const Arguments& x) { return x.score + capture("bias", table)(x.q_idx, x.kv_idx); });
  ASSERT_EQ(own, bias(table));
  EXPECT_EQ(refusal_of(own), kAccepted);
}

TEST(WordExtents, AreThoseOfEachCallWhereAPlanHasBounds) {
  Problem problem = dense_problem();
  problem.seqlen_kv = up_to(100);
  EXPECT_EQ(refusal_of(problem, bias(of(Dtype::f32, {3, 5}))), kAccepted);

  std::vector<float> memory(1000), out(1000);
  const auto run = [&](std::int64_t seqlen_kv, std::int64_t columns) {
    AttentionForward args{.q = view(memory.data(), {2, 3, 4, 8}),
                          .k = view(memory.data(), {2, seqlen_kv, 2, 8}),
                          .v = view(memory.data(), {2, seqlen_kv, 2, 6}),
                          .out = view(out.data(), {2, 3, 4, 6}),
                          .score = bias(view(memory.data(), {3, columns}))};
    Problem bounded = problem_of(args);
    bounded.seqlen_kv = up_to(100);
    const ForwardProblem f = validate(bounded, "plan");
    return refusal([&] { validate_arguments(f, args, "run"); });
  };
  EXPECT_EQ(run(5, 5), kAccepted);
  EXPECT_EQ(run(5, 6), kAccepted);
  EXPECT_THAT(run(6, 5), HasSubstr("run: bias is f32 [3, 5]; expected [3, 6]"));
}

}  // namespace
}  // namespace fovea::testing
