// sm90/attention_quantized and the kernel before it: registers suffice, and scores are products of integers.
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/sm90_quantized.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {
namespace {

struct Shape {
  const char* name;
  std::int64_t head_dim;
  bool is_causal = false;
  bool has_softcap = false;
  int spill_bytes = 0;
  const char* quant = "accurate";
};

void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

ForwardPlan plan_of(const Shape& shape) {
  Problem problem;
  problem.q = problem.k = problem.v =
      make_spec(Dtype::bf16, std::array<std::int64_t, 4>{4, 4096, 16, shape.head_dim});
  problem.quant = parse_quantization(shape.quant);
  if (shape.is_causal) problem.mask = causal();
  if (shape.has_softcap) problem.score = softcap(30);
  return choose_forward(validate(problem, "test"), typical_device(9, 0));
}

class QuantizedSpecs : public ::testing::TestWithParam<Shape> {};

TEST_P(QuantizedSpecs, SpillNothingInLoops) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const ForwardPlan plan = plan_of(GetParam());
  ASSERT_EQ(plan.candidate, Sm90ForwardQuantized::kName);
  for (const PlannedKernel& kernel : planned_kernels(plan)) {
    const jit::Cubin& cubin = compiled(kernel.text, {.major = 9, .minor = 0});
    EXPECT_LE(cubin.report.spill_bytes,
              kernel.role == KernelRole::main ? GetParam().spill_bytes : 0)
        << kernel.text.label;
    EXPECT_EQ(cubin.report.num_wgmma_notes, 0);
    if (kernel.role != KernelRole::main || GetParam().has_softcap) continue;
    const auto code = machine_code(cubin);
    if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
    // Scores of 32 bytes of depth each: of a careful step, of another, of one alone, where row tiles cross, and of one
    // that is computed again.
    const int scores = plan.spec->head_dim_qk / 32;
    EXPECT_EQ(count(*code, "IGMMA."), 5 * scores);
    const bool sums_codes = plan.spec.as<Sm90ForwardSpec>().sums_codes;
    EXPECT_EQ(count(*code, "HGMMA."), sums_codes ? 0 : 4 * plan.spec->tile_kv / 16);
    EXPECT_EQ(count(*code, "QGMMA."), sums_codes ? 4 * plan.spec->tile_kv / 32 : 0);
    for (const int steps : {1, 2}) {
      const auto loops = loops_with(*code, "IGMMA.", steps * scores);
      ASSERT_FALSE(loops.empty());
      EXPECT_EQ(count(loops[0], "YIELD"), 0);
      EXPECT_LT(count(loops[0], "I2F"), 16) << "sums of codes are floats";
      EXPECT_LE(count(loops[0], "R2UR"), (sums_codes ? 3 : 2) * steps);
      const int of_careful_steps = steps == 1 ? 0 : 8;
      EXPECT_LE(count(loops[0], "LDL") + count(loops[0], "STL"), of_careful_steps);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, QuantizedSpecs,
    ::testing::Values(
        Shape{"full_64", 64, false}, Shape{"causal_128", 128, true}, Shape{"full_128", 128, false},
        // Stores and loads of what its rows' scores lack.
        Shape{"softcap_128", 128, false, true, 24},
        // Beside careful steps, and where row tiles cross.
        Shape{.name = "fast_full_128", .head_dim = 128, .spill_bytes = 56, .quant = "fast"},
        Shape{.name = "fast_causal_128",
              .head_dim = 128,
              .is_causal = true,
              .spill_bytes = 56,
              .quant = "fast"},
        Shape{.name = "fast_full_64", .head_dim = 64, .quant = "fast"}),
    [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace fovea::cuda
