// Forward mode on a GPU against the oracle: the cases of the emulator, by the public functions. Without a driver or a
// device everything is skipped.
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "fovea/jvp.hpp"

#include "gpu/device_copy.hpp"
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
