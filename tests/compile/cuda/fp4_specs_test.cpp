// sm120/attention_fp4, sm100/attention_fp4 and the kernels before them: registers suffice, and the machine code has the
// products of four bits and the conversions that their schedules ask for.
#include <gtest/gtest.h>

#include <array>
#include <ostream>
#include <string>

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/sm100_fp4.hpp"
#include "cuda/forward/sm120_fp4.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {
namespace {

struct Shape {
  const char* name;
  std::int64_t head_dim;
  const char* quant;
  std::int64_t seqlen;
  bool has_softcap = false;
};

void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

ForwardProblem problem_of(const Shape& shape) {
  Problem problem;
  problem.q = problem.k = problem.v =
      make_spec(Dtype::bf16, std::array<std::int64_t, 4>{4, shape.seqlen, 16, shape.head_dim});
  problem.quant = parse_quantization(shape.quant);
  problem.mask = causal();
  if (shape.has_softcap) problem.score = softcap(30);
  return validate(problem, "test");
}

class Fp4Specs : public ::testing::TestWithParam<Shape> {};

TEST_P(Fp4Specs, SpillNothingAndMultiplyFourBits) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const ForwardPlan plan = choose_forward(problem_of(GetParam()), typical_device(12, 0));
  ASSERT_EQ(plan.candidate, Sm120ForwardFp4::kName);
  const auto& spec = plan.spec.as<Fp4ForwardSpec>();
  EXPECT_LE(fp4_layout(spec).bytes * spec.ctas_per_sm, 99 * 1024);
  for (const PlannedKernel& kernel : planned_kernels(plan)) {
    const jit::Cubin cubin = compiled(kernel.text, {.major = 12, .minor = 0});
    EXPECT_EQ(cubin.report.spill_bytes, 0) << kernel.text.label;
    if (kernel.role != KernelRole::main) continue;
    const auto code = machine_code(cubin);
    if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
    // Of a warp of 16 rows: blocks of 8 keys by 64 channels, and of 8 channels by 64 keys.
    const int scores = kQuantizedTile / 8 * (spec.head_dim_qk / kFp4Depth);
    const int sums = spec.head_dim_v / 8 * (kQuantizedTile / kFp4Depth);
    const std::string product = spec.group == 16 ? "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"
                                                 : "OMMA.SF.16864.F32.E2M1.E2M1.E8";
    EXPECT_EQ(count(*code, product), scores + sums);
    EXPECT_EQ(count(*code, "UBLKCP"), 3 * spec.stages) << "where a walk begins, and of a tile";
    const auto loops = loops_with(*code, "OMMA.", scores + sums);
    ASSERT_FALSE(loops.empty());
    EXPECT_EQ(count(loops[0], "LDL") + count(loops[0], "STL"), 0);
    // Two probabilities each, of 16 rows by a tile, which 32 lanes have.
    EXPECT_EQ(count(loops[0], "F2FP.SATFINITE.E2M1"), 16 * kQuantizedTile / 32 / 2);
    if (GetParam().has_softcap) continue;  // which has powers of its own
    // Of scores, of the greatest of groups, of steps of references; reciprocals of scales of e4m3.
    const int groups = 2 * kQuantizedTile / 32;
    EXPECT_EQ(count(loops[0], "MUFU.EX2"), 64 + groups + 2);
    EXPECT_EQ(count(loops[0], "MUFU.RCP"), spec.group == 16 ? groups : 0);
  }
}

/// On sm_100 and sm_103.
class TensorMemoryFp4Specs : public ::testing::TestWithParam<Shape> {};

void expect_products_by_tensor_memory(const Sm100Fp4Spec& spec, const std::string& code) {
  // Of each group scores, of a first kv tile and of all others, and sums; scales of Q, K, P and V before them.
  const int groups = sm100_groups(spec);
  const int of_q = spec.head_dim_qk / kFp4Depth, of_p = kQuantizedTile / kFp4Depth;
  EXPECT_EQ(count(code, "UTCOMMA"), groups * (2 * of_q + of_p));
  const int of_v = fp4_scales_bytes(spec.head_dim_v) / kFp4CopyBytes;
  EXPECT_EQ(count(code, "UTCCP"), groups * (2 * 2 * of_q + of_p + of_v));
  EXPECT_EQ(count(code, "LDTM.x32"), 4 + 2) << "scores; O to be scaled, and at the end";
  EXPECT_EQ(count(code, "STTM.x4"), 4) << "codes of 32 keys each";
}

TEST_P(TensorMemoryFp4Specs, SpillNothingAndMultiplyFourBits) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  for (const int minor : {0, 3}) {
    const ForwardPlan plan = choose_forward(problem_of(GetParam()), typical_device(10, minor));
    ASSERT_EQ(plan.candidate, Sm100ForwardFp4::kName);
    const auto& spec = plan.spec.as<Sm100Fp4Spec>();
    for (const PlannedKernel& kernel : planned_kernels(plan)) {
      const jit::Cubin& cubin = compiled(kernel.text, {.major = 10, .minor = minor});
      EXPECT_EQ(cubin.report.spill_bytes, 0) << kernel.text.label;
      EXPECT_LE(cubin.report.compile_ms, 6000) << "on a busy machine; alone a third of it";
      if (kernel.role != KernelRole::main) continue;
      const auto code = machine_code(cubin);
      if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
      expect_products_by_tensor_memory(spec, *code);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, TensorMemoryFp4Specs,
                         ::testing::Values(Shape{"nvfp4_causal_128", 128, "nvfp4", 4096},
                                           Shape{"mxfp4_softcap_64", 64, "mxfp4", 64, true}),
                         [](const auto& each) { return std::string(each.param.name); });

INSTANTIATE_TEST_SUITE_P(All, Fp4Specs,
                         ::testing::Values(Shape{"nvfp4_causal_128", 128, "nvfp4", 4096},
                                           Shape{"mxfp4_softcap_64", 64, "mxfp4", 64, true}),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace fovea::cuda
