// What is chosen for tangents on GPUs, what is refused by name, and the launches of a call; a call on a fake device.
#include "cuda/jvp/candidates.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/mask.hpp"

#include "cuda/jvp/attention_jvp.hpp"
#include "cuda/jvp/launch.hpp"
#include "unit/cuda/driver/fake_libcuda.hpp"
#include "unit/cuda/jit/support.hpp"

namespace fovea::cuda {
namespace {

using ::testing::HasSubstr;

constexpr std::string_view kTensorCores = "cuda/sm80/attention_jvp";
constexpr std::string_view kPlain = "cuda/sm80/attention_jvp_f32";

struct Posed {
  Dtype dtype = Dtype::bf16;
  std::int64_t head_dim = 128;
  std::int64_t head_dim_v = 0;  // that of q
  ScoreMod score{};
  MaskMod mask{};
  Dtype tangent_dtype = Dtype::bf16;
  ComputeDtype compute_dtype = ComputeDtype::automatic;
  int sm_margin = 0;
};

JvpProblem problem_of(const Posed& posed) {
  const std::int64_t head_dim_v = posed.head_dim_v > 0 ? posed.head_dim_v : posed.head_dim;
  const auto spec = [](Dtype dtype, std::int64_t rows, std::int64_t heads, std::int64_t head_dim) {
    return make_spec(dtype, std::array<std::int64_t, 4>{2, rows, heads, head_dim});
  };
  JvpProblem problem;
  problem.forward.q = spec(posed.dtype, 300, 8, posed.head_dim);
  problem.forward.k = spec(posed.dtype, 500, 2, posed.head_dim);
  problem.forward.v = spec(posed.dtype, 500, 2, head_dim_v);
  problem.forward.out = problem.out_tangent = spec(posed.dtype, 300, 8, head_dim_v);
  problem.q_tangent = spec(posed.tangent_dtype, 300, 8, posed.head_dim);
  problem.v_tangent = spec(posed.tangent_dtype, 500, 2, head_dim_v);
  problem.forward.score = posed.score;
  problem.forward.mask = posed.mask;
  problem.forward.compute_dtype = posed.compute_dtype;
  problem.forward.sm_margin = posed.sm_margin;
  return problem;
}

JvpPlan plan_of(const Posed& posed) {
  return choose_jvp(validate(problem_of(posed), "test"), typical_device(8, 0));
}

std::string refusal_of(const JvpPlan& plan, std::string_view candidate) {
  for (const auto& refused : plan.refused)
    if (refused.candidate == candidate) return refused.reason;
  return "not refused";
}

TEST(JvpCandidates, OneDtypeOf16BitsIsMultipliedByTensorCores) {
  EXPECT_EQ(plan_of({}).candidate, kTensorCores);
  const JvpPlan f32 = plan_of({.dtype = Dtype::f32});
  EXPECT_EQ(f32.candidate, kPlain);
  EXPECT_EQ(refusal_of(f32, kTensorCores), "inputs are f32; expected f16 or bf16");
  const JvpPlan mixed = plan_of({.tangent_dtype = Dtype::f16});
  EXPECT_EQ(mixed.candidate, kPlain);
  EXPECT_EQ(refusal_of(mixed, kTensorCores),
            "q_tangent is f16 and q is bf16; this kernel multiplies one dtype");
  EXPECT_EQ(plan_of({.compute_dtype = ComputeDtype::f32}).candidate, kPlain);
}

TEST(JvpCandidates, WideHeadsAreMultipliedPlainly) {
  EXPECT_EQ(plan_of({.head_dim = 256}).candidate, kTensorCores);
  const JvpPlan wide = plan_of({.head_dim = 264});
  EXPECT_EQ(wide.candidate, kPlain);
  EXPECT_THAT(refusal_of(wide, kTensorCores), HasSubstr("head_dim_qk is 264"));
}

/// Also of GPUs whose CTAs have least shared memory.
TEST(JvpCandidates, EveryHeadDimHasATileThatFits) {
  for (const auto& [major, minor] : {std::pair{7, 5}, {8, 0}, {8, 6}, {9, 0}, {12, 0}}) {
    const DeviceTraits device = typical_device(major, minor);
    for (const Dtype dtype : {Dtype::f16, Dtype::f32}) {
      for (const std::int64_t head_dim : {1, 64, 128, 192, 256, 512}) {
        const Posed posed{.dtype = dtype, .head_dim = head_dim, .tangent_dtype = dtype};
        const JvpPlan plan = choose_jvp(validate(problem_of(posed), "test"), device);
        const bool has_tensor_cores = dtype == Dtype::f16 && head_dim <= 256;
        EXPECT_EQ(plan.candidate, has_tensor_cores ? kTensorCores : kPlain) << head_dim;
        EXPECT_LE(plan.shared_bytes, static_cast<std::size_t>(device.shared_bytes_per_cta));
      }
    }
  }
}

TEST(JvpCandidates, WhatNoneTakesIsRefusedByEach) {
  const JvpPlan margin = plan_of({.sm_margin = 8});
  EXPECT_EQ(margin.candidate, "");
  EXPECT_THAT(refusal_of(margin, kTensorCores), HasSubstr("sm_margin is 8"));
  EXPECT_THAT(refusal_of(margin, kPlain), HasSubstr("sm_margin is 8"));
  const JvpPlan old = choose_jvp(validate(problem_of({}), "test"), typical_device(7, 0));
  EXPECT_EQ(old.candidate, "");
  EXPECT_THAT(refusal_of(old, kPlain), HasSubstr("compute capability is 7.0"));
}

/// Tangents count as captured data.
TEST(JvpCandidates, MoreCapturesThanKernelsTakeAreRefused) {
  static const float nothing = 0;
  std::string sum = "score";
  fovea::Captures captures;
  for (int i = 0; i < 5; ++i) {
    const std::string name = "t" + std::to_string(i);
    captures.tensors.push_back(
        {name, TensorView(&nothing, make_spec(Dtype::f32, std::array<std::int64_t, 1>{300}))});
    sum += " + " + name + "[q_idx]";
  }
  JvpProblem problem = problem_of({.score = parse_score_mod(sum, captures)});
  EXPECT_EQ(choose_jvp(validate(problem, "test"), typical_device(8, 0)).candidate, kTensorCores);
  for (const CapturedTensor& each : captures.tensors)
    problem.captured_tangents.push_back({each.name, each.view.spec()});
  const JvpPlan plan = choose_jvp(validate(problem, "test"), typical_device(8, 0));
  EXPECT_EQ(plan.candidate, "");
  EXPECT_EQ(refusal_of(plan, kPlain), "the programs capture 10 tensors; kernels take at most 8");
}

TEST(JvpCandidates, OnlyTablesOfTheMaskTakeWorkspace) {
  EXPECT_EQ(plan_of({.mask = causal()}).workspace_bytes, 0U);
  static const std::int32_t nothing = 0;
  const TensorView ids(&nothing, make_spec(Dtype::i32, std::array<std::int64_t, 2>{2, 500}));
  EXPECT_GT(plan_of({.mask = documents(ids, ids)}).workspace_bytes, 0U);
}

// ---- launches ----

struct Call {
  explicit Call(const Posed& posed)
      : problem(validate(problem_of(posed), "test")),
        plan(choose_jvp(problem, typical_device(8, 0))) {
    const auto tensor = [&](const TensorSpec& spec) { return TensorView(memory, spec); };
    const Problem& f = problem.forward.problem;
    args.forward.q = tensor(f.q);
    args.forward.k = tensor(f.k);
    args.forward.v = tensor(f.v);
    args.forward.out = tensor(f.out);
    args.q_tangent = tensor(problem.posed.q_tangent);
    args.v_tangent = tensor(problem.posed.v_tangent);
    args.out_tangent = tensor(problem.posed.out_tangent);
    args.forward.lse = view(lse, {2, 8, 300});
  }

