// A recipe at the doors: where it is refused, what it wants, how it is explained.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/backward.hpp"
#include "fovea/jvp.hpp"
#include "fovea/probabilities.hpp"

#include "support/case.hpp"
#include "support/compare.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

template <typename Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "(not refused)";
}

Case case_of(const char* recipe) {
  Case problem;
  problem.batch = 2;
  problem.seqlen_q = 9;
  problem.seqlen_kv = 40;
  problem.num_heads_q = 4;
  problem.num_heads_kv = 2;
  problem.quant = parse_quantization(recipe);
  return problem;
}

TEST(QuantizationAtTheDoors, IsRefusedByNameWhereNothingRunsIt) {
  CaseMemory memory(case_of("accurate"));
  const AttentionForward forward = memory.args();
  const AttentionDoubleBackward twice{
      .backward = {.dout = forward.out, .forward = forward, .dq = forward.q}};
  const std::pair<const char*, std::function<void()>> calls[] = {
      {"attention_jvp", [&] { attention_jvp({.forward = forward, .out_tangent = forward.out}); }},
      {"attention_double_backward", [&] { attention_double_backward(twice); }},
      {"explain", [&] { static_cast<void>(explain_double_backward(twice)); }},
      {"attention_probabilities", [&] { attention_probabilities({.forward = forward}); }},
  };
  for (const auto& [where, call] : calls) {
    const std::string message = refusal(call);
    EXPECT_THAT(message, StartsWith(std::string(where) + ": quant is accurate; expected none: "));
    EXPECT_THAT(message, HasSubstr("have no quantised path yet"));
  }
  EXPECT_EQ(memory.damage(), "");
}

TEST(QuantizationAtTheDoors, ExplainsItsGradients) {
  CaseMemory memory(case_of("accurate"));
  const AttentionForward forward = memory.args();
  const AttentionBackward backward{.dout = forward.out, .forward = forward, .dq = forward.q};
  const Explanation rounded = explain(problem_of(backward));
  EXPECT_EQ(rounded.kernel, "cpu/attention_quantized_backward");
  AttentionBackward exact = backward;
  exact.forward.quant = {};
  EXPECT_GT(rounded.flops, explain(problem_of(exact)).flops);
}

TEST(QuantizationAtTheDoors, IsRefusedByPlansMadeWithoutIt) {
  CaseMemory memory(case_of("none"));
  const AttentionForward args = memory.args();
  const Plan plain = plan(problem_of(args));
  AttentionForward quantised = args;
  quantised.quant = parse_quantization("fast");
  std::vector<std::byte> workspace(plain.workspace_bytes());
  quantised.workspace = workspace;
  EXPECT_EQ(refusal([&] { plain.run(quantised); }),
            "attention_forward: quant is fast; the plan was made with none, expected that or none");
  const Plan accurate = [&] {
    AttentionForward other = args;
    other.quant = parse_quantization("accurate");
    return plan(problem_of(other));
  }();
  EXPECT_THAT(refusal([&] { accurate.run(quantised); }),
              HasSubstr("quant is fast; the plan was made with accurate"));
}

TEST(QuantizationAtTheDoors, IsCheckedBeforeAnythingRuns) {
  CaseMemory memory(case_of("accurate"));
  AttentionForward args = memory.args();
  args.quant.smooth_v = Smoothing::sequence;
  EXPECT_THAT(refusal([&] { attention_forward(args); }),
              StartsWith("attention_forward: quant.smooth_v is set and quant.pv is none"));
  args.quant = parse_quantization("accurate,hadamard=yes");
  Case odd = case_of("accurate,hadamard=yes");
  odd.head_dim_qk = 7;
  CaseMemory odd_memory(odd);
  EXPECT_THAT(refusal([&] { attention_forward(odd_memory.args()); }),
              StartsWith("attention_forward: quant.hadamard is yes and head_dim_qk is 7"));
}

