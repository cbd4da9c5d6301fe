// sm90/decode for more rows and wider heads: what no case of cases/ chooses, so that no pack compiles it. Registers suffice, and the
// machine code has as many products as a slice asks for.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <tuple>

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"
#include "cuda/attention_forward.hpp"
#include "cuda/choices.hpp"
#include "cuda/decode_sm90.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {
namespace {

int count(const std::string& text, const std::string& word) {
  int times = 0;
  for (std::size_t at = 0; (at = text.find(word, at)) != std::string::npos; ++at) ++times;
  return times;
}

ForwardPlan plan_of(std::int64_t rows, std::int64_t head_dim, bool is_paged) {
  Problem problem;
  problem.q = make_spec(Dtype::bf16, std::array<std::int64_t, 4>{2, rows, 8, head_dim});
  problem.k = problem.v =
      make_spec(Dtype::bf16, std::array<std::int64_t, 4>{2, 32768, 8, head_dim});
  problem.dropout.p = is_paged ? 0 : 0.25F;  // of all features the one that takes most registers
  ForwardProblem f = validate(problem, "test");
  f.is_cached = f.is_paged = is_paged;
  const Candidate& wide = candidate_named(kSm90DecodeWide);
  const DeviceTraits device = typical_device(9, 0);
  return plan_choice(f, device, {&wide, wide.choose(f, device)});
}

using RowsAndDim = std::tuple<std::int64_t, std::int64_t, bool>;
class WideDecode : public ::testing::TestWithParam<RowsAndDim> {};

TEST_P(WideDecode, SpillsNothingAndMultipliesASlice) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const auto& [rows, head_dim, is_paged] = GetParam();
  const ForwardPlan plan = plan_of(rows, head_dim, is_paged);
  const jit::Cubin cubin = compiler().compile(kernel_texts(plan).front(), {.major = 9, .minor = 0});
  EXPECT_EQ(cubin.report.spill_bytes, 0);
  EXPECT_EQ(cubin.report.local_bytes, 0);
  const auto nvdisasm = find_nvdisasm();
  if (!nvdisasm) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  const auto functions = disassemble(*nvdisasm, cubin.image);
  ASSERT_TRUE(functions.contains("fovea_kernel"));
  const std::int64_t keys = plan.spec.tile_kv / sm90_decode_teams(plan.spec);
  // m16n8k16: of 16 rows, each block of 16 keys with head_dim twice.
  EXPECT_EQ(count(functions.at("fovea_kernel"), "HMMA.16816.F32.BF16"), keys * head_dim / 64);
}

INSTANTIATE_TEST_SUITE_P(All, WideDecode,
                         ::testing::Values(RowsAndDim{32, 128, false}, RowsAndDim{64, 128, false},
                                           RowsAndDim{64, 128, true}, RowsAndDim{16, 256, true},
                                           RowsAndDim{32, 256, false}, RowsAndDim{64, 256, true},
                                           RowsAndDim{64, 192, false}),
                         [](const auto& each) {
                           return std::to_string(std::get<0>(each.param)) + "_rows_head_dim_" +
                                  std::to_string(std::get<1>(each.param)) +
                                  (std::get<2>(each.param) ? "_paged" : "_dropout");
                         });

}  // namespace
}  // namespace fovea::cuda
