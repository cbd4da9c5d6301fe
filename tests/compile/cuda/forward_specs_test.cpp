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
  const jit::Cubin cubin =
      compiler().compile(planned_kernels(plan).front().text, {.major = 9, .minor = 0});
  EXPECT_EQ(cubin.report.spill_bytes, 0);
  EXPECT_EQ(cubin.report.num_wgmma_notes, 0);
  const auto code = machine_code(cubin);
  if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  // Scores and sums: of a careful step, of another, and of one alone. Where row tiles cross, of that step too, and
  // scores of a suspect one.
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
                                           Shape{"causal_128", 128, true},
                                           Shape{"full_256", 256, false}),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace fovea::cuda
