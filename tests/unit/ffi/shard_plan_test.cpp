// Shards through the C ABI: the same as context_parallel_plan, in arrays of the caller's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fovea/fovea.h"
#include "fovea/parallel.hpp"

#include "unit/ffi/c_call.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

/// 64 tokens over 4 ranks under a window; shapes alone.
struct ShardCall {
  ShardCall() {
    q.tensor.data = k.tensor.data = v.tensor.data = nullptr;
    forward.struct_size = sizeof(forward);
    forward.version = FOVEA_ABI_VERSION;
    forward.q = &q.tensor;
    forward.k = &k.tensor;
    forward.v = &v.tensor;
    forward.causal = 1;
    forward.has_window_left = 1;
    forward.window_left = 9;
    args.struct_size = sizeof(args);
    args.version = FOVEA_ABI_VERSION;
    args.forward = &forward;
    args.world_size = 4;
    args.tile_q = args.tile_kv = 4;
  }
  Problem problem() const {
    const auto spec = [](const FloatTensor& tensor) { return make_spec(Dtype::f32, tensor.shape); };
    return {.q = spec(q), .k = spec(k), .v = spec(v), .mask = window(9, {}) && causal()};
  }

  FloatTensor q{{2, 64, 4, 8}}, k{{2, 64, 2, 8}}, v{{2, 64, 2, 4}};
  fovea_attention_forward_args forward{};
  fovea_shard_args args{};
};

using Ranges = std::vector<TokenRange>;

Ranges ranges_of(const fovea_shard_plan* plan, int rank, int kind) {
  std::size_t count = 0;
  std::int64_t* none = nullptr;
  EXPECT_EQ(outcome_of(fovea_shard_plan_ranges, plan, rank, kind, none, 0, &count).message, "");
  std::vector<std::int64_t> places(2 * count);
  EXPECT_EQ(
      outcome_of(fovea_shard_plan_ranges, plan, rank, kind, places.data(), count, &count).message,
      "");
  Ranges ranges;
  for (std::size_t i = 0; i < count; ++i) ranges.push_back({places[2 * i], places[2 * i + 1]});
  return ranges;
}

Ranges list(std::span<const TokenRange> ranges) { return {ranges.begin(), ranges.end()}; }

std::string text_of(char* text) {
  std::string result = text;
  fovea_string_free(text);
  return result;
}

TEST(CShardPlan, IsThePlanOfEveryScheme) {
  ShardCall call;
  for (int i = 0; i < kNumParallelSchemes; ++i) {
    call.args.scheme = i;
    if (static_cast<ParallelScheme>(i) == ParallelScheme::hybrid) call.args.head_ranks = 2;
    fovea_shard_plan* plan = nullptr;
    ASSERT_EQ(outcome_of(fovea_shard_plan_create, &call.args, &plan).message, "");
    const ShardPlan expected =
        context_parallel_plan(call.problem(), 4, static_cast<ParallelScheme>(i),
                              {.tile_q = 4, .tile_kv = 4, .head_ranks = call.args.head_ranks});
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(ranges_of(plan, rank, FOVEA_SHARD_TOKENS), list(expected.tokens(rank)));
      EXPECT_EQ(ranges_of(plan, rank, FOVEA_SHARD_ROWS), list(expected.rows(rank)));
      EXPECT_EQ(ranges_of(plan, rank, FOVEA_SHARD_NEEDED), list(expected.needed_kv(rank)));
      const std::vector<Transfer> transfers = expected.transfers(rank);
      std::vector<fovea_transfer> got(transfers.size());
      std::size_t count = 0;
      ASSERT_EQ(outcome_of(fovea_shard_plan_transfers, plan, rank, got.data(), got.size(), &count)
                    .message,
                "");
      for (std::size_t t = 0; t < count; ++t) {
        EXPECT_EQ(got[t].step, transfers[t].step);
        EXPECT_EQ(got[t].from, transfers[t].from);
        EXPECT_EQ(got[t].tensor, static_cast<std::int64_t>(transfers[t].tensor));
        EXPECT_EQ((TokenRange{got[t].token_begin, got[t].token_end}), transfers[t].tokens);
        EXPECT_EQ((HeadRange{got[t].head_begin, got[t].head_end}), transfers[t].heads);
      }
    }
    std::vector<std::int64_t> tokens(64);
    ASSERT_EQ(outcome_of(fovea_shard_plan_permutation, plan, tokens.data(), 64).message, "");
    EXPECT_EQ(tokens, expected.permutation());
    char* text = nullptr;
    ASSERT_EQ(outcome_of(fovea_shard_plan_explain, plan, FOVEA_JSON, &text).message, "");
    EXPECT_EQ(text_of(text), expected.json());
    ASSERT_EQ(outcome_of(fovea_shard_plan_print_ranks, plan, 1, 3, 0, 0, &text).message, "");
    EXPECT_EQ(text_of(text), expected.print_ranks(1, 3));
    fovea_shard_plan_destroy(plan);
  }
}

