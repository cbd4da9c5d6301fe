// sm90/attention_forward: registers suffice, the machine code has the products that the schedule asks for, and its
// loops do not let warps drift apart.
#include <gtest/gtest.h>

#include <array>
#include <ostream>
#include <string>

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {
namespace {

struct Shape {
  const char* name;
  std::int64_t head_dim;
  bool is_causal;
};

void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

ForwardPlan plan_of(const Shape& shape) {
  Problem problem;
  problem.q = problem.k = problem.v =
      make_spec(Dtype::bf16, std::array<std::int64_t, 4>{4, 4096, 16, shape.head_dim});
  if (shape.is_causal) problem.mask = causal();
  return choose_forward(validate(problem, "test"), typical_device(9, 0));
}

class ForwardSpecs : public ::testing::TestWithParam<Shape> {};

TEST_P(ForwardSpecs, SpillsNothingAndKeepsWarpsTogether) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const ForwardPlan plan = plan_of(GetParam());
  ASSERT_EQ(plan.candidate, "cuda/sm90/attention_forward");
  const jit::Cubin& cubin = compiled(planned_kernels(plan).front().text, {.major = 9, .minor = 0});
  EXPECT_EQ(cubin.report.spill_bytes, 0);
  EXPECT_EQ(cubin.report.num_wgmma_notes, 0);
  const auto code = machine_code(cubin);
  if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  // Scores and sums: of a careful step, of another, and of one alone. Where row tiles cross, of that step too, and
  // scores of one that is computed again.
  const int scores = plan.spec->head_dim_qk / 16;
  const int products = scores + plan.spec->tile_kv / 16;
  EXPECT_EQ(count(*code, "HGMMA."),
            plan.spec.as<Sm90ForwardSpec>().q_stages == 2 ? 4 * products + scores : 3 * products);
  // Where ptxas does not know that warps stay together, descriptors go through vector registers: a twentieth of the
  // time. The loop of optimistic steps, and the one around it and a careful step.
  for (const int steps : {1, 2}) {
    const auto loops = loops_with(*code, "HGMMA.", steps * products);
    ASSERT_FALSE(loops.empty());
    EXPECT_EQ(count(loops[0], "YIELD"), 0);
    EXPECT_LE(count(loops[0], "R2UR"), 2 * steps);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ForwardSpecs,
                         ::testing::Values(Shape{"full_64", 64, false},
                                           Shape{"causal_96", 96, true},
                                           Shape{"causal_128", 128, true},
                                           Shape{"full_256", 256, false}),
                         [](const auto& each) { return std::string(each.param.name); });

TEST(ForwardSpecs, StepsWithoutAMaskLoadNothingForOne) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  Problem problem;
  problem.q = problem.k = problem.v =
      make_spec(Dtype::bf16, std::array<std::int64_t, 4>{4, 4096, 16, 128});
  const TensorView documents(static_cast<const void*>(nullptr),
                             make_spec(Dtype::i32, std::array<std::int64_t, 2>{4, 4096}));
  problem.mask =
      parse_mask_mod("doc[batch, q_idx] == doc[batch, kv_idx]", {.tensors = {{"doc", documents}}});
  const ForwardPlan plan = choose_forward(validate(problem, "test"), typical_device(9, 0));
  const jit::Cubin& cubin = compiled(planned_kernels(plan).front().text, {.major = 9, .minor = 0});
  EXPECT_EQ(cubin.report.spill_bytes, 0);
  const auto code = machine_code(cubin);
  if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  const auto loops = loops_with(*code, "HGMMA.", 8 + 8);
  ASSERT_FALSE(loops.empty());
  EXPECT_EQ(count(loops[0], "LDG"), 0);
}

/// What else the kernel is compiled for: who loads, where keys lie, what it writes.
struct Form {
  const char* name;
  std::int64_t head_dim;
  std::int64_t page_size;     // -1: no cache; 0: slots
  bool shares_heads = false;  // stride 0, which TMA does not have
  Dtype out = Dtype::bf16;
  int spill_bytes = 0;
};

void PrintTo(const Form& form, std::ostream* out) { *out << form.name; }

ForwardPlan plan_of(const Form& form) {
  const auto spec = [&](Dtype dtype, std::int64_t heads) {
    TensorSpec made = make_spec(dtype, std::array<std::int64_t, 4>{4, 4096, heads, form.head_dim});
    if (form.shares_heads && heads == 4) made.strides[2] = 0;
    return made;
  };
  Problem problem;
  problem.q = spec(Dtype::bf16, 16);
  problem.k = problem.v = spec(Dtype::bf16, 4);
  problem.out = spec(form.out, 16);
  problem.mask = causal();
  ForwardProblem f = validate(problem, "test");
  f.is_cached = form.page_size >= 0;
  f.is_paged = form.page_size > 0;
  f.cache = {.page_size = form.page_size, .has_left_padding = false, .has_aligned_rows = true};
  return choose_forward(f, typical_device(9, 0));
}

class ForwardForms : public ::testing::TestWithParam<Form> {};

TEST_P(ForwardForms, SpillNothingInLoops) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const ForwardPlan plan = plan_of(GetParam());
  const bool is_copied = GetParam().page_size % 8 > 0 || GetParam().shares_heads;
  ASSERT_EQ(plan.candidate,
            is_copied ? "cuda/sm90/attention_forward_cp_async" : "cuda/sm90/attention_forward");
  const jit::Cubin& cubin = compiled(planned_kernels(plan).front().text, {.major = 9, .minor = 0});
  EXPECT_LE(cubin.report.spill_bytes, GetParam().spill_bytes);
  EXPECT_EQ(cubin.report.num_wgmma_notes, 0);
}

