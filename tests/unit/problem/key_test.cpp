// The key of the plan cache: equal for equal problems, another for every field that a plan reads.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "unit/problem/problems.hpp"

namespace fovea::testing {
namespace {

ScoreMod scaled_by(const float* table, std::int64_t extent, std::string name = "table") {
  const Captured values = capture(std::move(name), view(table, {extent}));
  return score_mod([&](auto x) { return x.score * values[x.q_head]; });
}

struct Change {
  std::string what;
  std::function<void(Problem&)> apply;
};

TEST(ProblemKey, EqualProblemsHaveEqualKeys) {
  EXPECT_EQ(problem_key(dense_problem()), problem_key(dense_problem()));
  EXPECT_EQ(problem_key(packed_problem()), problem_key(packed_problem()));
}

TEST(ProblemKey, EveryFieldChangesTheKey) {
  static constexpr float kTable[8] = {};
  const std::vector<Change> changes = {
      {"nothing", [](Problem&) {}},
      {"dtypes", [](Problem& p) { p.q.dtype = p.k.dtype = p.v.dtype = Dtype::f16; }},
      {"q", [](Problem& p) { p.q.shape[1] = 4; }},
      {"k", [](Problem& p) { p.k.shape[1] = 4; }},
      {"v", [](Problem& p) { p.v.shape[1] = 4; }},
      {"q strides", [](Problem& p) { p.q.strides[0] = 0; }},
      {"k strides", [](Problem& p) { p.k.strides[0] = 0; }},
      {"v strides", [](Problem& p) { p.v.strides[0] = 0; }},
      {"q device", [](Problem& p) { p.q.device = Device::cuda(0); }},
      {"q device index", [](Problem& p) { p.q.device = Device::cuda(1); }},
      {"out",
       [](Problem& p) {
         p.out = spec_of(Dtype::f32, {2, 3, 4, 6});
       }},
      {"out dtype",
       [](Problem& p) {
         p.out = spec_of(Dtype::f16, {2, 3, 4, 6});
       }},
      {"score", [](Problem& p) { p.score = parse_score_mod("score + 1"); }},
      {"score constant", [](Problem& p) { p.score = parse_score_mod("score + 2"); }},
      {"score capture", [](Problem& p) { p.score = scaled_by(kTable, 4); }},
      {"extent of capture", [](Problem& p) { p.score = scaled_by(kTable, 8); }},
      {"name of capture", [](Problem& p) { p.score = scaled_by(kTable, 4, "other"); }},
      {"mask", [](Problem& p) { p.mask = parse_mask_mod("kv_idx <= q_idx"); }},
      {"other mask", [](Problem& p) { p.mask = parse_mask_mod("kv_idx < q_idx"); }},
      {"softmax_scale", [](Problem& p) { p.softmax_scale = 1.0F; }},
      {"softmax_scale 0", [](Problem& p) { p.softmax_scale = 0.0F; }},
      {"has_sinks", [](Problem& p) { p.has_sinks = true; }},
      {"dropout", [](Problem& p) { p.dropout.p = 0.1F; }},
      {"num_sequences", [](Problem& p) { p.num_sequences = 3; }},
      {"num_sequences 0", [](Problem& p) { p.num_sequences = 0; }},
      {"num_sequences -1", [](Problem& p) { p.num_sequences = -1; }},
      {"wants_lse", [](Problem& p) { p.wants_lse = true; }},
      {"wants_row_max", [](Problem& p) { p.wants_row_max = true; }},
      {"seqlen_q", [](Problem& p) { p.seqlen_q = up_to(3); }},
      {"seqlen_q 0", [](Problem& p) { p.seqlen_q = up_to(0); }},
      {"seqlen_q -1", [](Problem& p) { p.seqlen_q = up_to(-1); }},
      {"seqlen_kv", [](Problem& p) { p.seqlen_kv = up_to(3); }},
      {"reads_dropout_seed", [](Problem& p) { p.reads_dropout_seed = true; }},
      {"has_dropout_places", [](Problem& p) { p.has_dropout_places = true; }},
      {"sm_margin", [](Problem& p) { p.sm_margin = 1; }},
      {"quant", [](Problem& p) { p.quant = parse_quantization("fast"); }},
      {"quant.qk", [](Problem& p) { p.quant = parse_quantization("fast,qk=e4m3"); }},
      {"quant.hadamard", [](Problem& p) { p.quant = parse_quantization("fast,hadamard=yes"); }},
      {"quant.block_kv", [](Problem& p) { p.quant = parse_quantization("fast,block_kv=64"); }},
      {"quant.p_max", [](Problem& p) { p.quant = parse_quantization("fast,p_max=64"); }},
      {"quant.p_step", [](Problem& p) { p.quant = parse_quantization("fast,p_step=2"); }},
      {"quant.accuracy", [](Problem& p) { p.quant.accuracy = 0.02F; }},
      {"compute_dtype f32", [](Problem& p) { p.compute_dtype = ComputeDtype::f32; }},
      {"compute_dtype bf16", [](Problem& p) { p.compute_dtype = ComputeDtype::bf16; }},
      {"cpu_target", [](Problem& p) { p.cpu_target = CpuTarget::scalar; }},
      {"compile_mode", [](Problem& p) { p.compile_mode = CompileMode::staged; }},
      {"is_deterministic", [](Problem& p) { p.is_deterministic = false; }},
      {"num_threads", [](Problem& p) { p.num_threads = 1; }},
  };
  std::vector<expr::Digest> keys;
  for (const Change& change : changes) {
    Problem problem = dense_problem();
    change.apply(problem);
    keys.push_back(problem_key(problem));
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      EXPECT_FALSE(keys[i] == keys[j]) << changes[i].what << " and " << changes[j].what;
    }
  }
}

TEST(ProblemKey, ContentsOfCapturesDoNotMatter) {
  const float ones[4] = {1, 1, 1, 1}, twos[4] = {2, 2, 2, 2};
  Problem a = dense_problem(), b = dense_problem();
  a.score = scaled_by(ones, 4);
  b.score = scaled_by(twos, 4);
  EXPECT_EQ(problem_key(a), problem_key(b));
  a.mask = parse_mask_mod("kv_idx < n", {.scalars = {CapturedScalar::of("n", 3)}});
  b.mask = parse_mask_mod("kv_idx < n", {.scalars = {CapturedScalar::of("n", 4)}});
  EXPECT_EQ(problem_key(a), problem_key(b));
  b.mask = parse_mask_mod("kv_idx < n", {.scalars = {CapturedScalar::of("n", 4.0)}});
  EXPECT_FALSE(problem_key(a) == problem_key(b));  // the type is structure
}

TEST(ProblemKey, StridesOfAxesOfOneElementDoNotMatterButTheLast) {
  Problem a = dense_problem(), b = dense_problem();
  a.q.shape[1] = b.q.shape[1] = 1;
  a.q.strides[1] = 5;
  b.q.strides[1] = 7;
  EXPECT_EQ(problem_key(a), problem_key(b));
  a.q.shape[1] = b.q.shape[1] = 2;
  EXPECT_FALSE(problem_key(a) == problem_key(b));
  a = b;
  a.q.shape[3] = b.q.shape[3] = 1;
  a.q.strides[3] = 2;
  b.q.strides[3] = 1;
  EXPECT_FALSE(problem_key(a) == problem_key(b));
}

TEST(ProblemKey, OfRanksThatNoTensorHasIsTakenBeforeTheyAreRefused) {
  for (const int rank : {-1, 9, 1 << 30}) {
    Problem problem = dense_problem();
    problem.q.rank = rank;
    EXPECT_FALSE(problem_key(problem) == problem_key(dense_problem()));
  }
}

}  // namespace
}  // namespace fovea::testing
