// sm90/attention_quantized, sm80/attention_quantized and the kernels before them: registers suffice, and scores are
// products of integers.
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/quantize_kv.hpp"
#include "cuda/forward/sm80_quantized.hpp"
#include "cuda/forward/sm90_quantized.hpp"
#include "problem/decode.hpp"
#include "problem/forward.hpp"
#include "support/plan_without.hpp"

namespace fovea::cuda {
namespace {

struct Shape {
  const char* name;
  std::int64_t head_dim;
  bool is_causal = false;
  bool has_softcap = false;
  int spill_bytes = 0;
  const char* quant = "accurate";
  bool has_dropout = false;
  Dtype dtype = Dtype::bf16;
  const char* score = nullptr;  // a program, not that of a cap
  bool has_program() const { return has_softcap || score != nullptr; }
};

void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

ForwardProblem problem_of(const Shape& shape) {
  Problem problem;
  problem.q = problem.k = problem.v =
      make_spec(shape.dtype, std::array<std::int64_t, 4>{4, 4096, 16, shape.head_dim});
  problem.quant = parse_quantization(shape.quant);
  if (shape.is_causal) problem.mask = causal();
  if (shape.has_softcap) problem.score = softcap(30);
  if (shape.score != nullptr) problem.score = parse_score_mod(shape.score);
  if (shape.has_dropout) problem.dropout.p = 0.1F;
  return validate(problem, "test");
}

class QuantizedSpecs : public ::testing::TestWithParam<Shape> {};

TEST_P(QuantizedSpecs, SpillNothingInLoops) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const ForwardPlan plan = choose_forward(problem_of(GetParam()), typical_device(9, 0));
  ASSERT_EQ(plan.candidate, Sm90ForwardQuantized::kName);
  for (const PlannedKernel& kernel : planned_kernels(plan)) {
    const jit::Cubin& cubin = compiled(kernel.text, {.major = 9, .minor = 0});
    // What rounds: four CTAs of it in an SM have 64 registers a thread each.
    const bool is_wide_rounding =
        kernel.role == KernelRole::quantize && plan.spec->head_dim_qk > 64;
    EXPECT_LE(cubin.report.spill_bytes, kernel.role == KernelRole::main ? GetParam().spill_bytes
                                        : is_wide_rounding              ? 24
                                                                        : 0)
        << kernel.text.label;
    EXPECT_EQ(cubin.report.num_wgmma_notes, 0);
    if (kernel.role != KernelRole::main || GetParam().has_program()) continue;
    const auto code = machine_code(cubin);
    if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
    // Scores of 32 bytes of depth each: of a careful step, of another, of one alone, where row tiles cross, and of one
    // that is computed again.
    const int scores = plan.spec->head_dim_qk / 32;
    EXPECT_EQ(count(*code, "IGMMA."), 5 * scores);
    // Sums likewise, of a row tile's last step in the place of one alone; those of codes have another walk for row
    // tiles that are computed again.
    const bool sums_codes = plan.spec.as<Sm90ForwardSpec>().sums_codes;
    EXPECT_EQ(count(*code, "HGMMA."), sums_codes ? 0 : 4 * plan.spec->tile_kv / 16);
    EXPECT_EQ(count(*code, "QGMMA."), sums_codes ? 5 * plan.spec->tile_kv / 32 : 0);
    // Two waits a step, where row tiles cross and for those that are computed again, and one for a row tile's first
    // scores and its last sums: else ptxas has serialised products, which it does not always say.
    EXPECT_EQ(count(*code, "WARPGROUP.DEPBAR"), sums_codes ? 10 : 9);
    for (const int steps : {1, 2}) {
      const auto loops = loops_with(*code, "IGMMA.", steps * scores);
      ASSERT_FALSE(loops.empty());
      EXPECT_EQ(count(loops[0], "YIELD"), 0);
      EXPECT_LT(count(loops[0], "I2F"), 16) << "sums of codes are floats";
      // Beside rows that are rotated four uniform registers more are made anew in the loop of careful steps.
      const int of_rotation = steps == 2 && plan.quant.hadamard ? 4 : 0;
      EXPECT_LE(count(loops[0], "R2UR"), (sums_codes ? 3 : 2) * steps + of_rotation);
      const bool smooths_v = plan.quant.smooth_v != Smoothing::none;
      const int of_careful_steps = steps == 1 ? 0 : smooths_v ? 13 : 8;
      EXPECT_LE(count(loops[0], "LDL") + count(loops[0], "STL"), of_careful_steps);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, QuantizedSpecs,
    ::testing::Values(
        Shape{"full_64", 64, false}, Shape{"causal_128", 128, true}, Shape{"full_128", 128, false},
        // Where row tiles cross.
        Shape{"softcap_128", 128, false, true, 12},
        // Beside careful steps and repairs, and where row tiles cross.
        Shape{.name = "fast_full_128", .head_dim = 128, .spill_bytes = 40, .quant = "fast"},
        Shape{.name = "fast_causal_128",
              .head_dim = 128,
              .is_causal = true,
              .spill_bytes = 40,
              .quant = "fast"},
        Shape{.name = "fast_full_64", .head_dim = 64, .quant = "fast"},
        Shape{.name = "fast_softcap_64", .head_dim = 64, .has_softcap = true, .quant = "fast"},
        // Of careful steps, and where row tiles cross.
        Shape{.name = "fast_softcap_128",
              .head_dim = 128,
              .has_softcap = true,
              .spill_bytes = 472,
              .quant = "fast"},
        Shape{.name = "fast_line_128",
              .head_dim = 128,
              .spill_bytes = 224,
              .quant = "fast",
              .score = "score + 0.01 * float(kv_idx - q_idx)"},
        Shape{.name = "fast_bent_line_128",
              .head_dim = 128,
              .spill_bytes = 260,
              .quant = "fast",
              .score = "score - 0.01 * float(abs(kv_idx - q_idx))"},
        // Where row tiles cross: a row of Q is held, and the mean of V read.
        Shape{.name = "rotated_128",
              .head_dim = 128,
              .spill_bytes = 12,
              .quant = "accurate,hadamard=yes"},
        Shape{.name = "fast_rotated_causal_64",
              .head_dim = 64,
              .is_causal = true,
              .spill_bytes = 24,
              .quant = "fast,smooth_v=sequence,hadamard=yes"},
        Shape{.name = "fast_smooth_128",
              .head_dim = 128,
              .spill_bytes = 72,
              .quant = "fast,smooth_v=sequence"},
        Shape{.name = "accurate_bent_line_128",
              .head_dim = 128,
              .spill_bytes = 40,
              .score = "score - 0.01 * float(abs(kv_idx - q_idx))"}),
    [](const auto& each) { return std::string(each.param.name); });

struct CacheShape {
  const char* name;
  Dtype k, v;
  std::int64_t head_dim;
  const char* quant;
  int spill_bytes = 0;
  std::int64_t page_size = 16;
};

void PrintTo(const CacheShape& shape, std::ostream* out) { *out << shape.name; }

ForwardPlan plan_over_cache(const CacheShape& shape) {
  Problem problem;
  problem.q = make_spec(Dtype::bf16, std::array<std::int64_t, 4>{2, 512, 32, shape.head_dim});
  problem.k = make_spec(shape.k, std::array<std::int64_t, 4>{2, 32768, 8, shape.head_dim});
  problem.v = make_spec(shape.v, std::array<std::int64_t, 4>{2, 32768, 8, shape.head_dim});
  problem.out = problem.q;
  problem.mask = causal();
  problem.quant = parse_quantization(shape.quant);
  const CacheLayout cache{.page_size = shape.page_size, .has_aligned_rows = true};
  return choose_forward(validate_decode_problem(problem, cache, "test"), typical_device(9, 0));
}

class QuantizedCacheSpecs : public ::testing::TestWithParam<CacheShape> {};

/// What looks a key up in the cache stands where rows are not finite; the places of row tiles, which have lengths of
/// their own, take registers of the loops beside codes of P, as those of packed sequences do.
TEST_P(QuantizedCacheSpecs, SpillNothingInLoops) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const ForwardPlan plan = plan_over_cache(GetParam());
  ASSERT_EQ(plan.candidate, Sm90ForwardQuantized::kName);
  for (const PlannedKernel& kernel : planned_kernels(plan)) {
    const jit::Cubin cubin = compiled(kernel.text, {.major = 9, .minor = 0});
    // Of what rounds, before and behind its loads.
    EXPECT_LE(cubin.report.spill_bytes,
              kernel.role == KernelRole::main ? GetParam().spill_bytes : 40)
        << kernel.text.label;
    EXPECT_EQ(cubin.report.num_wgmma_notes, 0);
    if (kernel.role != KernelRole::main) continue;
    const auto code = machine_code(cubin);
    if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
    const int scores = plan.spec->head_dim_qk / 32;
    for (const int steps : {1, 2}) {
      const auto loops = loops_with(*code, "IGMMA.", steps * scores);
      ASSERT_FALSE(loops.empty());
      EXPECT_EQ(count(loops[0], "YIELD"), 0);
      const bool is_tight = plan.quant.pv != QuantFormat::none && GetParam().head_dim == 128;
      EXPECT_LE(count(loops[0], "LDL") + count(loops[0], "STL"), !is_tight    ? 0
                                                                 : steps == 1 ? 4
                                                                              : 32);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, QuantizedCacheSpecs,
    ::testing::Values(CacheShape{"fast_int8_128", Dtype::i8, Dtype::i8, 128, "fast", 364},
                      CacheShape{"fast_e4m3_128", Dtype::e4m3, Dtype::e4m3, 128, "fast", 344, 0},
                      CacheShape{"fast_int8_64", Dtype::i8, Dtype::i8, 64, "fast", 116},
                      CacheShape{"accurate_int8_128", Dtype::i8, Dtype::i8, 128, "accurate"},
                      CacheShape{"accurate_e4m3_64", Dtype::e4m3, Dtype::e4m3, 64, "accurate"},
                      CacheShape{"fast_bf16_128", Dtype::bf16, Dtype::bf16, 128, "fast", 364}),
    [](const auto& each) { return std::string(each.param.name); });

struct Sm80Shape {
  jit::Architecture architecture;
  Shape shape;
};

void PrintTo(const Sm80Shape& each, std::ostream* out) { *out << each.shape.name; }

constexpr Shape fast(const char* name, std::int64_t head_dim, int spill_bytes) {
  return {.name = name, .head_dim = head_dim, .spill_bytes = spill_bytes, .quant = "fast"};
}

class Sm80QuantizedSpecs : public ::testing::TestWithParam<Sm80Shape> {};

TEST_P(Sm80QuantizedSpecs, MultiplyIntegersAndSpillNothingInLoops) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const auto& [architecture, shape] = GetParam();
  const ForwardPlan plan =
      testing::plan_without({Sm90ForwardQuantized::kName}, problem_of(shape),
                            typical_device(architecture.major, architecture.minor));
  ASSERT_EQ(plan.candidate, Sm80ForwardQuantized::kName);
  const auto& spec = plan.spec.as<TeamSpec>();
  for (const PlannedKernel& kernel : planned_kernels(plan)) {
    const jit::Cubin cubin = compiled(kernel.text, architecture);
    const bool is_main = kernel.role == KernelRole::main;
    EXPECT_LE(cubin.report.spill_bytes, is_main ? shape.spill_bytes : 0) << kernel.text.label;
    if (!is_main) continue;
    const auto code = machine_code(cubin);
    if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
    // Of a warp: blocks of 16 rows x 8 keys x 32 codes, and of 16 rows x 8 columns x 16 keys.
    const int row_blocks = spec.tile_q / spec.num_warps / 16;
    const int products = row_blocks * (spec.tile_kv / 8) * (spec.head_dim_qk / 16);
    EXPECT_EQ(count(*code, "IMMA.16832.S8.S8"), products);
    // Of codes of P, 32 keys; 8 columns more are row sums. Hopper has no such product: two of f16 stand for one.
    const int key_blocks = spec.tile_kv / (spec.sums_codes ? 32 : 16);
    const int sums = row_blocks * (spec.head_dim_v / 8 + spec.sums_codes) * key_blocks;
    const bool has_qmma = spec.sums_codes && architecture.major != 9;
    EXPECT_EQ(count(*code, "QMMA.16832.F32.E4M3.E4M3"), has_qmma ? sums : 0);
    EXPECT_EQ(count(*code, "HMMA.16816.F32.BF16"), spec.sums_codes ? 0 : sums);
    EXPECT_EQ(count(*code, "F2IP.U8"), spec.sums_codes ? row_blocks * spec.tile_kv / 4 : 0)
        << "codes take two conversions for four";
    const auto loops = loops_with(*code, "IMMA.", products);
    ASSERT_FALSE(loops.empty());
    EXPECT_LT(count(loops[0], "I2F"), 16) << "sums of codes are floats";
    if (spec.sums_codes && !shape.has_softcap) {
      EXPECT_LE(count(loops[0], "MUFU"), 4 * row_blocks) << "of steps alone";
    }
    // A register that a cap and dropout together want.
    const int most_accesses = shape.has_softcap && shape.has_dropout ? 1 : 0;
    EXPECT_LE(count(loops[0], "LDL") + count(loops[0], "STL"), most_accesses);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Sm80QuantizedSpecs,
                         ::testing::Values(Sm80Shape{{8, 0}, {"sm80_full_128", 128}},
                                           Sm80Shape{{8, 0}, {"sm80_causal_64", 64, true}},
                                           // A store and a load before the walk.
                                           Sm80Shape{{8, 6},
                                                     {"sm86_full_128", 128, false, false, 16}},
                                           Sm80Shape{{8, 9}, {"sm89_causal_128", 128, true}},
                                           Sm80Shape{{9, 0}, {"sm90_full_64", 64}},
                                           Sm80Shape{{12, 0}, {"sm120_full_128", 128}},
                                           // Before the walk.
                                           Sm80Shape{{8, 9}, fast("sm89_fast_128", 128, 52)},
                                           Sm80Shape{{9, 0}, fast("sm90_fast_128", 128, 16)},
                                           Sm80Shape{{12, 0}, fast("sm120_fast_128", 128, 40)},
                                           Sm80Shape{{8, 9},
                                                     {.name = "sm89_fast_smooth_128",
                                                      .head_dim = 128,
                                                      .spill_bytes = 16,
                                                      .quant = "fast,smooth_v=sequence"}},
                                           Sm80Shape{{8, 9},
                                                     {.name = "sm89_fast_softcap_dropout_128",
                                                      .head_dim = 128,
                                                      .has_softcap = true,
                                                      .spill_bytes = 8,
                                                      .quant = "fast",
                                                      .has_dropout = true}}),
                         [](const auto& each) { return std::string(each.param.shape.name); });

class RoundedExponentialsSpecs : public ::testing::TestWithParam<Sm80Shape> {};

/// Codes of P that are exponentials, rounded: S of 128 keys lies in registers.
TEST_P(RoundedExponentialsSpecs, SpillNothingInLoops) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const auto& [architecture, shape] = GetParam();
  const ForwardPlan plan =
      choose_forward(problem_of(shape), typical_device(architecture.major, architecture.minor));
  ASSERT_EQ(plan.candidate, Sm80ForwardQuantized::kName);
  const auto& spec = plan.spec.as<TeamSpec>();
  for (const PlannedKernel& kernel : planned_kernels(plan)) {
    const jit::Cubin cubin = compiled(kernel.text, architecture);
    const bool is_main = kernel.role == KernelRole::main;
    EXPECT_LE(cubin.report.spill_bytes, is_main ? shape.spill_bytes : 0) << kernel.text.label;
    if (!is_main) continue;
    const auto code = machine_code(cubin);
    if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
    const int scores = spec.tile_kv / 8 * (spec.head_dim_qk / 16);
    const int sums = spec.head_dim_v / 8 * (spec.tile_kv / 32);
    const bool is_given = spec.rounding == Rounding::given;
    EXPECT_EQ(count(*code, "IMMA.16832.S8.S8"), is_given ? 0 : scores);
    EXPECT_EQ(count(*code, "QMMA.16832.F32.E4M3.E4M3"), is_given ? scores + sums : sums);
    const auto loops = loops_with(*code, "QMMA.", is_given ? scores + sums : sums);
    ASSERT_FALSE(loops.empty());
    EXPECT_EQ(count(loops[0], "LDL") + count(loops[0], "STL"), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, RoundedExponentialsSpecs,
    ::testing::Values(
        // Before the walk, and behind it.
        Sm80Shape{{8, 9},
                  {.name = "sm89_sage2_128", .head_dim = 128, .spill_bytes = 60, .quant = "sage2"}},
        Sm80Shape{{8, 9},
                  {.name = "sm89_sage2_64", .head_dim = 64, .spill_bytes = 60, .quant = "sage2"}},
        Sm80Shape{{8, 9},
                  {.name = "sm89_sage2_smooth_128",
                   .head_dim = 128,
                   .spill_bytes = 60,
                   .quant = "sage2,smooth_v=sequence"}},
        // S of 64 keys.
        Sm80Shape{{8, 9},
                  {.name = "sm89_sage2_block_64",
                   .head_dim = 128,
                   .quant = "sage2,block_q=128,warp_q=32,block_kv=64,v_max=2.25"}},
        Sm80Shape{{8, 9},
                  {.name = "sm89_fp8_static_causal_128",
                   .head_dim = 128,
                   .is_causal = true,
                   .spill_bytes = 60,
                   .quant = "fp8_static"}},
        Sm80Shape{{8, 9},
                  {.name = "sm89_codes_causal_128",
                   .head_dim = 128,
                   .is_causal = true,
                   .spill_bytes = 60,
                   .quant = "fp8_static",
                   .dtype = Dtype::e4m3}},
        Sm80Shape{{12, 0},
                  {.name = "sm120_fp8_static_64",
                   .head_dim = 64,
                   .spill_bytes = 16,
                   .quant = "fp8_static"}}),
    [](const auto& each) { return std::string(each.param.shape.name); });

/// Numbers in the place of codes, for gradients.
TEST(QuantizedNumbers, SpillNothing) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  for (const char* quant : {"fast", "fast,smooth_v=sequence,hadamard=yes"}) {
    const ForwardProblem problem = problem_of({.name = "", .head_dim = 128, .quant = quant});
    for (const jit::Architecture architecture : {jit::Architecture{8, 0}, {9, 0}}) {
      for (const PlannedKernel& kernel : quantize_kv_kernels(quantize_numbers_spec(problem))) {
        const int most = problem.problem.quant.hadamard ? 24 : 0;  // three registers
        EXPECT_LE(compiled(kernel.text, architecture).report.spill_bytes, most)
            << kernel.text.label << " " << architecture.name() << " " << quant;
      }
    }
  }
}

}  // namespace
}  // namespace fovea::cuda
