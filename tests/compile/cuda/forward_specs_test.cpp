// sm90/attention_forward: registers suffice, the machine code has the products that the schedule asks for, and its loops do not let warps
// drift apart.
#include <gtest/gtest.h>

#include <array>
#include <ostream>
#include <string>

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"
#include "cuda/attention_forward.hpp"
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
  const jit::Cubin cubin = compiler().compile(kernel_texts(plan).front(), {.major = 9, .minor = 0});
  EXPECT_EQ(cubin.report.spill_bytes, 0);
  EXPECT_EQ(cubin.report.num_wgmma_notes, 0);
  const auto code = machine_code(cubin);
  if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  // Scores and sums: of a careful step, of another, of one that crosses row tiles where there is such, and of one alone.
  const int products = (plan.spec.head_dim_qk + plan.spec.tile_kv) / 16;
  EXPECT_EQ(count(*code, "HGMMA."), (plan.spec.q_stages == 2 ? 4 : 3) * products);
  // Where ptxas does not know that warps stay together, descriptors go through vector registers: a twentieth of the time.
  const auto loops = loops_with(*code, "HGMMA.", products);
  ASSERT_GE(loops.size(), 2U);
  for (const std::string& step : {loops[0], loops[1]}) {
    EXPECT_EQ(count(step, "YIELD"), 0);
    EXPECT_LE(count(step, "R2UR"), 3);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ForwardSpecs,
                         ::testing::Values(Shape{"full_64", 64, false},
                                           Shape{"causal_128", 128, true},
                                           Shape{"full_256", 256, false}),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace fovea::cuda
