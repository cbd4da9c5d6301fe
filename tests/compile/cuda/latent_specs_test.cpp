// sm90/decode_latent: registers suffice, and the machine code has the products of one tile, once.
#include <gtest/gtest.h>

#include <array>
#include <ostream>
#include <string>

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/sm90_decode_latent.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {
namespace {

struct Feature {
  const char* name;
  std::int64_t num_heads = 128;
  Dtype dtype = Dtype::bf16;
  bool is_paged = true, is_masked = false, wants_row_max = false;
};

void PrintTo(const Feature& feature, std::ostream* out) { *out << feature.name; }

ForwardPlan plan_of(const Feature& feature) {
  Problem problem;
  problem.q = make_spec(feature.dtype, std::array<std::int64_t, 4>{2, 2, feature.num_heads, 576});
  problem.k = make_spec(feature.dtype, std::array<std::int64_t, 4>{2, 32768, 1, 576});
  problem.v = make_spec(feature.dtype, std::array<std::int64_t, 4>{2, 32768, 1, 512});
  problem.wants_row_max = feature.wants_row_max;
  if (feature.is_masked) {
    problem.mask = window(1000, 0);
    problem.score = softcap(20);
  }
  ForwardProblem f = validate(problem, "test");
  f.is_cached = true;
  f.is_paged = feature.is_paged;
  f.cache = {.page_size = 64, .has_aligned_rows = true, .has_latent_values = true};
  return choose_forward(f, typical_device(9, 0));
}

class LatentSpecs : public ::testing::TestWithParam<Feature> {};

TEST_P(LatentSpecs, SpillsNothingAndMultipliesATile) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const ForwardPlan plan = plan_of(GetParam());
  ASSERT_EQ(plan.candidate, Sm90DecodeLatent::kName);
  const jit::Cubin& cubin = compiled(planned_kernels(plan).front().text, {.major = 9, .minor = 0});
  EXPECT_EQ(cubin.report.spill_bytes, 0);
  EXPECT_EQ(cubin.report.local_bytes, 0);
  EXPECT_EQ(cubin.report.num_wgmma_notes, 0) << cubin.report.log;
  const auto code = machine_code(cubin);
  if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  EXPECT_EQ(count(*code, "HGMMA.64x64x16.F32"), plan.spec->head_dim_qk / 16);
  EXPECT_EQ(count(*code, "HGMMA.64x256x16.F32"), plan.spec->tile_kv / 16);
}

INSTANTIATE_TEST_SUITE_P(
    All, LatentSpecs,
    ::testing::Values(Feature{.name = "paged_128_heads"},
                      Feature{.name = "contiguous_16_heads", .num_heads = 16, .is_paged = false},
                      Feature{.name = "f16_row_max", .dtype = Dtype::f16, .wants_row_max = true},
                      Feature{.name = "window_and_softcap", .is_masked = true}),
    [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace fovea::cuda
