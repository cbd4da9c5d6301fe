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
  std::int64_t head_dim;
  int minor;  // of compute capability 10
  float dropout = 0;
};

void PrintTo(const Form& form, std::ostream* out) { *out << form.name; }

ForwardPlan plan_of(const Form& form) {
  Problem problem;
  problem.q = problem.k = problem.v =
      make_spec(Dtype::bf16, std::array<std::int64_t, 4>{4, 4096, 16, form.head_dim});
  problem.mask = causal();
  problem.dropout.p = form.dropout;
  const ForwardProblem f = validate(problem, "test");
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
  EXPECT_LE(cubin.report.compile_ms, 6000);  // on a busy machine; alone a third of it
  const auto code = machine_code(cubin);
  if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  // Scores of two groups, of a first kv tile and of all others; sums of two groups.
  const int scores = plan.spec->head_dim_qk / 16;
  EXPECT_EQ(count(*code, "UTCHMMA"), 2 * (2 * scores + plan.spec->tile_kv / 16));
  // Scores come in four loads, P goes in four stores: of a step, and of one that is done again.
  EXPECT_EQ(count(*code, "STTM.x16"), form.dropout > 0 ? 4 : 8);
}

INSTANTIATE_TEST_SUITE_P(All, BlackwellSpecs,
                         ::testing::Values(Form{"causal_128", 128, 0}, Form{"causal_96_103", 96, 3},
                                           Form{"dropout_128", 128, 0, 0.1F}),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace fovea::cuda