TEST(QuantizationAtTheDoors, WantsGivenScalesAndNoOthers) {
  CaseMemory memory(case_of("fp8_static"));
  const AttentionForward good = memory.args();
  EXPECT_EQ(refusal([&] { attention_forward(good); }), "(not refused)");
  AttentionForward args = good;
  args.k_scale = {};
  EXPECT_EQ(refusal([&] { attention_forward(args); }),
            "attention_forward: k_scale is missing and quant is fp8_static; expected f32 [2, 2]: "
            "its scales "
            "are given");
  std::vector<float> scales{1, 1, 1, 1};
  args.k_scale = view(scales.data(), {4});
  EXPECT_THAT(refusal([&] { attention_forward(args); }),
              HasSubstr("k_scale is f32 [4]; expected f32 [2, 2]"));
  args.k_scale = view(scales.data(), {2, 2});
  for (const float wrong : {0.0F, -1.0F, std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::infinity()}) {
    scales[2] = wrong;
    EXPECT_THAT(refusal([&] { attention_forward(args); }), HasSubstr("k_scale[1, 0] is "));
  }
  args = good;
  args.quant = parse_quantization("fast");
  EXPECT_EQ(
      refusal([&] { attention_forward(args); }),
      "attention_forward: q_scale is given and quant is fast; expected none: only recipes with "
      "scales=given read it");
  args = good;
  args.quant = {};
  EXPECT_THAT(refusal([&] { attention_forward(args); }),
              HasSubstr("q_scale is given and quant is none"));
  args = good;
  memory.out.fill([](std::int64_t) { return 1.0; });
  args.v_scale = view(static_cast<float*>(args.out.mutable_data()), {2, 2});
  EXPECT_THAT(refusal([&] { attention_forward(args); }), HasSubstr("overlaps"));
}

/// q, k and v of e4m3 are a recipe's codes: without it, beside others and for gradients they are refused by name.
TEST(QuantizationAtTheDoors, TakesCodesByGivenScalesAlone) {
  Case problem = case_of("fp8_static");
  problem.dtype = Dtype::e4m3;
  CaseMemory memory(problem);
  const AttentionForward good = memory.args();
  EXPECT_EQ(good.out.dtype(), Dtype::bf16);
  EXPECT_EQ(refusal([&] { attention_forward(good); }), "(not refused)");
  AttentionForward args = good;
  args.v_scale = {};
  EXPECT_THAT(refusal([&] { attention_forward(args); }), HasSubstr("v_scale is missing"));
  for (const char* other :
       {"none", "fast", "fp8_static,pv=none", "fp8_static,qk=int8", "fp8_static,smooth_k=sequence",
        "fp8_static,hadamard=yes", "fp8_static,smooth_v=sequence", "accuracy=0.1"}) {
    args = good;
    args.quant = parse_quantization(other);
    EXPECT_THAT(refusal([&] { attention_forward(args); }),
                HasSubstr("q, k and v are e4m3 and quant is "))
        << other;
  }
  args = good;
  CaseMemory numbers(case_of("fp8_static"));
  args.k = numbers.args().k;
  EXPECT_THAT(refusal([&] { attention_forward(args); }),
              HasSubstr("k is f32 but q is e4m3; expected equal dtypes"));
  AttentionBackward backward{.dout = good.out, .forward = good, .dq = good.out};
  EXPECT_THAT(refusal([&] { static_cast<void>(explain(problem_of(backward))); }),
              HasSubstr("q is e4m3; expected f32, f16 or bf16: codes have no gradients"));
  const AttentionDoubleBackward twice{.backward = backward};
  const std::pair<const char*, std::function<void()>> others[] = {
      {"tangents", [&] { attention_jvp({.forward = args, .out_tangent = args.out}); }},
      {"gradients of gradients", [&] { attention_double_backward(twice); }},
      {"probabilities", [&] { attention_probabilities({.forward = args}); }},
  };
  for (const char* recipe : {"none", "fp8_static"}) {
    args = good;
    args.quant = parse_quantization(recipe);
    for (const auto& [what, call] : others)
      EXPECT_THAT(refusal(call), HasSubstr(std::string("codes have no ") + what)) << recipe;
  }
  Problem planned = problem_of(good);
  planned.out = {};
  EXPECT_THAT(explain(planned).problem, AllOf(HasSubstr("e4m3 batch 2"), HasSubstr("out bf16")));
}

