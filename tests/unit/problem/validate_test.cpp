#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "fovea/error.hpp"

#include "problem/forward.hpp"

namespace fovea {
namespace {

TensorSpec spec(std::initializer_list<std::int64_t> shape, Dtype dtype = Dtype::f32) {
  return make_spec(dtype, {shape.begin(), shape.size()});
}

/// Grouped heads, different lengths and head dims: nothing is equal by chance.
Problem dense() {
  return {.q = spec({2, 5, 6, 8}), .k = spec({2, 7, 3, 8}), .v = spec({2, 7, 3, 16})};
}

Problem packed() {
  return {.q = spec({50, 6, 8}), .k = spec({70, 3, 8}), .v = spec({70, 3, 16}), .num_sequences = 4};
}

std::string refusal(const Problem& problem) {
  try {
    validate(problem, "plan");
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

std::string refusal(const std::function<void(Problem&)>& spoil, Problem problem = dense()) {
  spoil(problem);
  return refusal(problem);
}

TEST(Validate, ResolvesADenseProblem) {
  const ForwardProblem f = validate(dense(), "plan");
  EXPECT_FALSE(f.is_varlen);
  EXPECT_EQ(f.num_sequences, 2);
  EXPECT_EQ(f.seqlen_q, 5);
  EXPECT_EQ(f.seqlen_kv, 7);
  EXPECT_EQ(f.total_q, 10);
  EXPECT_EQ(f.group, 2);
  EXPECT_EQ(f.head_dim_qk, 8);
  EXPECT_EQ(f.head_dim_v, 16);
  EXPECT_FLOAT_EQ(f.softmax_scale, 0.35355339F);  // 1 / sqrt(8)
  EXPECT_EQ(f.problem.out, spec({2, 5, 6, 16}));
}

TEST(Validate, ResolvesAPackedProblem) {
  const ForwardProblem f = validate(packed(), "plan");
  EXPECT_TRUE(f.is_varlen);
  EXPECT_EQ(f.num_sequences, 4);
  EXPECT_EQ(f.total_q, 50);
  EXPECT_EQ(f.problem.out, spec({50, 6, 16}));
}

TEST(Validate, BoundsTakeThePlaceOfLengths) {
  Problem problem = dense();
  problem.seqlen_q = up_to(100);
  problem.seqlen_kv = up_to(0);
  const ForwardProblem f = validate(problem, "plan");
  EXPECT_EQ(f.seqlen_q, 100);
  EXPECT_EQ(f.total_q, 200);
  EXPECT_EQ(f.seqlen_kv, 0);
}

TEST(Validate, EmptyAxesAreLegal) {
  EXPECT_EQ(refusal([](Problem& p) { p.q = spec({2, 0, 6, 8}); }), "accepted");
  EXPECT_EQ(refusal([](Problem& p) {
              p.k = spec({2, 0, 3, 8}), p.v = spec({2, 0, 3, 16});
            }),
            "accepted");
  EXPECT_EQ(refusal({.q = spec({0, 5, 6, 8}), .k = spec({0, 7, 3, 8}), .v = spec({0, 7, 3, 16})}),
            "accepted");
}

struct Refusal {
  const char* names;  // what the message must say, in this order, beside the function
  const char* and_says;
  std::function<void(Problem&)> spoil;
};

TEST(Validate, RefusesByNameWithWhatItGot) {
  constexpr auto kHuge = std::numeric_limits<std::int64_t>::max();
  const Refusal refusals[] = {
      {"q is missing", "rank 4", [](Problem& p) { p.q = {}; }},
      {"k is f32 [7, 3, 8]", "rank 4",
       [](Problem& p) {
         p.k = spec({7, 3, 8});
       }},
      {"q is i32", "f32, f16 or bf16", [](Problem& p) { p.q.dtype = Dtype::i32; }},
      {"v is bf16 but q is f32", "equal dtypes", [](Problem& p) { p.v.dtype = Dtype::bf16; }},
      {"k has head_dim 9 but q has 8", "v alone may differ",
       [](Problem& p) {
         p.k = spec({2, 7, 3, 9});
       }},
      {"v has num_heads 2 but k has 3", "equal",
       [](Problem& p) {
         p.v = spec({2, 7, 2, 16});
       }},
      {"v has seqlen 8 but k has 7", "equal",
       [](Problem& p) {
         p.v = spec({2, 8, 3, 16});
       }},
      {"k has batch 3 but q has 2", "equal",
       [](Problem& p) {
         p.k = spec({3, 7, 3, 8});
       }},
      {"q has 6 heads and k has 4", "multiple of num_heads_kv",
       [](Problem& p) {
         p.k = spec({2, 7, 4, 8}), p.v = spec({2, 7, 4, 16});
       }},
      {"head_dim is 8 (q, k) and 0 (v)", "at least 1",
       [](Problem& p) {
         p.v = spec({2, 7, 3, 0});
       }},
      {"out is f32 [2, 5, 6, 8]", "expected f32 [2, 5, 6, 16]",
       [](Problem& p) {
         p.out = spec({2, 5, 6, 8});
       }},
      {"out is i8", "f32, f16 or bf16",
       [](Problem& p) {
         p.out = spec({2, 5, 6, 16}, Dtype::i8);
       }},
      {"softmax_scale is nan", "finite",
       [](Problem& p) { p.softmax_scale = std::numeric_limits<float>::quiet_NaN(); }},
      {"dropout.p is 1.5", "[0, 1]", [](Problem& p) { p.dropout.p = 1.5F; }},
      {"num_threads is -1", ">= 0", [](Problem& p) { p.num_threads = -1; }},
      {"seqlen_kv is up_to(-1)", "expected 0 to", [](Problem& p) { p.seqlen_kv = up_to(-1); }},
      // A spec is a plain struct: what make_spec refuses can be written into it.
      {"q has extent -5 in dimension 1", ">= 0", [](Problem& p) { p.q.shape[1] = -5; }},
      {"k has more than 2^63 elements", "k", [](Problem& p) { p.k.shape[0] = kHuge; }},
      {"seqlen_q is 2147483648", "at most 2147483647",
       [](Problem& p) {
         p.q = spec({2, std::int64_t{1} << 31, 1, 8});
         p.k = spec({2, 7, 1, 8});
         p.v = p.k;
       }},
  };
  for (const Refusal& expected : refusals) {
    EXPECT_THAT(refusal(expected.spoil),
                testing::AllOf(testing::StartsWith("plan: "), testing::HasSubstr(expected.names),
                               testing::HasSubstr(expected.and_says)));
  }
}

TEST(Validate, RefusesANegativeNumberOfSequences) {
  EXPECT_THAT(refusal([](Problem& p) { p.num_sequences = -1; }, packed()),
              testing::HasSubstr("num_sequences is -1"));
}

TEST(Validate, RefusesLengthsWhoseProductOverflows) {
  Problem problem = dense();
  problem.q.shape = {std::int64_t{1} << 40, 1, 1, 8};
  problem.k.shape = problem.v.shape = {std::int64_t{1} << 40, 1, 1, 8};
  problem.seqlen_q = up_to((std::int64_t{1} << 31) - 1);
  EXPECT_THAT(refusal(problem), testing::HasSubstr("above 2^63"));
}

TEST(Validate, RefusesLoadsThatAreProvenOutOfRange) {
  const float table[4] = {};
  const Captures captures{.tensors = {{"t", view(table, {4})}}};
  Problem problem = dense();
  problem.score = parse_score_mod("score + t[q_idx]", captures);  // q_idx goes to 4
  EXPECT_EQ(refusal(problem), "accepted");                        // clamped: not every load is out
  problem.score = parse_score_mod("score + t[q_idx + 4]", captures);
  EXPECT_THAT(refusal(problem), testing::HasSubstr("t"));
  EXPECT_NE(refusal(problem), "accepted");
}

TEST(ProblemKey, FollowsEveryFieldThatAPlanDependsOn) {
  const expr::Digest key = problem_key(dense());
  EXPECT_EQ(problem_key(dense()), key);
  const std::function<void(Problem&)> changes[] = {
      [](Problem& p) { p.q.shape[1] = 6; },
      [](Problem& p) { p.k.strides[1] += 1; },
      [](Problem& p) { p.v.dtype = Dtype::f16; },
      [](Problem& p) { p.mask = parse_mask_mod("kv_idx <= q_idx"); },
      [](Problem& p) { p.score = parse_score_mod("score * 3.0"); },
      [](Problem& p) { p.softmax_scale = 1.0F; },
      [](Problem& p) { p.has_sinks = true; },
      [](Problem& p) { p.dropout.p = 0.5F; },
      [](Problem& p) { p.num_sequences = 2; },
      [](Problem& p) { p.wants_lse = true; },
      [](Problem& p) { p.wants_row_max = true; },
      [](Problem& p) { p.seqlen_q = up_to(5); },
      [](Problem& p) { p.seqlen_kv = up_to(7); },
      [](Problem& p) { p.compute_dtype = ComputeDtype::bf16; },
      [](Problem& p) { p.cpu_target = CpuTarget::scalar; },
      [](Problem& p) { p.is_deterministic = false; },
      [](Problem& p) { p.num_threads = 3; },
  };
  for (std::size_t i = 0; i < std::size(changes); ++i) {
    Problem problem = dense();
    changes[i](problem);
    EXPECT_NE(problem_key(problem), key) << "change " << i;
  }
}

}  // namespace
}  // namespace fovea
