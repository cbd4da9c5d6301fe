// The kernels of sm_80 on Turing: registers suffice, beside what is asked of them, for the tile that waits there; all
// products are m16n8k8, as many as the schedule asks for.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <ostream>
#include <string>

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"
#include "cuda/backward/attention_backward.hpp"
#include "cuda/backward/sm80.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/sm80.hpp"
#include "problem/backward.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {
namespace {

constexpr jit::Architecture kTuring{.major = 7, .minor = 5};

struct Shape {
  const char* name;
  std::int64_t head_dim, seqlen_q = 4096;
};

void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

Problem posed(const Shape& shape) {
  const auto spec = [&](std::int64_t rows) {
    return make_spec(Dtype::f16, std::array<std::int64_t, 4>{4, rows, 16, shape.head_dim});
  };
  Problem problem;
  problem.q = problem.out = spec(shape.seqlen_q);
  problem.k = problem.v = spec(4096);
  problem.mask = causal();
  return problem;
}

/// Bytes of stores and loads where head_dim is 256: half of the registers hold sums of values.
constexpr int kMostSpilledBySums = 64;

/// "HMMA.1688" of a tile of rows x keys that a warp multiplies to this depth, or by these columns.
int products_of(std::int32_t rows, std::int32_t keys, std::int32_t depth, std::int32_t num_warps) {
  return rows / num_warps * keys * depth / (16 * 8 * 8);
}

class TuringForwards : public ::testing::TestWithParam<Shape> {};

TEST_P(TuringForwards, SpillNothingAndMultiplyATileOnce) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const ForwardPlan plan =
      choose_forward(validate(posed(GetParam()), "test"), typical_device(7, 5));
  ASSERT_EQ(plan.candidate, Sm80Forward::kName);
  const jit::Cubin& cubin = compiled(planned_kernels(plan).front().text, kTuring);
  EXPECT_LE(cubin.report.spill_bytes, GetParam().head_dim > 192 ? kMostSpilledBySums : 0);
  const auto code = machine_code(cubin);
  if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  const ForwardSpec& spec = *plan.spec;
  EXPECT_EQ(count(*code, "HMMA."), count(*code, "HMMA.1688.F32 "));
  EXPECT_EQ(count(*code, "HMMA."), products_of(spec.tile_q, spec.tile_kv,
                                               spec.head_dim_qk + spec.head_dim_v, spec.num_warps));
}

INSTANTIATE_TEST_SUITE_P(All, TuringForwards,
                         ::testing::Values(Shape{"causal_64", 64}, Shape{"causal_128", 128},
                                           Shape{"causal_192", 192}, Shape{"causal_256", 256},
                                           Shape{"decode_128", 128, 1}),
                         [](const auto& each) { return std::string(each.param.name); });

class TuringBackwards : public ::testing::TestWithParam<Shape> {};

TEST_P(TuringBackwards, SpillNothingAndMultiplyATileOnce) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  BackwardProblem problem;
  problem.forward = posed(GetParam());
  problem.dout = problem.dq = problem.forward.q;
  problem.dk = problem.dv = problem.forward.k;
  const BackwardPlan plan = choose_backward(validate(problem, "test"), typical_device(7, 5));
  ASSERT_EQ(plan.candidate, Sm80Backward::kName);
  for (const PlannedKernel& kernel : planned_kernels(plan)) {
    const auto step = std::ranges::find(plan.steps, kernel.role, &BackwardStep::role);
    if (step == plan.steps.end()) continue;
    const jit::Cubin& cubin = compiled(kernel.text, kTuring);
    EXPECT_EQ(cubin.report.spill_bytes, 0) << kernel.text.label;
    const auto code = machine_code(cubin);
    if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
    const auto& spec = step->spec.as<Sm80BackwardSpec>();
    // S, dP where scores have sums, and the sums.
    const std::int32_t depth = spec.head_dim_qk + (spec.sums_scores ? spec.head_dim_v : 0) +
                               (spec.sums_scores ? spec.head_dim_qk : 0) +
                               (spec.sums_values ? spec.head_dim_v : 0);
    EXPECT_EQ(count(*code, "HMMA."), count(*code, "HMMA.1688.F32 "));
    EXPECT_EQ(count(*code, "HMMA."),
              products_of(spec.tile_owned, spec.tile_walked, depth, spec.num_warps))
        << kernel.text.label;
  }
}

INSTANTIATE_TEST_SUITE_P(All, TuringBackwards,
                         ::testing::Values(Shape{"causal_64", 64}, Shape{"causal_128", 128}),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace fovea::cuda
