// Validation: each refusal with its whole message, and the edges that are legal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "unit/problem/problems.hpp"

namespace fovea::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename Change>
std::string refusal_of(Problem problem, const Change& change) {
  change(problem);
  return refusal([&] { validate(problem, "plan"); });
}
template <typename Change>
std::string dense_refusal(const Change& change) {
  return refusal_of(dense_problem(), change);
}
template <typename Change>
std::string packed_refusal(const Change& change) {
  return refusal_of(packed_problem(), change);
}

TEST(Validate, ResolvesADenseProblem) {
  const ForwardProblem f = validate(dense_problem(), "plan");
  EXPECT_FALSE(f.is_varlen);
  EXPECT_EQ(f.num_sequences, 2);
  EXPECT_EQ(f.seqlen_q, 3);
  EXPECT_EQ(f.seqlen_kv, 5);
  EXPECT_EQ(f.total_q, 6);
  EXPECT_EQ(f.num_heads_q, 4);
  EXPECT_EQ(f.num_heads_kv, 2);
  EXPECT_EQ(f.group, 2);
  EXPECT_EQ(f.head_dim_qk, 8);
  EXPECT_EQ(f.head_dim_v, 6);
  EXPECT_FLOAT_EQ(f.softmax_scale, 0.35355339F);
  EXPECT_EQ(f.problem.out, spec_of(Dtype::f32, {2, 3, 4, 6}));
}

TEST(Validate, CodesHaveAnOutputOfBf16UnlessItIsSaid) {
  Problem problem = dense_problem();
  problem.q.dtype = problem.k.dtype = problem.v.dtype = Dtype::e4m3;
  problem.quant = parse_quantization("fp8_static");
  EXPECT_EQ(validate(problem, "plan").problem.out, spec_of(Dtype::bf16, {2, 3, 4, 6}));
  problem.out = spec_of(Dtype::f32, {2, 3, 4, 6});
  EXPECT_EQ(validate(problem, "plan").problem.out.dtype, Dtype::f32);
  problem.out.dtype = Dtype::e4m3;
  EXPECT_EQ(refusal([&] { validate(problem, "plan"); }),
            "plan: out is e4m3; expected f32, f16 or bf16");
}

/// Callers that make out of q's dtype would read of an out that they have not named.
TEST(Validate, CodesWithoutTheirRecipeAreRefusedBeforeOutIs) {
  Problem problem = dense_problem();
  problem.q.dtype = problem.k.dtype = problem.v.dtype = Dtype::e4m3;
  problem.out = spec_of(Dtype::e4m3, {2, 3, 4, 6});
  EXPECT_EQ(refusal([&] { validate(problem, "plan"); }),
            "plan: q, k and v are e4m3 and quant is none; expected fp8_static, or what differs "
            "from it in how probabilities are rounded: codes are multiplied as they are, by scales "
            "that the call gives");
}

TEST(Validate, ResolvesAPackedProblem) {
  const ForwardProblem f = validate(packed_problem(), "plan");
  EXPECT_TRUE(f.is_varlen);
  EXPECT_EQ(f.num_sequences, 3);
  EXPECT_EQ(f.seqlen_q, 7);  // one sequence may have all rows
  EXPECT_EQ(f.seqlen_kv, 9);
  EXPECT_EQ(f.total_q, 7);
  EXPECT_EQ(f.problem.out, spec_of(Dtype::f32, {7, 4, 6}));
}

TEST(Validate, BoundsReplaceLengths) {
  Problem problem = dense_problem();
  problem.seqlen_q = up_to(10);
  problem.seqlen_kv = up_to(20);
  const ForwardProblem f = validate(problem, "plan");
  EXPECT_EQ(f.seqlen_q, 10);
  EXPECT_EQ(f.seqlen_kv, 20);
  EXPECT_EQ(f.total_q, 20);
  problem = packed_problem();
  problem.seqlen_q = up_to(4);
  EXPECT_EQ(validate(problem, "plan").seqlen_q, 4);
  EXPECT_EQ(validate(problem, "plan").total_q, 7);
}

TEST(Validate, DefaultOutHasTheDtypeOfQAndRowMajorStrides) {
  Problem problem = dense_problem();
  problem.q = spec_of(Dtype::bf16, {2, 3, 4, 8}, {96, 8, 24, 1});  // bhsd in memory
  problem.k.dtype = problem.v.dtype = Dtype::bf16;
  EXPECT_EQ(validate(problem, "plan").problem.out, spec_of(Dtype::bf16, {2, 3, 4, 6}));
}

