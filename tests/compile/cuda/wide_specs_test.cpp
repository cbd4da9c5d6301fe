// Head dims above 256 on tensor cores: V's columns in parts, for every architecture.
#include <gtest/gtest.h>

#include <array>
#include <ostream>
#include <string>

#include "fovea/attention.hpp"
#include "fovea/mask.hpp"

#include "compile/cuda/compiler.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {
namespace {

struct Wide {
  const char* name;
  std::int64_t head_dim_qk = 576, head_dim_v = 512;
  std::int64_t seqlen_q = 256, num_heads_q = 16;
  bool is_paged = false;
  float dropout = 0;
};

void PrintTo(const Wide& wide, std::ostream* out) { *out << wide.name; }

ForwardPlan plan_of(const Wide& wide, const DeviceTraits& device) {
  const auto spec = [&](std::int64_t seqlen, std::int64_t heads, std::int64_t head_dim) {
    return make_spec(Dtype::bf16, std::array<std::int64_t, 4>{2, seqlen, heads, head_dim});
  };
  Problem problem;
  problem.q = spec(wide.seqlen_q, wide.num_heads_q, wide.head_dim_qk);
  problem.k = spec(4096, 1, wide.head_dim_qk);
  problem.v = spec(4096, 1, wide.head_dim_v);
  problem.wants_lse = true;
  problem.mask = causal();
  problem.dropout.p = wide.dropout;
  ForwardProblem f = validate(problem, "test");
  f.is_cached = f.is_paged = wide.is_paged;
  f.cache = {.page_size = wide.is_paged ? 16 : 0, .has_aligned_rows = true};
  return choose_forward(f, device);
}

class WideSpecs : public ::testing::TestWithParam<Wide> {};

TEST_P(WideSpecs, CompileAndSpillNothing) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  for (const jit::Architecture architecture : of_this_run({{.major = 8, .minor = 0},
                                                           {.major = 8, .minor = 6},
                                                           {.major = 8, .minor = 9},
                                                           {.major = 9, .minor = 0},
                                                           {.major = 10, .minor = 0},
                                                           {.major = 12, .minor = 0}})) {
    const ForwardPlan plan =
        plan_of(GetParam(), typical_device(architecture.major, architecture.minor));
    ASSERT_EQ(plan.candidate, "cuda/sm80/attention_forward_wide");
    const jit::Cubin& cubin = compiled(planned_kernels(plan).front().text, architecture);
    EXPECT_EQ(cubin.report.spill_bytes, 0) << architecture.name();
  }
}

INSTANTIATE_TEST_SUITE_P(All, WideSpecs,
                         ::testing::Values(Wide{.name = "latent"},
                                           Wide{.name = "latent_split", .seqlen_q = 1},
                                           Wide{.name = "latent_paged", .is_paged = true},
                                           Wide{.name = "dropout", .dropout = 0.1F},
                                           Wide{.name = "d512", .head_dim_qk = 512}),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace fovea::cuda