TEST(QuantizationAtTheDoors, RefusesTargetsAndProductsOfBf16) {
  CaseMemory memory(case_of("accurate"));
  AttentionForward args = memory.args(CpuTarget::amx_bf16);
  EXPECT_THAT(refusal([&] { attention_forward(args); }),
              HasSubstr("cpu/attention_quantized amx_bf16  inputs are f32, which bf16 products "
                        "would round"));
  args.quant = parse_quantization("fp8_static,scales=measured");
  args.cpu_target = CpuTarget::avx512_vnni;
  EXPECT_THAT(refusal([&] { attention_forward(args); }),
              HasSubstr("cpu/attention_quantized avx512_vnni  the recipe has no products of int8"));
  args.cpu_target = CpuTarget::automatic;
  args.quant = parse_quantization("sage1");
  args.compute_dtype = ComputeDtype::bf16;
  EXPECT_THAT(refusal([&] { attention_forward(args); }),
              HasSubstr("cpu/attention_quantized scalar  compute_dtype is bf16"));
}

/// Targets of codes of eight bits are for recipes.
TEST(QuantizationAtTheDoors, RefusesTargetsOfCodesWithoutARecipe) {
  CaseMemory memory(case_of("none"));
  EXPECT_THAT(refusal([&] { attention_forward(memory.args(CpuTarget::avx512_vnni)); }),
              HasSubstr("target avx512_vnni was asked for"));
}

TEST(QuantizationAtTheDoors, IsExplained) {
  CaseMemory memory(case_of("accurate,hadamard=yes"));
  const Explanation explanation = explain(problem_of(memory.args()));
  EXPECT_EQ(explanation.kernel, "cpu/attention_quantized");
  EXPECT_EQ(explanation.tile_kv, 128);
  EXPECT_THAT(explanation.problem, HasSubstr(", quant accurate,hadamard=yes"));
  EXPECT_GT(explanation.workspace_bytes, 0);
}

TEST(QuantizationAtTheDoors, ExplainsWhatEachTargetMultiplies) {
  const auto products = [](const char* recipe, CpuTarget target) {
    CaseMemory memory(case_of(recipe));
    const Explanation explanation = explain(problem_of(memory.args(target)));
    return explanation.kernel.empty() ? "(not here)" : explanation.compute_dtype;
  };
  for (const CpuTarget target : targets_for(case_of("int8"))) {
    const bool has_codes = target == CpuTarget::avx512_vnni || target == CpuTarget::avx_vnni ||
                           target == CpuTarget::avx512_bf16 || target == CpuTarget::amx_bf16;
    EXPECT_EQ(products("int8", target), has_codes ? "int8" : "f32") << name(target);
    EXPECT_EQ(products("fast", target),
              target == CpuTarget::avx512_bf16 || target == CpuTarget::amx_bf16 ? "int8 and bf16"
              : has_codes                                                       ? "int8 and f32"
                                                                                : "f32")
        << name(target);
  }
}

/// One plan for all lengths up to a bound: the same bits as the plan of each length.
TEST(QuantizationAtTheDoors, RunsPlansOfBoundedLengths) {
  CaseMemory memory(case_of("int8"));
  AttentionForward args = memory.args();
  attention_forward(args);
  const auto out = bits_of(args.out);
  Problem problem = problem_of(args);
  problem.seqlen_q = up_to(64);
  problem.seqlen_kv = up_to(300);
  const Plan bounded = plan(problem);
  std::vector<std::byte> workspace(bounded.workspace_bytes());
  args.workspace = workspace;
  memory.poison_outputs();
  bounded.run(args);
  EXPECT_EQ(bits_of(args.out), out);
}

}  // namespace
}  // namespace fovea::testing