TEST(Validate, GivenScaleIsKept) {
  Problem problem = dense_problem();
  for (const float scale : {0.0F, -2.0F, 1.0F}) {
    problem.softmax_scale = scale;
    EXPECT_EQ(validate(problem, "plan").softmax_scale, scale);
  }
}

TEST(Validate, EmptyAxesAreLegal) {
  for (const auto& [q, k] :
       std::vector<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>>{
           {{0, 3, 4, 8}, {0, 5, 2, 8}},     // no batch
           {{2, 0, 4, 8}, {2, 5, 2, 8}},     // no queries
           {{2, 3, 4, 8}, {2, 0, 2, 8}},     // no keys
           {{2, 3, 0, 8}, {2, 5, 0, 8}},     // no heads
           {{2, 3, 0, 8}, {2, 5, 2, 8}}}) {  // heads of keys that nobody asks
    const Problem problem{
        .q = spec_of(Dtype::f32, q), .k = spec_of(Dtype::f32, k), .v = spec_of(Dtype::f32, k)};
    EXPECT_NO_THROW(validate(problem, "plan")) << to_string(problem.q) << to_string(problem.k);
  }
  Problem none = packed_problem();
  none.num_sequences = 0;
  EXPECT_EQ(validate(none, "plan").num_sequences, 0);
}

TEST(Validate, StridesOfInputsAreFree) {
  Problem problem = dense_problem();
  problem.q = spec_of(Dtype::f32, {2, 3, 4, 8}, {0, -100, 0, 3});
  problem.k = spec_of(Dtype::f32, {2, 5, 2, 8}, {0, 0, 0, 0});
  EXPECT_NO_THROW(validate(problem, "plan"));
}

TEST(Validate, RanksThatFitNeitherLayoutAreRefused) {
  EXPECT_EQ(dense_refusal([](Problem& p) { p.q = {}; }),
            "plan: q is missing; expected rank 4: [batch, seqlen, heads, head_dim]");
  EXPECT_EQ(dense_refusal([](Problem& p) {
              p.k = spec_of(Dtype::f32, {5, 2, 8});
            }),
            "plan: k is f32 [5, 2, 8]; expected rank 4: [batch, seqlen, heads, head_dim]");
  EXPECT_EQ(packed_refusal([](Problem& p) {
              p.v = spec_of(Dtype::f32, {1, 9, 2, 6});
            }),
            "plan: v is f32 [1, 9, 2, 6]; expected rank 3: [total, heads, head_dim] (packed: "
            "cu_seqlens are given)");
  EXPECT_EQ(dense_refusal([](Problem& p) {
              p.out = spec_of(Dtype::f32, {6, 4, 6});
            }),
            "plan: out is f32 [6, 4, 6]; expected rank 4: [batch, seqlen, heads, head_dim]");
}

TEST(Validate, ExtentsThatNoTensorHasAreRefused) {
  EXPECT_EQ(dense_refusal([](Problem& p) { p.q.shape[1] = -3; }),
            "plan: q has extent -3 in dimension 1; expected >= 0");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.k.shape[0] = std::int64_t{1} << 60; }),
            "plan: k has more than 2^63 elements");
  EXPECT_EQ(dense_refusal([](Problem& p) {
              p.out = spec_of(Dtype::f32, {2, 3, 4, 6});
              p.out.shape[2] = -1;
            }),
            "plan: out has extent -1 in dimension 2; expected >= 0");
}

TEST(Validate, DtypesThatDifferOrDoNotMultiplyAreRefused) {
  EXPECT_EQ(dense_refusal([](Problem& p) { p.q.dtype = Dtype::i32; }),
            "plan: q is i32; expected f32, f16 or bf16, or e4m3 by quant fp8_static");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.q.dtype = Dtype::i8; }),
            "plan: q is i8; expected f32, f16 or bf16, or e4m3 by quant fp8_static");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.q.dtype = Dtype::e4m3; }),
            "plan: k is f32 but q is e4m3; expected equal dtypes");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.k.dtype = Dtype::f16; }),
            "plan: k is f16 but q is f32; expected equal dtypes");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.v.dtype = Dtype::bf16; }),
            "plan: v is bf16 but q is f32; expected equal dtypes");
  EXPECT_EQ(dense_refusal([](Problem& p) {
              p.out = spec_of(Dtype::u8, {2, 3, 4, 6});
            }),
            "plan: out is u8; expected f32, f16 or bf16");
}

TEST(Validate, OutMayHaveAnotherFloatDtype) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    Problem problem = dense_problem();
    problem.out = spec_of(dtype, {2, 3, 4, 6});
    EXPECT_EQ(validate(problem, "plan").problem.out.dtype, dtype);
  }
}

