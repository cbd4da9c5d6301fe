// Gradients on a GPU against the oracle: the cases of the emulator, by the public functions; larger problems against
// themselves; captured graphs are tests/python's. Without a driver or a device everything is skipped.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "fovea/backward.hpp"

#include "cuda/jit/loader.hpp"
#include "gpu/device_copy.hpp"
#include "kernels/backward/backward_cases.hpp"
#include "support/gradient_compare.hpp"

namespace fovea::testing {
namespace {

void run_on_device(const AttentionBackward& args) {
  DeviceCopies copies;
  copies.add(tensors_of_gradients(args));
  const AttentionBackward call = copies.call(args);
  attention_backward(call);
  copies.copy_back();
}

class GpuBackward : public Gpu, public ::testing::WithParamInterface<GradientCase> {};

TEST_P(GpuBackward, EqualsTheOracle) {
  const GradientCase& problem = GetParam();
  BackwardCompareOptions options;
  options.products = problem.forward.dtype == Dtype::f32 ? ComputeDtype::f32 : ComputeDtype::bf16;
  options.run = run_on_device;
  EXPECT_EQ(backward_difference(problem, options), "");
}

INSTANTIATE_TEST_SUITE_P(All, GpuBackward, ::testing::ValuesIn(backward_cases()),
                         [](const auto& each) { return each.param.forward.label; });

std::vector<GradientCase> turing_cases() {
  std::vector<GradientCase> cases = backward_cases();
  std::erase_if(cases, [](const GradientCase& each) {
    return device_of(each.forward.label).instructions() != cuda::Instructions::sm75;
  });
  return cases;
}

/// By kernels of an older GPU, which this one runs too.
void run_as_turing(const AttentionBackward& args) {
  DeviceCopies copies;
  copies.add(tensors_of_gradients(args));
  const AttentionBackward call = copies.call(args);
  const GradientProblem problem = validate(problem_of(call), "test");
  const cuda::driver::DeviceContext& context = cuda::driver::process_context(Device::cuda());
  cuda::BackwardPlan plan = plan_of_owners(problem, cuda::typical_device(7, 5));
  cuda::load(cuda::jit::process_loader(), context, plan);
  DeviceMemory workspace(context, plan.workspace_bytes + 1);
  workspace.fill(0xFF, Stream(nullptr));
  cuda::attention_backward(problem, plan, call, workspace.data(), nullptr);
  copies.copy_back();
}

class GpuTuringBackward : public Gpu, public ::testing::WithParamInterface<GradientCase> {};

TEST_P(GpuTuringBackward, EqualsTheOracle) {
  BackwardCompareOptions options;
  options.products = ComputeDtype::bf16;
  options.run = run_as_turing;
  EXPECT_EQ(backward_difference(GetParam(), options), "");
}

INSTANTIATE_TEST_SUITE_P(All, GpuTuringBackward, ::testing::ValuesIn(turing_cases()),
                         [](const auto& each) { return each.param.forward.label; });

class GpuHopperBackward : public Gpu, public ::testing::WithParamInterface<GradientCase> {};

/// Elsewhere other kernels take them.
TEST_P(GpuHopperBackward, EqualsTheOracle) {
  const GradientCase& problem = GetParam();
  BackwardCompareOptions options;
  options.products = ComputeDtype::bf16;
  options.run = [&](AttentionBackward args) {
    args.forward.is_deterministic = !is_in_any_order(problem);
    run_on_device(args);
  };
  EXPECT_EQ(backward_difference(problem, options), "");
}

INSTANTIATE_TEST_SUITE_P(All, GpuHopperBackward, ::testing::ValuesIn(hopper_backward_cases()),
                         [](const auto& each) { return each.param.forward.label; });

class GpuOneWalk : public Gpu, public ::testing::WithParamInterface<GradientCase> {};

/// On Hopper other kernels take them.
TEST_P(GpuOneWalk, EqualsTheOracle) {
  BackwardCompareOptions options;
  options.products = ComputeDtype::bf16;
  options.run = [](AttentionBackward args) {
    args.forward.is_deterministic = !is_in_any_order(GetParam());
    run_on_device(args);
  };
  EXPECT_EQ(backward_difference(GetParam(), options), "");
}

INSTANTIATE_TEST_SUITE_P(All, GpuOneWalk, ::testing::ValuesIn(one_walk_cases()),
                         [](const auto& each) { return each.param.forward.label; });

class GpuWideBackward : public Gpu, public ::testing::WithParamInterface<GradientCase> {};

/// Elsewhere other kernels take them.
TEST_P(GpuWideBackward, EqualsTheOracle) {
  BackwardCompareOptions options;
  options.products = ComputeDtype::bf16;
  options.run = run_on_device;
  EXPECT_EQ(backward_difference(GetParam(), options), "");
}

INSTANTIATE_TEST_SUITE_P(All, GpuWideBackward, ::testing::ValuesIn(wide_backward_cases()),
                         [](const auto& each) { return each.param.forward.label; });

/// A second run, and the same sequence beside others, have the same bits.
TEST_F(Gpu, GradientsRepeatBitForBit) {
  for (const char* label : {"grouped_f16_d64", "grouped_f16_d128", "grouped_f16_d256",
                            "full_bf16_d64", "full_bf16_d128", "nan_rows_bf16_d128"}) {
    const GradientCase problem = backward_case(label);
    const auto bits_of_run = [&problem] {
      GradientMemory memory(problem);
      memory.poison_outputs();
      memory.forward.out.fill([](std::int64_t i) { return 0.01 * static_cast<double>(i % 17); });
      memory.forward.lse.fill([](std::int64_t) { return 4.0; });
      const AttentionBackward args = memory.args();
      run_on_device(args);
      std::vector<std::byte> bits;
      for (const TensorBytes& tensor : tensors_of_gradients(args)) {
        if (tensor.is_output) bits.insert(bits.end(), tensor.begin, tensor.begin + tensor.size);
      }
      return bits;
    };
    const std::vector<std::byte> first = bits_of_run();
    for (int i = 0; i < 4; ++i) EXPECT_EQ(bits_of_run(), first) << label;
  }
}

}  // namespace
}  // namespace fovea::testing
