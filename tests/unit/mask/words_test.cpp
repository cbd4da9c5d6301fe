#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fovea/error.hpp"
#include "fovea/mask.hpp"

namespace fovea {
namespace {

const std::int32_t* const kNoInts = nullptr;
const float* const kNoFloats = nullptr;

std::string message_of(auto&& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(MaskWords, StandForTheirFormulas) {
  EXPECT_EQ(causal(), parse_mask_mod("kv_idx <= q_idx + (seqlen_kv - seqlen_q)"));
  EXPECT_EQ(causal(Align::top_left), parse_mask_mod("kv_idx <= q_idx"));
  const Captures sides{
      .scalars = {CapturedScalar::of("window_left", 4), CapturedScalar::of("window_right", 0)}};
  EXPECT_EQ(
      window(4, 0, Align::top_left),
      parse_mask_mod("kv_idx >= q_idx - window_left && kv_idx <= q_idx + window_right", sides));
  const TensorView ids = view(kNoInts, {2, 64});
  EXPECT_EQ(documents(ids), parse_mask_mod("segments[batch, q_idx] == segments[batch, kv_idx] && "
                                           "segments[batch, q_idx] != -1",
                                           {.tensors = {{"segments", ids}}}));
  const TensorView lengths = view(kNoInts, {2});
  EXPECT_EQ(prefix_lm(lengths, Align::top_left),
            parse_mask_mod("kv_idx < prefix_lengths[batch] || kv_idx <= q_idx",
                           {.tensors = {{"prefix_lengths", lengths}}}));
  EXPECT_EQ(chunked(8, Align::top_left),
            parse_mask_mod("q_idx // chunk_size == kv_idx // chunk_size",
                           {.scalars = {CapturedScalar::of("chunk_size", 8)}}));
  EXPECT_EQ(
      dilated(3, Align::top_left),
      parse_mask_mod("(q_idx - kv_idx) % step == 0", {.scalars = {CapturedScalar::of("step", 3)}}));
  EXPECT_EQ(
      streaming(4, 16, Align::top_left),
      parse_mask_mod("(kv_idx < num_sinks || kv_idx >= q_idx - window_left) && kv_idx <= q_idx",
                     {.scalars = {CapturedScalar::of("num_sinks", 4),
                                  CapturedScalar::of("window_left", 16)}}));
}

TEST(ScoreWords, StandForTheirFormulas) {
  EXPECT_EQ(softcap(30), parse_score_mod("softcap * tanh(score / softcap)",
                                         {.scalars = {CapturedScalar::of("softcap", 30.0F)}}));
  const TensorView slopes = view(kNoFloats, {8});
  EXPECT_EQ(alibi(slopes, Align::top_left),
            parse_score_mod("score - slopes[q_head] * abs(q_idx - kv_idx)",
                            {.tensors = {{"slopes", slopes}}}));
  const TensorView table = view(kNoFloats, {8, 32});
  EXPECT_EQ(
      relative_bias(table, arguments().q_idx - arguments().kv_idx),
      parse_score_mod("score + table[q_head, q_idx - kv_idx]", {.tensors = {{"table", table}}}));
}

TEST(MaskWords, ValuesNeverChangeStructure) {
  EXPECT_EQ(window(4, 0), window(1024, 7));
  EXPECT_EQ(chunked(16), chunked(48));
  EXPECT_EQ(streaming(1, 2), streaming(64, 4096));
  EXPECT_EQ(softcap(30), softcap(50));
}

TEST(MaskWords, OpenSidesLeaveNoTrace) {
  EXPECT_TRUE(window(std::nullopt, std::nullopt).is_all_visible());
  EXPECT_EQ(window(3, std::nullopt).captures().scalars.size(), 1U);
  EXPECT_EQ(window(std::nullopt, 3).captures().scalars.size(), 1U);
}

TEST(MaskWords, OneTensorForBothSidesIsCapturedOnce) {
  const TensorView ids = view(kNoInts, {2, 64});
  EXPECT_EQ(documents(ids).captures().tensors.size(), 1U);
  EXPECT_EQ(documents(ids, ids).captures().tensors.size(), 1U);
  EXPECT_EQ(documents(ids, view(kNoInts, {2, 128})).captures().tensors.size(), 2U);
}

TEST(MaskWords, ExtentsOfOneLoadIndexZero) {
  const TensorView mask = view(static_cast<const bool*>(nullptr), {1, 4, 1, 64});
  EXPECT_EQ(dense_mask(mask),
            parse_mask_mod("mask[0, q_head, 0, kv_idx]", {.tensors = {{"mask", mask}}}));
  const TensorView bytes = view(static_cast<const std::uint8_t*>(nullptr), {16, 64});
  EXPECT_EQ(dense_mask(bytes),
            parse_mask_mod("mask[q_idx, kv_idx] != 0", {.tensors = {{"mask", bytes}}}));
  const TensorView table = view(kNoFloats, {4, 16, 64});
  EXPECT_EQ(bias(table),
            parse_score_mod("score + bias[q_head, q_idx, kv_idx]", {.tensors = {{"bias", table}}}));
}

TEST(MaskWords, TilesOfATableArePartOfTheFormula) {
  const TensorView table = view(static_cast<const bool*>(nullptr), {4, 3, 5});
  EXPECT_EQ(tile_mask(table, 64, 32), parse_mask_mod("table[q_head, q_idx // 64, kv_idx // 32]",
                                                     {.tensors = {{"table", table}}}));
  const TensorView shared = view(static_cast<const std::uint8_t*>(nullptr), {2, 1, 3, 1});
  EXPECT_EQ(tile_mask(shared, 128, 64), parse_mask_mod("table[batch, 0, q_idx // 128, 0] != 0",
                                                       {.tensors = {{"table", shared}}}));
  EXPECT_EQ(message_of([&] { static_cast<void>(tile_mask(table, 64, 0)); }),
            "tile_mask: tile_kv is 0; expected >= 1");
  EXPECT_EQ(message_of([] {
              static_cast<void>(tile_mask(view(kNoInts, {2, 3}), 64, 64));
            }),
            "tile_mask: table has dtype i32; expected bool or u8");
}

TEST(MaskWords, RefuseNegativeSizes) {
  EXPECT_EQ(message_of([] { static_cast<void>(window(-3, 0)); }),
            "window: left is -3; expected >= 0, or nullopt for an unbounded side");
  EXPECT_EQ(message_of([] { static_cast<void>(window(0, -1)); }),
            "window: right is -1; expected >= 0, or nullopt for an unbounded side");
  EXPECT_EQ(message_of([] { static_cast<void>(chunked(0)); }),
            "chunked: chunk_size is 0; expected >= 1");
  EXPECT_EQ(message_of([] { static_cast<void>(dilated(-2)); }),
            "dilated: step is -2; expected >= 1");
  EXPECT_EQ(message_of([] { static_cast<void>(streaming(-1, 4)); }),
            "streaming: num_sinks is -1; expected >= 0");
}

TEST(ScoreWords, RefuseCapsThatAreNoCaps) {
  for (const float cap : {0.0F, -1.0F, std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_NE(message_of([=] { static_cast<void>(softcap(cap)); }).find("expected > 0 and finite"),
              std::string::npos);
  }
}

TEST(MaskWords, RefuseWrongRanksAndDtypes) {
  EXPECT_EQ(message_of([] {
              static_cast<void>(documents(view(kNoInts, {2, 3, 4})));
            }),
            "documents: segments is i32 [2, 3, 4]; expected rank 2, [batch, seqlen]");
  EXPECT_EQ(message_of([] {
              static_cast<void>(documents(view(kNoFloats, {2, 3})));
            }),
            "documents: segments has dtype f32; expected i32 or i64");
  EXPECT_EQ(message_of([] { static_cast<void>(documents(TensorView())); }),
            "documents: segments is missing; expected a tensor, [batch, seqlen]");
  EXPECT_EQ(message_of([] {
              static_cast<void>(dense_mask(view(kNoInts, {2, 3})));
            }),
            "dense_mask: mask has dtype i32; expected bool or u8");
  EXPECT_EQ(message_of([] { static_cast<void>(alibi(view(kNoInts, {2}))); }),
            "alibi: slopes has dtype i32; expected f32 or f16 or bf16");
  EXPECT_NE(message_of([] {
              static_cast<void>(relative_bias(view(kNoFloats, {2, 3}), arguments().score));
            }).find("bucket"),
            std::string::npos);
}

}  // namespace
}  // namespace fovea
