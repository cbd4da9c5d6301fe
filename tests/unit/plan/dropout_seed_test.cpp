// Dropout whose seed and offset lie in memory: the bits of a call that has them by value, each time anew.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/backward.hpp"

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

}  // namespace
}  // namespace fovea::testing
