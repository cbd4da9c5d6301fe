// sm90/decode with what no case of cases/ has: registers suffice, and the machine code has as many products as a slice
// asks for.
#include <fmt/format.h>
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
  std::int64_t rows = 2, num_sequences = 2;
};

void PrintTo(const Feature& feature, std::ostream* out) { *out << feature.name; }

ForwardPlan plan_of(const Feature& feature) {
  Problem problem;
  const std::int64_t batch = feature.num_sequences, head_dim = feature.head_dim;
  problem.q = make_spec(Dtype::bf16, std::array<std::int64_t, 4>{batch, feature.rows, 8, head_dim});
  problem.k = problem.v =
      make_spec(Dtype::bf16, std::array<std::int64_t, 4>{batch, 32768, 8, head_dim});
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
  EXPECT_EQ(cubin.report.num_wgmma_notes, 0) << "products one at a time";
  const auto code = machine_code(cubin);
  if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  const auto& spec = plan.spec.as<Sm90DecodeSpec>();
  if (multiplies_by_wgmma(spec)) {
    // V is the operand that wgmma reads transposed.
    const int of_keys = spec.head_dim_qk / 16, of_values = spec.tile_kv / 16;
    const auto products = [&code](int columns) {
      return count(*code, fmt::format("HGMMA.64x{}x16.F32.BF16", columns));
    };
    const bool have_one_form = spec.tile_kv == spec.head_dim_v;
    EXPECT_EQ(products(spec.tile_kv), of_keys + (have_one_form ? of_values : 0));
    EXPECT_EQ(products(spec.head_dim_v), of_values + (have_one_form ? of_keys : 0));
    EXPECT_EQ(count(*code, ".tnspB"), of_values);
    EXPECT_EQ(count(*code, "HMMA."), 0);
  } else {
    // m16n8k16: of 16 rows, each block of 16 keys with head_dim twice.
    EXPECT_EQ(count(*code, "HMMA.16816.F32.BF16"), spec.tile_kv * spec.head_dim_qk / 64);
  }
  // The first split of a unit, and those behind it.
  const int loops = spec.takes_groups ? 2 : 1;
  // All panels of keys in a box, and all of values; where the last panel is cut, or pages may be of 8 keys, each has
  // its own. Beside boxes of several slices those of one, by panels.
  const int panels = plan.spec->head_dim_qk / 64;
  const bool by_panels = plan.spec->has_padded_head_dim || plan.spec->is_paged;
  const int of_slices = spec.is_paged || spec.slices_of_box == 1 ? 0 : 2 * panels;
  EXPECT_EQ(count(*code, "UTMALDG.5D"), loops * (2 * (by_panels ? panels : 1) + of_slices));
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
        Feature{.name = "paged_dropout", .head_dim = 128, .is_paged = true, .has_dropout = true},
        Feature{.name = "rows_17", .head_dim = 64, .rows = 17},
        Feature{.name = "rows_64_paged", .head_dim = 128, .is_paged = true, .rows = 64},
        // CTAs take groups of splits.
        Feature{.name = "rows_64_dropout",
                .head_dim = 128,
                .has_dropout = true,
                .wants_row_max = true,
                .rows = 64,
                .num_sequences = 64},
        Feature{.name = "rows_33_paged_groups",
                .head_dim = 128,
                .is_paged = true,
                .rows = 33,
                .num_sequences = 64}),
    [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace fovea::cuda