TEST(Validate, NumbersOutOfTheirRangeAreRefused) {
  EXPECT_EQ(dense_refusal([](Problem& p) { p.softmax_scale = kInfinity; }),
            "plan: softmax_scale is inf; expected a finite number");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.softmax_scale = kNan; }),
            "plan: softmax_scale is nan; expected a finite number");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.dropout.p = -0.5F; }),
            "plan: dropout.p is -0.5; expected a probability in [0, 1]");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.dropout.p = 1.5F; }),
            "plan: dropout.p is 1.5; expected a probability in [0, 1]");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.dropout.p = kNan; }),
            "plan: dropout.p is nan; expected a probability in [0, 1]");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.num_threads = -2; }),
            "plan: num_threads is -2; expected 0 to 4096, 0 for automatic");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.sm_margin = -1; }),
            "plan: sm_margin is -1; expected >= 0, the SMs to leave free");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.seqlen_q = up_to(-1); }),
            "plan: seqlen_q is up_to(-1); expected 0 to 2147483647");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.seqlen_kv = up_to(std::int64_t{1} << 31); }),
            "plan: seqlen_kv is up_to(2147483648); expected 0 to 2147483647");
  EXPECT_EQ(packed_refusal([](Problem& p) { p.num_sequences = -1; }),
            "plan: num_sequences is -1; expected >= 0");
}

TEST(Validate, HeadsThatDoNotFitAreRefused) {
  EXPECT_EQ(dense_refusal([](Problem& p) { p.k.shape[3] = 96; }),
            "plan: k has head_dim 96 but q has 8; expected equal head_dim_qk (v alone may differ)");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.v.shape[2] = 4; }),
            "plan: v has num_heads 4 but k has 2; expected equal num_heads_kv");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.k.shape[2] = p.v.shape[2] = 3; }),
            "plan: q has 4 heads and k has 3; expected num_heads_q to be a multiple of "
            "num_heads_kv");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.k.shape[2] = p.v.shape[2] = 0; }),
            "plan: q has 4 heads and k has 0; expected num_heads_q to be a multiple of "
            "num_heads_kv");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.q.shape[3] = p.k.shape[3] = 0; }),
            "plan: head_dim is 0 (q, k) and 6 (v); expected at least 1");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.v.shape[3] = 0; }),
            "plan: head_dim is 8 (q, k) and 0 (v); expected at least 1");
}

TEST(Validate, LengthsThatDoNotFitAreRefused) {
  EXPECT_EQ(dense_refusal([](Problem& p) { p.v.shape[1] = 6; }),
            "plan: v has seqlen 6 but k has 5; expected equal lengths");
  EXPECT_EQ(packed_refusal([](Problem& p) { p.v.shape[0] = 8; }),
            "plan: v has total 8 but k has 9; expected equal lengths");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.k.shape[0] = 1; }),
            "plan: k has batch 1 but q has 2; expected equal");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.v.shape[0] = 3; }),
            "plan: v has batch 3 but q has 2; expected equal");
  // Positions are 32-bit in programs; stride 0 makes such a length possible in little memory.
  EXPECT_EQ(dense_refusal([](Problem& p) { p.q.shape[1] = std::int64_t{1} << 31; }),
            "plan: seqlen_q is 2147483648; expected at most 2147483647");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.k.shape[1] = p.v.shape[1] = std::int64_t{1} << 31; }),
            "plan: seqlen_kv is 2147483648; expected at most 2147483647");
}

TEST(Validate, SequencesAndHeadsThatProgramsCannotCountAreRefused) {
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1;
  const auto with_batch = [](std::int64_t batch) {
    return dense_refusal([=](Problem& p) {
      for (TensorSpec* spec : {&p.q, &p.k, &p.v}) spec->shape[0] = batch;
    });
  };
  EXPECT_EQ(with_batch(kMost), "(not refused)");
  EXPECT_EQ(with_batch(kMost + 1), "plan: batch is 2147483648; expected at most 2147483647");
  const auto with_heads = [](std::int64_t heads) {
    return dense_refusal([=](Problem& p) {
      for (TensorSpec* spec : {&p.q, &p.k, &p.v}) spec->shape[2] = heads;
    });
  };
  EXPECT_EQ(with_heads(kMost), "(not refused)");
  EXPECT_EQ(with_heads(std::int64_t{1} << 40),
            "plan: num_heads_q is 1099511627776; expected at most 2147483647");
  EXPECT_EQ(dense_refusal([](Problem& p) {
              p.q.shape[2] = 0;
              p.k.shape[2] = p.v.shape[2] = std::int64_t{1} << 31;
            }),
            "plan: num_heads_kv is 2147483648; expected at most 2147483647");
  for (const std::int64_t sequences :
       {kMost + 1, (std::int64_t{1} << 61) - 1, std::int64_t{1} << 62}) {
    EXPECT_EQ(
        packed_refusal([=](Problem& p) { p.num_sequences = sequences; }),
        "plan: num_sequences is " + std::to_string(sequences) + "; expected at most 2147483647");
  }
}

