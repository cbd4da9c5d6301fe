// sm100/attention_forward: registers suffice on sm_100a and sm_103a, and the machine code has the products, and the
// ways to tensor memory and back, that the schedule asks for.
#include <gtest/gtest.h>

#include <array>
#include <ostream>
#include <string>

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/choices.hpp"
#include "cuda/forward/sm100.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {
namespace {

struct Form {
  const char* name;
  std::int64_t head_dim_qk, head_dim_v;
  int minor;  // of compute capability 10
  float dropout = 0;
  Dtype out_dtype = Dtype::bf16;
  std::int64_t seqlen_q = 4096, num_heads_kv = 16;
  bool is_paged = false;
};

void PrintTo(const Form& form, std::ostream* out) { *out << form.name; }

ForwardPlan plan_of(const Form& form) {
  const auto tensor = [](std::int64_t rows, std::int64_t heads, std::int64_t head_dim) {
    return make_spec(Dtype::bf16, std::array<std::int64_t, 4>{4, rows, heads, head_dim});
  };
  Problem problem;
  problem.q = tensor(form.seqlen_q, 16, form.head_dim_qk);
  problem.k = tensor(4096, form.num_heads_kv, form.head_dim_qk);
  problem.v = tensor(4096, form.num_heads_kv, form.head_dim_v);
  problem.out = tensor(form.seqlen_q, 16, form.head_dim_v);
  problem.out.dtype = form.out_dtype;
  problem.mask = causal();
  problem.dropout.p = form.dropout;
  ForwardProblem f = validate(problem, "test");
  f.is_cached = f.is_paged = form.is_paged;
  f.cache = {.page_size = 16, .has_aligned_rows = true};
  const DeviceTraits device = typical_device(10, form.minor);
  return plan_choice(f, device,
                     {&candidate_named(Sm100Forward::kName), Sm100Forward::choose(f, device)});
}

class BlackwellSpecs : public ::testing::TestWithParam<Form> {};

TEST_P(BlackwellSpecs, SpillNothingAndMultiplyAsPlanned) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const Form& form = GetParam();
  const ForwardPlan plan = plan_of(form);
  const jit::Cubin& cubin =
      compiled(planned_kernels(plan).front().text, {.major = 10, .minor = form.minor});
  EXPECT_EQ(cubin.report.spill_bytes, 0);
  EXPECT_LE(cubin.report.compile_ms, 6000);  // 3 s are the bar; a busy machine takes twice as long
  const auto code = machine_code(cubin);
  if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  // Of each group scores, of a first kv tile and of all others, and sums.
  const auto& spec = plan.spec.as<Sm100ForwardSpec>();
  EXPECT_EQ(count(*code, "UTCHMMA"),
            sm100_groups(spec) * (2 * spec.head_dim_qk / 16 + spec.tile_kv / 16));
  // Scores come in four loads, P goes in eight stores: of a step, and of one that is done again.
  const int steps = form.dropout > 0 ? 1 : 2;
  EXPECT_EQ(count(*code, "STTM.x8"), steps * 8);
  // Of a step, arguments and sums by twos; a pair of powers by polynomial is eight fmas, a product and four limits.
  const int pairs = spec.tile_kv / 2, by_polynomial = spec.tile_kv / 16 * spec.polynomial_keys / 2;
  EXPECT_EQ(count(*code, "FFMA2"), steps * (pairs + 8 * by_polynomial));
  EXPECT_EQ(count(*code, "FADD2"), steps * pairs);
  EXPECT_EQ(count(*code, "FMUL2"), steps * by_polynomial);
  EXPECT_EQ(count(*code, "FMNMX.NAN"), steps * 4 * by_polynomial);
  const int of_ex2 = count(*code, "MUFU.EX2") - steps * 2 * (pairs - by_polynomial);
  EXPECT_GE(of_ex2, 0);
  EXPECT_LE(of_ex2, 8) << "beside a row's powers there are few";
}

INSTANTIATE_TEST_SUITE_P(All, BlackwellSpecs,
                         ::testing::Values(Form{"causal_128", 128, 128, 0},
                                           Form{"causal_96_103", 96, 96, 3},
                                           Form{"dropout_128", 128, 128, 0, 0.1F},
                                           Form{.name = "f32_out_64",
                                                .head_dim_qk = 64,
                                                .head_dim_v = 64,
                                                .minor = 0,
                                                .out_dtype = Dtype::f32},
                                           Form{"causal_192_128", 192, 128, 0},
                                           Form{"causal_256_103", 256, 256, 3},
                                           Form{.name = "few_rows_of_pages_128",
                                                .head_dim_qk = 128,
                                                .head_dim_v = 128,
                                                .minor = 0,
                                                .seqlen_q = 2,
                                                .num_heads_kv = 2,
                                                .is_paged = true}),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace fovea::cuda
