// Forward mode on a GPU against the oracle: the cases of the emulator, by the public functions. Without a driver or a
// device everything is skipped.
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "fovea/jvp.hpp"

#include "cuda/jit/loader.hpp"
#include "cuda/jvp/attention_jvp.hpp"
#include "gpu/device_copy.hpp"
#include "kernels/backward/backward_cases.hpp"
#include "kernels/jvp/jvp_cases.hpp"
#include "support/gradient_compare.hpp"

namespace fovea::testing {
namespace {

void run_on_device(const AttentionJvp& args) {
  DeviceCopies copies;
  copies.add(tensors_of_tangents(args));
  attention_jvp(copies.call(args));
  copies.copy_back();
}

class GpuJvp : public Gpu, public ::testing::WithParamInterface<GradientCase> {};

TEST_P(GpuJvp, EqualsTheOracle) {
  const GradientCase& problem = GetParam();
  EXPECT_EQ(jvp_difference(problem, run_on_device, products_of(problem)), "");
}

INSTANTIATE_TEST_SUITE_P(All, GpuJvp, ::testing::ValuesIn(jvp_cases()),
                         [](const auto& each) { return each.param.forward.label; });

std::vector<GradientCase> turing_cases() {
  std::vector<GradientCase> cases = jvp_cases();
  std::erase_if(cases, [](const GradientCase& each) {
    return device_of(each.forward.label).instructions() != cuda::Instructions::sm75;
  });
  return cases;
}

/// By kernels of an older GPU, which this one runs too.
void run_as_turing(const AttentionJvp& args) {
  DeviceCopies copies;
  copies.add(tensors_of_tangents(args));
  const AttentionJvp call = copies.call(args);
  const TangentProblem problem = validate(problem_of(call), "test");
  const cuda::driver::DeviceContext& context = cuda::driver::process_context(Device::cuda());
  cuda::JvpPlan plan = cuda::choose_jvp(problem, cuda::typical_device(7, 5));
  cuda::load(cuda::jit::process_loader(), context, plan);
  DeviceMemory workspace(context, plan.workspace_bytes + 1);
  workspace.fill(0xFF, Stream(nullptr));
  cuda::attention_jvp(problem, plan, call, workspace.data(), nullptr);
  copies.copy_back();
}

class GpuTuringJvp : public Gpu, public ::testing::WithParamInterface<GradientCase> {};

TEST_P(GpuTuringJvp, EqualsTheOracle) {
  EXPECT_EQ(jvp_difference(GetParam(), run_as_turing, products_of(GetParam())), "");
}

INSTANTIATE_TEST_SUITE_P(All, GpuTuringJvp, ::testing::ValuesIn(turing_cases()),
                         [](const auto& each) { return each.param.forward.label; });

/// A second run has the same bits.
TEST_F(Gpu, TangentsRepeatBitForBit) {
  for (const GradientCase& problem : jvp_cases()) {
    const auto bits_of_run = [&problem] {
      GradientMemory memory(problem);
      memory.forward.poison_outputs();
      memory.poison_outputs();
      const AttentionJvp args = memory.jvp_args();
      run_on_device(args);
      std::vector<std::byte> bits;
      for (const TensorBytes& tensor : tensors_of_tangents(args)) {
        if (tensor.is_output) bits.insert(bits.end(), tensor.begin, tensor.begin + tensor.size);
      }
      return bits;
    };
    const std::vector<std::byte> first = bits_of_run();
    EXPECT_EQ(bits_of_run(), first) << problem.forward.label;
  }
}

}  // namespace
}  // namespace fovea::testing