  TangentProblem problem;
  JvpPlan plan;
  alignas(16) std::uint16_t memory[8] = {};
  float lse[2 * 8 * 300] = {};
  AttentionJvp args;
};

std::int64_t elements_ahead(const BshdParam& t, const void* memory) {
  return (static_cast<const char*>(t.data) - static_cast<const char*>(memory)) / 2;
}

TEST(JvpLaunch, EveryTileOfRowsOfEveryHeadHasACta) {
  Call call({});
  const JvpLaunch launch = jvp_launch(call.problem, call.plan, call.args, nullptr);
  EXPECT_EQ(launch.num_launches, 1);
  EXPECT_EQ(launch.num_ctas, 2U * 8 * 5);  // 300 queries, 64 each
  EXPECT_EQ(launch.launches(call.plan).size(), 1U);
  const JvpParams& p = launch.params[0];
  EXPECT_EQ(p.forward.lse, call.lse);
  EXPECT_EQ(p.tangent.lse, nullptr);
  EXPECT_EQ(p.tangent.k.data, nullptr);
}

TEST(JvpLaunch, ColumnsOfWideValuesAreDividedAndLseIsWrittenOnce) {
  Call call({.head_dim = 256, .head_dim_v = 200});
  const JvpLaunch launch = jvp_launch(call.problem, call.plan, call.args, nullptr);
  ASSERT_EQ(launch.num_launches, 2);
  EXPECT_EQ(launch.launches(call.plan).size(), 2U);
  const std::int32_t columns = call.plan.spec.head_dim_v;
  EXPECT_EQ(columns, 128);
  for (const ForwardParams* part : {&launch.params[1].forward, &launch.params[1].tangent}) {
    EXPECT_EQ(elements_ahead(part->v, call.memory), columns);
    EXPECT_EQ(elements_ahead(part->out, call.memory), columns);
    EXPECT_EQ(part->head_dim_v, 200 - columns);
    EXPECT_EQ(part->lse, nullptr);
  }
  for (const ForwardParams* part : {&launch.params[0].forward, &launch.params[0].tangent}) {
    EXPECT_EQ(elements_ahead(part->v, call.memory), 0);
    EXPECT_EQ(part->head_dim_v, columns);
  }
  EXPECT_EQ(launch.params[0].forward.lse, call.lse);
}

TEST(JvpLaunch, ACallLaunchesAndDoesNothingElse) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  driver::FakeState& fake = driver::fresh_fake();
  const driver::Driver driver{kFakeLibcuda};
  const driver::DeviceContext context{driver, 0};
  const jit::TemporaryFolder folder;
  jit::LoaderOptions options;
  options.disk = {.folder = folder / "kernels"};
  options.pack = std::nullopt;
  jit::Loader loader(options);
  Call call({.head_dim = 64, .mask = causal()});
  call.plan.kernels =
      std::make_shared<const KernelSet>(loader, context, planned_kernels(call.plan));
  fake.calls.clear();
  attention_jvp(call.problem, call.plan, call.args, nullptr, nullptr);
  EXPECT_EQ(fake.count("cuLaunchKernelEx"), 1);
  EXPECT_EQ(fake.count("cuMemAlloc_v2") + fake.count("cuMemAllocAsync") +
                fake.count("cuStreamSynchronize") + fake.count("cuModuleLoadDataEx"),
            0);
  EXPECT_EQ(fake.launch.grid_x, 2U * 8 * 5);
  EXPECT_EQ(fake.launch.block_x, 128U);
  EXPECT_EQ(fake.launch.shared_bytes, call.plan.shared_bytes);
}

}  // namespace
}  // namespace fovea::cuda