INSTANTIATE_TEST_SUITE_P(
    All, ForwardForms,
    ::testing::Values(Form{"copied_128", 128, -1, true}, Form{"copied_192", 192, -1, true},
                      Form{"copied_256", 256, -1, true}, Form{"copied_pages_96", 96, 5},
                      Form{"copied_pages_128", 128, 1},
                      Form{"copied_pages_256", 256, 1, false, Dtype::bf16, 48},
                      Form{"slots_128", 128, 0}, Form{"f32_out_64", 64, -1, false, Dtype::f32},
                      Form{"f32_out_128", 128, -1, false, Dtype::f32},
                      // 32 bytes at the end of a row tile; above, of the warps that load.
                      Form{"f32_out_256", 256, -1, false, Dtype::f32, 32}),
    [](const auto& each) { return std::string(each.param.name); });

/// Masks that select pieces of the score matrix: tiles of those, and several CTAs on an SM.
struct Selection {
  const char* name;
  std::int64_t head_dim;
  const char* mask;
  bool has_dropout = false;
};

void PrintTo(const Selection& selection, std::ostream* out) { *out << selection.name; }

class ForwardSelections : public ::testing::TestWithParam<Selection> {};

TEST_P(ForwardSelections, SpillNothing) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const Selection& selection = GetParam();
  Problem problem;
  problem.q = problem.k = problem.v =
      make_spec(Dtype::bf16, std::array<std::int64_t, 4>{1, 8192, 8, selection.head_dim});
  const TensorSpec table = make_spec(Dtype::boolean, std::array<std::int64_t, 3>{8, 256, 256});
  problem.mask = parse_mask_mod(
      selection.mask, {.tensors = {{"sel", TensorView(static_cast<const void*>(nullptr), table)}}});
  if (selection.has_dropout) problem.dropout = {.p = 0.1F, .seed = 7};
  const ForwardPlan plan = choose_forward(validate(problem, "test"), typical_device(9, 0));
  ASSERT_EQ(plan.candidate, "cuda/sm90/attention_forward");
  const jit::Cubin& cubin = compiled(planned_kernels(plan).front().text, {.major = 9, .minor = 0});
  EXPECT_EQ(cubin.report.spill_bytes, 0) << plan.spec.describe();
  EXPECT_EQ(cubin.report.num_wgmma_notes, 0);
}

INSTANTIATE_TEST_SUITE_P(
    All, ForwardSelections,
    ::testing::Values(Selection{"pieces_of_64_d128", 128, "sel[q_head, q_idx // 64, kv_idx // 64]"},
                      Selection{"pieces_of_64_d64", 64, "sel[q_head, q_idx // 64, kv_idx // 64]"},
                      Selection{"pieces_of_32_d128", 128, "sel[q_head, q_idx // 32, kv_idx // 32]"},
                      Selection{"causal_d128", 128,
                                "sel[q_head, q_idx // 64, kv_idx // 64] && kv_idx <= q_idx"},
                      Selection{"dropout_d64", 64, "sel[q_head, q_idx // 64, kv_idx // 64]", true}),
    [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace fovea::cuda