TEST(Validate, RowsThatCannotBeCountedAreRefused) {
  const auto with_bound = [](std::int64_t bound) {
    return dense_refusal([=](Problem& p) {
      for (TensorSpec* spec : {&p.q, &p.k, &p.v}) spec->shape[0] = std::int64_t{1} << 12;
      p.seqlen_q = up_to(bound);
    });
  };
  // Of 2^12 sequences, 4 heads and 8 columns.
  EXPECT_EQ(with_bound((std::int64_t{1} << 31) - 1), "(not refused)");
  EXPECT_EQ(dense_refusal([](Problem& p) {
              for (TensorSpec* spec : {&p.q, &p.k, &p.v}) spec->shape[0] = std::int64_t{1} << 13;
              p.seqlen_q = up_to((std::int64_t{1} << 31) - 1);
              p.v.shape[3] = 9;
            }),
            "plan: q has 17592186036224 rows in 8192 sequences, 4 heads and a head_dim of 9; "
            "expected at most 2^48 elements");
  EXPECT_EQ(dense_refusal([](Problem& p) {
              constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1;
              for (TensorSpec* spec : {&p.q, &p.k, &p.v}) spec->shape = {kMost, 1, kMost, 1};
              p.seqlen_q = up_to(kMost);
            }),
            "plan: q has 4611686014132420609 rows in 2147483647 sequences, 2147483647 heads and a "
            "head_dim of 1; expected at most 2^48 elements");
}

TEST(Validate, SpecsMadeByHandAreRefusedByName) {
  EXPECT_EQ(dense_refusal([](Problem& p) { p.q = TensorSpec{.rank = 9}; }),
            "plan: q is f32 of rank 9; expected rank 4: [batch, seqlen, heads, head_dim]");
  EXPECT_EQ(dense_refusal([](Problem& p) { p.v = TensorSpec{.rank = -1}; }),
            "plan: v is f32 of rank -1; expected rank 4: [batch, seqlen, heads, head_dim]");
  EXPECT_EQ(packed_refusal([](Problem& p) { p.out = TensorSpec{.rank = 1 << 30}; }),
            "plan: out is f32 of rank 1073741824; expected rank 3: [total, heads, head_dim] "
            "(packed: cu_seqlens are given)");
}

TEST(Validate, StridesThatLeaveTheAddressSpaceAreRefused) {
  for (const std::int64_t stride :
       {std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()}) {
    EXPECT_EQ(
        dense_refusal([=](Problem& p) { p.k.strides[1] = stride; }),
        "plan: k is f32 [2, 5, 2, 8] strides [80, " + std::to_string(stride) +
            ", 8, 1]; expected strides that keep every element within 2^60 bytes of the first");
  }
}

TEST(Validate, CapturedTensorsAreTensors) {
  const auto with = [](const TensorSpec& spec) {
    return dense_refusal([&](Problem& p) {
      p.score =
          parse_score_mod("score + table[q_idx]",
                          {.tensors = {{"table", TensorView(static_cast<void*>(nullptr), spec)}}});
    });
  };
  EXPECT_EQ(with(spec_of(Dtype::f32, {4})), "(not refused)");
  EXPECT_EQ(with({.rank = 1, .shape = {-4}, .strides = {1}}),
            "plan: table has extent -4 in dimension 0; expected >= 0");
  EXPECT_EQ(
      with({.rank = 1, .shape = {4}, .strides = {std::int64_t{1} << 60}}),
      "plan: table is f32 [4] strides [1152921504606846976]; expected strides that keep every "
      "element within 2^60 bytes of the first");
}

TEST(Validate, OutOfAnotherShapeIsRefused) {
  EXPECT_EQ(dense_refusal([](Problem& p) {
              p.out = spec_of(Dtype::f16, {2, 3, 4, 8});
            }),
            "plan: out is f16 [2, 3, 4, 8]; expected f16 [2, 3, 4, 6]");
  EXPECT_EQ(packed_refusal([](Problem& p) {
              p.out = spec_of(Dtype::f32, {6, 4, 6});
            }),
            "plan: out is f32 [6, 4, 6]; expected f32 [7, 4, 6]");
}

