// Dropout whose seed and offset lie in memory: the bits of a call that has them by value, each time anew. Dropout of a
// part of a problem.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/backward.hpp"
#include "fovea/probabilities.hpp"

#include "support/case.hpp"
#include "support/compare.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

/// A call with dropout: by value, or by value and memory together.
struct Call {
  Call() : memory(problem()) {}
  static Case problem() {
    return {.label = "dropout",
            .seqlen_q = 19,
            .seqlen_kv = 67,
            .num_heads_q = 2,
            .dropout = {.p = 0.4F},
            .wants_row_max = false};
  }
  AttentionForward by_value(std::uint64_t seed_by_value, std::uint64_t offset_by_value) {
    AttentionForward args = memory.args();
    args.dropout.seed = seed_by_value;
    args.dropout.offset = offset_by_value;
    return args;
  }
  AttentionForward with_memory(std::uint64_t seed_by_value, std::uint64_t offset_by_value) {
    AttentionForward args = by_value(seed_by_value, offset_by_value);
    args.dropout_seed = view(&seed, {1});
    args.dropout_offset = view(&offset, {1});
    return args;
  }
  std::vector<std::uint64_t> run(const AttentionForward& args) {
    memory.poison_outputs();
    attention_forward(args);
    return bits_of(args.out);
  }

  CaseMemory memory;
  std::int64_t seed = 0, offset = 0;
};

