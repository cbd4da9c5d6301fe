// What AMD's GPUs would run, instruction by instruction: the code objects of whole calls, executed by an emulator of
// the ISA that is not ours (scripts/run_amd), against the oracle. FOVEA_TEST_TINYGRAD names the checkout that has it.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "compile/amd_compiler.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/launch.hpp"
#include "kernels/forward_cases.hpp"
#include "problem/forward.hpp"
#include "support/features.hpp"
#include "support/kernel_compare.hpp"
#include "support/launch_memory.hpp"

namespace fovea::testing {
namespace {

const char* tinygrad() { return std::getenv("FOVEA_TEST_TINYGRAD"); }

std::size_t params_bytes(cuda::KernelRole role) {
  switch (role) {
    case cuda::KernelRole::range_tables:
      return sizeof(cuda::RangeTableParams);
    case cuda::KernelRole::deep_combine:
    case cuda::KernelRole::wide_combine:
      return sizeof(cuda::CombineParams);
    case cuda::KernelRole::clear_rows:
      return sizeof(cuda::ClearRowsParams);
    default:
      return sizeof(cuda::ForwardParams);
  }
}

/// The kernels of a plan, and the memory that its calls may touch.
class Machine {
 public:
  Machine(const cuda::ForwardPlan& plan, std::vector<TensorBytes> memory)
      : target_(fmt::format("gfx{:x}", plan.device.gfx)), memory_(std::move(memory)) {
    for (const cuda::PlannedKernel& kernel : planned_kernels(plan))
      kernels_[kernel.role] = cuda::compile_for_amd(kernel.text.unit, target_);
  }

  bool has_compiler() const { return kernels_.begin()->second.has_compiler; }

  void run(const cuda::KernelLaunch& launch) const {
    const cuda::CompiledForAmd& kernel = kernels_.at(launch.role);
    ASSERT_EQ(kernel.words, "");
    const cuda::jit::TemporaryFolder folder;
    cuda::jit::write_text(folder / "object", kernel.image);
    cuda::jit::write_text(folder / "params",
                          {static_cast<const char*>(launch.params), params_bytes(launch.role)});
    cuda::jit::write_text(folder / "call.json", description_of(launch));
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      cuda::jit::write_text(folder / buffer(i),
                            {reinterpret_cast<const char*>(memory_[i].begin), memory_[i].size});
    }
    const std::string words = folder / "words";
    const std::string command =
        fmt::format("{} {} {} >{} 2>&1", FOVEA_RUN_AMD, tinygrad(), folder.path().string(), words);
    ASSERT_EQ(std::system(command.c_str()), 0) << cuda::jit::read_text(words);
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      const std::string bytes = cuda::jit::read_text(folder / buffer(i));
      ASSERT_EQ(bytes.size(), memory_[i].size);
      std::memcpy(memory_[i].begin, bytes.data(), bytes.size());
    }
  }

 private:
  static std::string buffer(std::size_t i) { return fmt::format("buffer.{}", i); }

  std::string description_of(const cuda::KernelLaunch& launch) const {
    std::vector<std::uintptr_t> addresses;
    for (const TensorBytes& tensor : memory_)
      addresses.push_back(reinterpret_cast<std::uintptr_t>(tensor.begin));
    return fmt::format(
        "{{\"gfx\": \"{}\", \"grid\": [{}, {}, {}], \"threads\": {}, \"shared_bytes\": {}, "
        "\"buffers\": [{}]}}\n",
        target_, launch.grid.x, launch.grid.y, launch.grid.z, launch.num_threads,
        launch.shared_bytes, fmt::join(addresses, ", "));
  }

  std::string target_;
  std::vector<TensorBytes> memory_;
  std::map<cuda::KernelRole, cuda::CompiledForAmd> kernels_;
};

void run_call(const AttentionForward& args, const cuda::DeviceTraits& device,
              const std::string& candidate) {
  const ForwardProblem problem = validate(problem_of(args), "test");
  const cuda::ForwardPlan plan = choose_forward(problem, device);
  ASSERT_EQ(plan.candidate, candidate);
  std::vector<std::byte> workspace(plan.workspace_bytes, std::byte{0xff});
  std::vector<TensorBytes> memory = tensors_of_call(args);
  memory.push_back({"workspace", workspace.data(), workspace.size()});
  const Machine machine(plan, std::move(memory));
  ASSERT_TRUE(machine.has_compiler()) << "needs ziglang: scripts/dev setup";
  const cuda::ForwardLaunch call =
      cuda::forward_launch(problem, plan, args, workspace.data(), nullptr);
  for (const cuda::KernelLaunch& launch : call.launches(plan))
    if (launch.grid.x > 0) machine.run(launch);
}

void expect_equals_oracle(const Case& problem, const cuda::DeviceTraits& device,
                          const std::string& candidate) {
  if (tinygrad() == nullptr) GTEST_SKIP() << "needs FOVEA_TEST_TINYGRAD (scripts/run_amd)";
  expect_kernel_equals_oracle(
      problem, [&](const AttentionForward& args) { run_call(args, device, candidate); });
}

class CdnaMachineCode : public ::testing::TestWithParam<const char*> {};

TEST_P(CdnaMachineCode, EqualsTheOracle) {
  const std::vector<Case> cases = cdna_cases();
  const Case& problem = *std::ranges::find(cases, GetParam(), &Case::label);
  expect_equals_oracle(problem, amd_device_of(problem.label), "cuda/cdna/attention_forward");
}

// Both targets and head dims, tiles that are cut and padded, a score program beside dropout, passes over infinite
// values, packed rows, parts of keys and what joins them.
INSTANTIATE_TEST_SUITE_P(All, CdnaMachineCode,
                         ::testing::Values("cdna_d128", "gfx950_d128", "gfx950_d64",
                                           "cdna_lean_d128", "cdna_narrow_d40", "gfx950_narrow_d40",
                                           "cdna_infinite_values", "gfx950_infinite_values_f32_out",
                                           "cdna_packed_heads_of_dies", "cdna_split",
                                           "gfx950_latent_d192"),
                         [](const auto& each) { return std::string(each.param); });

/// The f32 kernel, with waves of 32 lanes and of 64.
TEST(F32MachineCode, EqualsTheOracle) {
  Case problem = plain_case(Dtype::f32);
  problem.label = "machine_code_f32";
  problem.batch = 1;
  for (const int gfx : {0x1100, 0x942}) {
    SCOPED_TRACE(fmt::format("gfx{:x}", gfx));
    expect_equals_oracle(problem, cuda::typical_amd_device(gfx), "cuda/sm80/attention_forward_f32");
  }
}

}  // namespace
}  // namespace fovea::testing