TEST(Validate, LoadsThatAreNeverInRangeAreRefused) {
  std::vector<float> table(4);
  const Captures captures{.tensors = {{"table", view(table.data(), {4})}}};
  EXPECT_EQ(dense_refusal([&](Problem& p) {
              p.score = parse_score_mod("score + table[q_idx + 4]", captures);
            }),
            "plan: score: index 0 of 'table', q_idx + 4, is in [4, 6]; expected 0 <= index < 4, "
            "the extent of that dimension");
  EXPECT_EQ(dense_refusal(
                [&](Problem& p) { p.mask = parse_mask_mod("table[-1 - kv_idx] > 0", captures); }),
            "plan: mask: index 0 of 'table', -1 - kv_idx, is in [-5, -1]; expected 0 <= index < "
            "4, the extent of that dimension");
}

TEST(Validate, WhatScalarsHoldProvesNothing) {
  std::vector<float> table(4);
  const auto with = [&](const std::string& index, const CapturedScalar& scalar) {
    return dense_refusal([&](Problem& p) {
      p.score =
          parse_score_mod("score + table[" + index + "]",
                          {.tensors = {{"table", view(table.data(), {4})}}, .scalars = {scalar}});
    });
  };
  EXPECT_EQ(with("q_idx + n", CapturedScalar::of("n", 1000)), "(not refused)");
  EXPECT_EQ(with("n", CapturedScalar::of("n", -1)), "(not refused)");
  EXPECT_EQ(with("int(t) - 1", CapturedScalar::of("t", -5.0)), "(not refused)");
  EXPECT_NE(with("4 + abs(n % 7)", CapturedScalar::of("n", 0)), "(not refused)");
}

TEST(Validate, TensorsWithoutElementsHaveNothingToLoad) {
  float none = 0;
  for (const char* index : {"q_idx", "q_idx - 1", "kv_idx - q_idx"}) {
    const auto score = [&](Problem& p) {
      p.score = parse_score_mod(std::string("score + table[") + index + "]",
                                {.tensors = {{"table", view(&none, {0})}}});
    };
    EXPECT_THAT(dense_refusal(score), ::testing::HasSubstr("expected 0 <= index < 0")) << index;
  }
}

TEST(Validate, LoadsThatMayBeInRangeAreLegal) {
  std::vector<float> table(4);
  Problem problem = dense_problem();
  problem.score = parse_score_mod("score + table[kv_idx]",  // 0 to 4 of 4: clamped
                                  {.tensors = {{"table", view(table.data(), {4})}}});
  EXPECT_NO_THROW(validate(problem, "plan"));
  problem.score = parse_score_mod("score + table[q_idx + 4]",
                                  {.tensors = {{"table", view(table.data(), {4})}}});
  problem.k.shape[1] = problem.v.shape[1] = 0;  // no key: nothing is ever loaded
  EXPECT_NO_THROW(validate(problem, "plan"));
}

TEST(Validate, MessagesBeginWithTheCaller) {
  Problem problem = dense_problem();
  problem.q = {};
  EXPECT_THAT(refusal([&] { validate(problem, "explain"); }),
              ::testing::StartsWith("explain: q is missing"));
}

TEST(Describe, SaysWhatIsSpecialInOneLine) {
  EXPECT_EQ(describe(validate(dense_problem(), "plan")),
            "f32 batch 2, seqlen_q 3, seqlen_kv 5, heads 4/2, head_dim 8/6, scale 0.353553");
  Problem problem = packed_problem();
  problem.seqlen_q = up_to(4);
  problem.out = spec_of(Dtype::f16, {7, 4, 6});
  problem.has_sinks = problem.wants_lse = problem.wants_row_max = true;
  problem.dropout.p = 0.5F;
  problem.softmax_scale = 1;
  EXPECT_EQ(describe(validate(problem, "plan")),
            "f32 packed sequences 3, seqlen_q <=4, seqlen_kv 9, heads 4/2, head_dim 8/6, scale 1, "
            "out f16, sinks, dropout 0.5, lse, row_max");
}

TEST(CpuTarget, NamesParseBack) {
  for (int i = 0; i <= static_cast<int>(CpuTarget::neon); ++i) {
    const auto target = static_cast<CpuTarget>(i);
    EXPECT_EQ(parse_cpu_target(name(target)), target);
  }
  EXPECT_EQ(parse_cpu_target("avx1024"), std::nullopt);
  EXPECT_EQ(parse_cpu_target(""), std::nullopt);
}

}  // namespace
}  // namespace fovea::testing
