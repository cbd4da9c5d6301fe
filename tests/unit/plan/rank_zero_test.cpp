// Captured tensors of rank 0: one number that is read when the call runs. What they give is what a captured scalar of
// that value gives, bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/backward.hpp"
#include "fovea/jvp.hpp"
#include "fovea/kv_cache.hpp"

#include "support/compare.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kSeqlen = 300, kHeadDim = 8;

struct Call {
  std::vector<float> q, k, v, out, lse, gradient;

  Call() {
    const auto count = static_cast<std::size_t>(kSeqlen * kHeadDim);
    for (std::size_t i = 0; i < count; ++i) {
      q.push_back(static_cast<float>(i % 13) / 8 - 0.75F);
      k.push_back(static_cast<float>(i % 7) / 4 - 0.75F);
      v.push_back(static_cast<float>(i % 31) / 8);
    }
    out.assign(count, -7);
    gradient.assign(count, -7);
    lse.assign(kSeqlen, -7);
  }
  static TensorView dense(std::vector<float>& values) {
    return view(values.data(), {1, kSeqlen, 1, kHeadDim});
  }
  AttentionForward args(const ScoreMod& score, const MaskMod& mask) {
    return {.q = dense(q),
            .k = dense(k),
            .v = dense(v),
            .out = dense(out),
            .lse = view(lse.data(), {1, 1, kSeqlen}),
            .score = score,
            .mask = mask};
  }
};

constexpr const char* kScore = "gain * tanh(score / gain) + gain * (kv_idx - q_idx)";
constexpr const char* kMask = "kv_idx <= q_idx && q_idx - kv_idx <= reach";

/// The programs over scalars, and over tensors that hold the same.
struct Numbers {
  float gain = 0.125F;
  std::int32_t reach = 40;

  Captures scalars() const {
    return {.scalars = {CapturedScalar::of("gain", gain), CapturedScalar::of("reach", reach)}};
  }
  Captures tensors() {
    return {.tensors = {{"gain", view(&gain, {})}, {"reach", view(&reach, {})}}};
  }
};

TEST(RankZero, GivesWhatAScalarGives) {
  Numbers numbers;
  Call by_scalar, by_tensor;
  const auto of = [](Call& call, const Captures& captures) {
    return call.args(parse_score_mod(kScore, captures), parse_mask_mod(kMask, captures));
  };
  const AttentionForward args = of(by_tensor, numbers.tensors());
  const Plan plan = fovea::plan(problem_of(args));
  std::vector<std::byte> workspace(plan.workspace_bytes());
  for (const std::int32_t reach : {40, 3, 299, -1}) {
    numbers.reach = reach;
    numbers.gain *= 1.5F;
    attention_forward(of(by_scalar, numbers.scalars()));
    AttentionForward run = args;  // what it captures lies where it lay
    run.workspace = workspace;
    plan.run(run);
    EXPECT_EQ(by_tensor.out, by_scalar.out) << reach;
    EXPECT_EQ(by_tensor.lse, by_scalar.lse) << reach;
  }
}

TEST(RankZero, MakesTheSameBlockMapAsAScalar) {
  Numbers numbers;
  Call call;
  const auto tiles = [&](const Captures& captures) {
    return explain(problem_of(call.args({}, parse_mask_mod(kMask, captures)))).tiles;
  };
  ASSERT_TRUE(tiles(numbers.tensors()));
  EXPECT_GT(tiles(numbers.tensors())->empty, 0);
  EXPECT_EQ(tiles(numbers.tensors()), tiles(numbers.scalars()));
}

TEST(RankZero, HasAGradientAndATangentOfOneElement) {
  Numbers numbers;
  std::vector<float> gradients[2];
  std::vector<float> tangents[2];
  for (const bool is_tensor : {false, true}) {
    const Captures captures = is_tensor ? numbers.tensors() : numbers.scalars();
    Call call;
    const AttentionForward args =
        call.args(parse_score_mod(kScore, captures), parse_mask_mod(kMask, captures));
    attention_forward(args);
    std::vector<float> dgain{-7};
    attention_backward({.dout = Call::dense(call.v),
                        .forward = args,
                        .dq = Call::dense(call.gradient),
                        .dcaptured = {{"gain", view(dgain.data(), {1})}}});
    EXPECT_NE(dgain[0], 0);
    gradients[is_tensor] = call.gradient;
    gradients[is_tensor].push_back(dgain[0]);
    const float speed = 2;
    attention_jvp({.forward = args,
                   .captured_tangents = {{"gain", view(&speed, {1})}},
                   .out_tangent = Call::dense(call.gradient)});
    tangents[is_tensor] = call.gradient;
  }
  EXPECT_EQ(gradients[0], gradients[1]);
  EXPECT_EQ(tangents[0], tangents[1]);
}

TEST(RankZero, ServesDecoding) {
  Numbers numbers;
  std::vector<float> outs[2];
  for (const bool is_tensor : {false, true}) {
    const Captures captures = is_tensor ? numbers.tensors() : numbers.scalars();
    Call call;
    const std::int32_t length = kSeqlen;
    std::vector<float> out(kHeadDim);
    attention_decode({.q = view(call.q.data(), {1, 1, 1, kHeadDim}),
                      .cache = {.k = Call::dense(call.k),
                                .v = Call::dense(call.v),
                                .seqlens = view(&length, {1})},
                      .out = view(out.data(), {1, 1, 1, kHeadDim}),
                      .score = parse_score_mod(kScore, captures),
                      .mask = parse_mask_mod("kv_idx >= seqlen_kv - reach", captures)});
    outs[is_tensor] = out;
  }
  EXPECT_EQ(outs[0], outs[1]);
}

TEST(RankZero, IsCheckedAsOtherTensorsAre) {
  Call call;
  const auto refusal = [&](const TensorView& n) {
    try {
      attention_forward(call.args(parse_score_mod("score + n", {.tensors = {{"n", n}}}), {}));
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("(not refused)");
  };
  const std::int64_t large = std::int64_t{1} << 40;
  EXPECT_THAT(refusal(view(&large, {})), HasSubstr("captured 'n' holds 1099511627776 at []"));
  EXPECT_THAT(refusal(view(static_cast<const float*>(nullptr), {})), HasSubstr("n has no data"));
  EXPECT_THAT(refusal(view(call.out.data() + 5, {})), HasSubstr("out overlaps n"));
  TensorSpec elsewhere = make_spec(Dtype::f32, {});
  elsewhere.device = Device::cuda(0);
  EXPECT_THAT(refusal({static_cast<const void*>(call.q.data()), elsewhere}),
              HasSubstr("n lives on cuda:0"));
}

}  // namespace
}  // namespace fovea::testing
