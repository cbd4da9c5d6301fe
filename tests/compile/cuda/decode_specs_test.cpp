// sm90/decode with what no case of cases/ has: registers suffice, and the machine code has as many products as a slice
// asks for.
#include <gtest/gtest.h>

#include <array>
#include <ostream>
#include <string>

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/sm90_decode.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {
namespace {

struct Feature {
  const char* name;
  std::int64_t head_dim;
  bool is_paged = false, has_dropout = false, wants_row_max = false;
};

void PrintTo(const Feature& feature, std::ostream* out) { *out << feature.name; }

ForwardPlan plan_of(const Feature& feature) {
  Problem problem;
  problem.q = make_spec(Dtype::bf16, std::array<std::int64_t, 4>{2, 2, 8, feature.head_dim});
  problem.k = problem.v =
      make_spec(Dtype::bf16, std::array<std::int64_t, 4>{2, 32768, 8, feature.head_dim});
  problem.dropout.p = feature.has_dropout ? 0.25F : 0.0F;
  problem.wants_row_max = feature.wants_row_max;
  problem.mask = window(1000, 0);
  ForwardProblem f = validate(problem, "test");
  f.is_cached = f.is_paged = feature.is_paged;
  f.cache = {.page_size = 16, .has_aligned_rows = true};
  return choose_forward(f, typical_device(9, 0));
}

class DecodeSpecs : public ::testing::TestWithParam<Feature> {};

TEST_P(DecodeSpecs, SpillsNothingAndMultipliesASlice) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const ForwardPlan plan = plan_of(GetParam());
  ASSERT_EQ(plan.candidate, Sm90Decode::kName);
  const jit::Cubin& cubin = compiled(planned_kernels(plan).front().text, {.major = 9, .minor = 0});
  EXPECT_EQ(cubin.report.spill_bytes, 0);
  EXPECT_EQ(cubin.report.local_bytes, 0);
  const auto code = machine_code(cubin);
  if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  // m16n8k16: of 16 rows, each block of 16 keys with head_dim twice.
  EXPECT_EQ(count(*code, "HMMA.16816.F32.BF16"), plan.spec->tile_kv * plan.spec->head_dim_qk / 64);
  // All panels of keys in a box, and all of values; where the last panel is cut, or pages may be of 8 keys, each has
  // its own. Beside boxes of several slices those of one, by panels.
  const int panels = plan.spec->head_dim_qk / 64;
  const bool by_panels = plan.spec->has_padded_head_dim || plan.spec->is_paged;
  EXPECT_EQ(count(*code, "UTMALDG.5D"),
            2 * (by_panels ? panels : 1) + (plan.spec->is_paged ? 0 : 2 * panels));
}

INSTANTIATE_TEST_SUITE_P(
    All, DecodeSpecs,
    ::testing::Values(
        Feature{.name = "window_64", .head_dim = 64},
        Feature{.name = "padded_112", .head_dim = 112},
        Feature{.name = "dropout_and_row_max",
                .head_dim = 128,
                .has_dropout = true,
                .wants_row_max = true},
        Feature{.name = "paged", .head_dim = 128, .is_paged = true},
        Feature{.name = "paged_dropout", .head_dim = 128, .is_paged = true, .has_dropout = true}),
    [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace fovea::cuda