TEST(CShardPlan, ForecastsAreThoseOfTheSpeedsGiven) {
  const ShardCall call;
  char* text = nullptr;
  ASSERT_EQ(outcome_of(fovea_forecast_context_parallel, &call.args, 1e12, 1e10, FOVEA_JSON, &text)
                .message,
            "");
  EXPECT_EQ(text_of(text),
            json_forecasts(forecast_context_parallel(call.problem(), 4, {.tile_q = 4, .tile_kv = 4},
                                                     {.flops = 1e12, .bytes = 1e10})));
  ASSERT_EQ(
      outcome_of(fovea_forecast_context_parallel, &call.args, 0.0, 0.0, FOVEA_TEXT, &text).message,
      "");
  EXPECT_EQ(text_of(text), print_forecasts(forecast_context_parallel(call.problem(), 4,
                                                                     {.tile_q = 4, .tile_kv = 4})));
}

TEST(CShardPlan, RefusalsNameTheArgument) {
  ShardCall call;
  fovea_shard_plan* plan = nullptr;
  call.args.scheme = 6;
  EXPECT_THAT(outcome_of(fovea_shard_plan_create, &call.args, &plan).message,
              HasSubstr("scheme is 6; expected one of fovea_parallel_scheme"));
  call.args.scheme = FOVEA_RING;
  call.args.world_size = 5;
  EXPECT_THAT(outcome_of(fovea_shard_plan_create, &call.args, &plan).message,
              HasSubstr("pad to 65"));
  EXPECT_EQ(plan, nullptr);
  call.args.world_size = 4;
  ASSERT_EQ(outcome_of(fovea_shard_plan_create, &call.args, &plan).message, "");
  std::size_t count = 0;
  std::vector<std::int64_t> places(64);
  EXPECT_THAT(
      outcome_of(fovea_shard_plan_ranges, plan, 4, FOVEA_SHARD_TOKENS, places.data(), 1, &count)
          .message,
      HasSubstr("rank is 4; expected 0 to 3"));
  EXPECT_THAT(outcome_of(fovea_shard_plan_ranges, plan, 0, 3, places.data(), 1, &count).message,
              HasSubstr("kind is 3"));
  EXPECT_THAT(
      outcome_of(fovea_shard_plan_ranges, plan, 0, FOVEA_SHARD_TOKENS, places.data(), 32, &count)
          .message,
      HasSubstr("room for 32; expected"));
  EXPECT_THAT(outcome_of(fovea_shard_plan_permutation, plan, places.data(), 63).message,
              HasSubstr("room for 63; expected 64"));
  const fovea_shard_plan* none = nullptr;
  EXPECT_THAT(outcome_of(fovea_shard_plan_permutation, none, places.data(), 64).message,
              HasSubstr("plan is NULL"));
  fovea_shard_plan_destroy(plan);
}

}  // namespace
}  // namespace fovea::testing
