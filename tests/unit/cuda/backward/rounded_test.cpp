// Gradients by a recipe: what is chosen, what is refused by name, and what a call launches.
#include "cuda/backward/rounded.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/backward/attention_backward.hpp"
#include "cuda/backward/sm90.hpp"
#include "cuda/forward/kernels.hpp"
#include "unit/cuda/driver/fake_libcuda.hpp"
#include "unit/cuda/jit/support.hpp"

namespace fovea::cuda {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Posed {
  const char* quant = "accurate";
  Dtype dtype = Dtype::bf16;
  std::int64_t head_dim = 128, head_dim_v = 128;
};

GradientProblem problem_of(const Posed& posed) {
  const auto spec = [&](std::int64_t rows, std::int64_t heads, std::int64_t head_dim) {
    return make_spec(posed.dtype, std::array<std::int64_t, 4>{2, rows, heads, head_dim});
  };
  BackwardProblem problem;
  Problem& f = problem.forward;
  problem.dq = f.q = spec(300, 8, posed.head_dim);
  problem.dk = f.k = spec(500, 2, posed.head_dim);
  problem.dv = f.v = spec(500, 2, posed.head_dim_v);
  problem.dout = f.out = spec(300, 8, posed.head_dim_v);
  f.quant = parse_quantization(posed.quant);
  return validate(problem, "test");
}

std::vector<KernelRole> roles_of(const PlannedKernels& kernels) {
  std::vector<KernelRole> roles;
  for (const PlannedKernel& kernel : kernels) roles.push_back(kernel.role);
  return roles;
}

TEST(RoundedBackward, TakesTheKernelsOfTheProblemWithoutARecipe) {
  const BackwardPlan plan = choose_backward(problem_of({}), typical_device(9, 0));
  EXPECT_EQ(plan.candidate, Sm90Backward::kName);
  EXPECT_THAT(roles_of(planned_kernels(plan)),
              ElementsAre(KernelRole::delta, KernelRole::main, KernelRole::prepare,
                          KernelRole::key_mean, KernelRole::quantize));
  EXPECT_EQ(plan.rounded->forward.candidate, "cuda/sm90/attention_forward");
  EXPECT_THAT(roles_of(planned_forward_kernels(plan)), ::testing::Contains(KernelRole::main));
  const BackwardPlan on_ampere =
      choose_backward(problem_of({.quant = "fast", .head_dim = 40}), typical_device(8, 0));
  EXPECT_EQ(on_ampere.rounded->forward.candidate, "cuda/sm80/attention_forward");
  EXPECT_EQ(on_ampere.rounded->spec.head_dim_qk, 64);
  EXPECT_EQ(on_ampere.rounded->spec.head_dim_v, 128);
}

TEST(RoundedBackward, NumbersAreTurnedBackAndHaveTheirMeans) {
  const auto spec = [](const char* quant) {
    return choose_backward(problem_of({.quant = quant}), typical_device(9, 0)).rounded->spec;
  };
  EXPECT_TRUE(spec("accurate,hadamard=yes").rotates);
  EXPECT_TRUE(spec("fast,smooth_v=sequence").smooths_v);
  EXPECT_FALSE(spec("fast").rotates || spec("fast").smooths_v);
}

TEST(RoundedBackward, WhatIsNotRoundedIsRefusedByName) {
  const auto refusal = [](const Posed& posed) {
    const BackwardPlan plan = choose_backward(problem_of(posed), typical_device(9, 0));
    EXPECT_EQ(plan.candidate, "");
    EXPECT_EQ(plan.refused.at(0).candidate, kRoundingName);
    return plan.refused.at(0).reason;
  };
  EXPECT_THAT(refusal({.quant = "int8"}), HasSubstr("quant.pv is int8"));
  EXPECT_THAT(refusal({.dtype = Dtype::f32}), HasSubstr("inputs are f32"));
  EXPECT_THAT(refusal({.head_dim = 192}), HasSubstr("rows of 192 are rounded"));
  EXPECT_THAT(refusal({.quant = "fast", .head_dim_v = 256}), HasSubstr("rows of 256"));
  // Values that stay as they are may be wider.
  EXPECT_NE(choose_backward(problem_of({.head_dim_v = 256}), typical_device(9, 0)).rounded,
            nullptr);
}

/// A call whose tensors nobody reads, all at `memory`.
AttentionBackward call_of(const GradientProblem& problem, std::uint16_t* memory) {
  const auto tensor = [&](const TensorSpec& spec) { return TensorView(memory, spec); };
  const Problem& f = problem.forward.problem;
  AttentionBackward args;
  args.forward.q = tensor(f.q);
  args.forward.k = tensor(f.k);
  args.forward.v = tensor(f.v);
  args.forward.out = tensor(f.out);
  args.forward.lse = tensor(make_spec(Dtype::f32, std::array<std::int64_t, 3>{2, 8, 300}));
  args.forward.quant = f.quant;
  args.dout = tensor(problem.dout);
  args.dq = tensor(problem.dq);
  args.dk = tensor(problem.dk);
  args.dv = tensor(problem.dv);
  return args;
}

/// From its first to behind its last element; heads lie before rows.
struct Bytes {
  std::size_t begin, end;
};
Bytes bytes_of(const TensorView& view, const void* workspace) {
  std::int64_t last = 0;
  for (int dim = 0; dim < view.rank(); ++dim) last += (view.size(dim) - 1) * view.stride(dim);
  const auto begin = static_cast<std::size_t>(static_cast<const std::byte*>(view.data()) -
                                              static_cast<const std::byte*>(workspace));
  return {begin, begin + static_cast<std::size_t>(last + 1) * size_bytes(view.dtype())};
}

TEST(RoundedBackward, TensorsLieBesideEachOtherBehindWhatStepsTake) {
  for (const Posed& posed : {Posed{}, Posed{.quant = "fast"}, Posed{.head_dim = 33}}) {
    const GradientProblem problem = problem_of(posed);
    const BackwardPlan plan = choose_backward(problem, typical_device(9, 0));
    const RoundedGradients& rounded = *plan.rounded;
    const BackwardPlan plain = choose_backward(rounded.problem, typical_device(9, 0));
    EXPECT_GE(rounded.numbers_at, std::max(plain.workspace_bytes, rounded.forward.workspace_bytes));
    std::vector<std::uint16_t> memory(plan.workspace_bytes / 2);
    const AttentionForward call =
        rounded_call(problem, plan, call_of(problem, memory.data()), memory.data()).args.forward;
    EXPECT_TRUE(call.quant.is_none());
    std::vector<Bytes> tensors;
    const bool rounds_v = posed.quant == std::string("fast");
    for (const TensorView& view :
         {TensorView(call.q), TensorView(call.k), TensorView(call.out), TensorView(call.lse)})
      tensors.push_back(bytes_of(view, memory.data()));
    if (rounds_v) tensors.push_back(bytes_of(call.v, memory.data()));
    EXPECT_EQ(call.v.data() == memory.data(), !rounds_v);  // as given
    std::ranges::sort(tensors, {}, &Bytes::begin);
    std::size_t end = rounded.numbers_at;
    for (const Bytes& tensor : tensors) {
      EXPECT_GE(tensor.begin, end);
      EXPECT_EQ(tensor.begin % 256, 0U);
      end = tensor.end;
    }
    EXPECT_LE(end, plan.workspace_bytes);
  }
}

/// Rounding, forward, gradients; by kernels that have been loaded before.
TEST(RoundedBackward, ACallLaunchesAndDoesNothingElse) {
  driver::FakeState& fake = driver::fresh_fake();
  const driver::Driver driver{kFakeLibcuda};
  const driver::DeviceContext context{driver, 0};
  const jit::TemporaryFolder folder;
  jit::LoaderOptions options;
  options.disk = {.folder = folder / "kernels"};
  options.pack = std::nullopt;
  options.nvrtc.named = kFakeLibnvrtc;
  jit::Loader loader(options);
  const GradientProblem problem = problem_of({.quant = "fast"});
  BackwardPlan plan = choose_backward(problem, traits_of(context.info()));
  load(loader, context, plan);
  const std::size_t of_forward = planned_kernels(plan.rounded->forward).size();
  EXPECT_EQ(loader.counts().compiled, static_cast<int>(planned_kernels(plan).size() + of_forward));
  std::vector<std::uint16_t> memory(plan.workspace_bytes / 2 + 128);
  fake.calls.clear();
  fake.are_dependent.clear();
  attention_backward(problem, plan, call_of(problem, memory.data()), memory.data(), nullptr);
  // The mean of keys, then codes, which start while it ends; delta, prepare and main behind forward's.
  EXPECT_EQ(fake.count("cuLaunchKernelEx"), static_cast<int>(2 + of_forward + 3));
  ASSERT_GE(fake.are_dependent.size(), 2U);
  EXPECT_FALSE(fake.are_dependent[0]);
  EXPECT_TRUE(fake.are_dependent[1]);
  EXPECT_EQ(fake.count("cuMemAlloc_v2") + fake.count("cuMemAllocAsync") +
                fake.count("cuStreamSynchronize") + fake.count("cuModuleLoadDataEx"),
            0);
}

}  // namespace
}  // namespace fovea::cuda