std::string refusal_of(const AttentionForward& args) {
  try {
    attention_forward(args);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "(not refused)";
}

TEST(DropoutSeed, AddsToWhatIsGivenByValue) {
  Call call;
  const auto expected = call.run(call.by_value(7, 1));
  EXPECT_NE(call.run(call.by_value(7, 2)), expected);
  EXPECT_NE(call.run(call.by_value(8, 1)), expected);
  call.seed = 7;
  call.offset = 1;
  EXPECT_EQ(call.run(call.with_memory(0, 0)), expected);
  call.seed = -2;  // wraps
  call.offset = -9;
  EXPECT_EQ(call.run(call.with_memory(9, 10)), expected);
  call.seed = std::int64_t{1} << 40;
  EXPECT_EQ(call.run(call.with_memory(1, 9)), call.run(call.by_value((1ULL << 40U) + 1, 0)));
}

TEST(DropoutSeed, IsReadAtEachRunOfAPlan) {
  Call call;
  const AttentionForward args = call.with_memory(0, 0);
  const Plan plan = fovea::plan(problem_of(args));
  std::vector<std::byte> workspace(plan.workspace_bytes());
  for (const std::int64_t seed : {3, 4}) {
    call.seed = seed;
    AttentionForward run = args;
    run.workspace = workspace;
    call.memory.poison_outputs();
    plan.run(run);
    EXPECT_EQ(bits_of(run.out), call.run(call.by_value(static_cast<std::uint64_t>(seed), 0)));
  }
  EXPECT_THAT(plan.explain().problem, HasSubstr("dropout 0.4 by a seed in memory"));
}

TEST(DropoutSeed, IsThatOfBackwardToo) {
  Call call;
  std::vector<float> dq(19 * 2 * 8), dv(67 * 8);
  const auto gradients = [&](const AttentionForward& forward) {
    call.run(forward);
    attention_backward({.dout = forward.out,
                        .forward = forward,
                        .dq = view(dq.data(), {1, 19, 2, 8}),
                        .dv = view(dv.data(), {1, 67, 1, 8})});
    return std::pair(dq, dv);
  };
  const auto expected = gradients(call.by_value(7, 1));
  call.seed = 5;
  call.offset = 1;
  EXPECT_EQ(gradients(call.with_memory(2, 0)), expected);
  EXPECT_NE(gradients(call.with_memory(3, 0)), expected);
}

TEST(DropoutSeed, HasBothNumbersOrNeither) {
  Call call;
  AttentionForward args = call.with_memory(0, 0);
  args.dropout_offset = {};
  EXPECT_THAT(refusal_of(args), HasSubstr("dropout_offset is missing; the plan was made with it"));
  args = call.with_memory(0, 0);
  args.dropout_seed = {};
  EXPECT_THAT(refusal_of(args), HasSubstr("dropout_seed is missing; the plan was made with it"));
  args = call.with_memory(0, 0);
  std::int32_t narrow = 0;
  args.dropout_seed = TensorView(view(&narrow, {1}));
  EXPECT_THAT(refusal_of(args), HasSubstr("dropout_seed is i32 [1]; expected i64 [1]"));
  args = call.with_memory(0, 0);
  args.dropout_seed = TensorView(reinterpret_cast<void*>(&call.seed), [] {
    TensorSpec spec = make_spec(Dtype::i64, std::vector<std::int64_t>{1});
    spec.device = Device::cuda(0);
    return spec;
  }());
  EXPECT_THAT(refusal_of(args), HasSubstr("dropout_seed lives on cuda:0"));
}

/// As a tensor of the shape of probabilities: a sign bit is set where dropout drops.
std::vector<bool> dropped(const AttentionForward& forward, std::int64_t heads, std::int64_t rows,
                          std::int64_t keys) {
  std::vector<float> p(static_cast<std::size_t>(forward.q.size(0) * heads * rows * keys));
  attention_probabilities(
      {.forward = forward,
       .probabilities = view(p.data(), {forward.q.size(0), heads, rows, keys})});
  std::vector<bool> signs;
  for (const float each : p) signs.push_back(std::signbit(each));
  return signs;
}

TEST(DropoutPlaces, APartDropsWhatTheWholeDoes) {
  std::vector<float> q(2 * 24 * 4 * 8, 1), kv(2 * 24 * 2 * 8, 1);
  AttentionForward whole{.q = view(q.data(), {2, 24, 4, 8}),
                         .k = view(kv.data(), {2, 24, 2, 8}),
                         .v = view(kv.data(), {2, 24, 2, 8}),
                         .dropout = kSomeDropped};
  const std::vector<bool> of_whole = dropped(whole, 4, 24, 24);
  // Of the second batch entry, the last two heads, rows 5, 4 and 20, keys 16 to 19 and 4 to 6.
  const std::vector<std::int32_t> places = {1, 2, 3, 5, 4, 20, 16, 17, 18, 19, 4, 5, 6};
  AttentionForward part{.q = view(q.data(), {1, 3, 2, 8}),
                        .k = view(kv.data(), {1, 7, 1, 8}),
                        .v = view(kv.data(), {1, 7, 1, 8}),
                        .dropout = kSomeDropped};
  part.dropout_places = view(places.data(), {13});
  const std::vector<bool> of_part = dropped(part, 2, 3, 7);
  for (std::size_t head = 0; head < 2; ++head) {
    for (std::size_t row = 0; row < 3; ++row) {
      for (std::size_t key = 0; key < 7; ++key) {
        const auto at = [&](std::size_t i) { return static_cast<std::size_t>(places[i]); };
        const std::size_t there =
            ((at(0) * 4 + at(1 + head)) * 24 + at(3 + row)) * 24 + at(6 + key);
        EXPECT_EQ(of_part[(head * 3 + row) * 7 + key], of_whole[there]);
      }
    }
  }
}

TEST(DropoutPlaces, AreCheckedBeforeAnythingIsWritten) {
  Call call;
  const std::vector<std::int32_t> places(2 * (1 + 2 + 19 + 67));
  const auto refusal_with = [&](const TensorView& given) {
    AttentionForward args = call.by_value(7, 1);
    args.dropout_places = given;
    return refusal_of(args);
  };
  EXPECT_EQ(refusal_with(view(places.data(), {89})), "(not refused)");
  EXPECT_THAT(refusal_with(view(places.data(), {88})),
              HasSubstr("dropout_places is i32 [88]; expected i32 [89]"));
  EXPECT_THAT(refusal_with(view(places.data(), {89}, {2})),
              HasSubstr("dropout_places has stride 2; expected 1"));
  const std::vector<std::int32_t> offsets = {0, 3};
  std::vector<float> rows(3 * 8);
  EXPECT_THAT(refusal_of({.q = view(rows.data(), {3, 1, 8}),
                          .k = view(rows.data(), {3, 1, 8}),
                          .v = view(rows.data(), {3, 1, 8}),
                          .out = view(rows.data(), {3, 1, 8}),
                          .dropout = kSomeDropped,
                          .dropout_places = view(places.data(), {8}),
                          .cu_seqlens_q = view(offsets.data(), {2}),
                          .cu_seqlens_kv = view(offsets.data(), {2})}),
              HasSubstr("dropout_places is given for packed sequences; expected none"));
}

}  // namespace
}  // namespace fovea::testing
