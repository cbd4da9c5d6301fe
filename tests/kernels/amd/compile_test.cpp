// What AMD's GPUs would run, compiled for each: registers suffice, nothing goes through private memory or by addresses
// of an unknown space. Nothing here says how fast it is.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "compile/amd_compiler.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "kernels/forward_cases.hpp"
#include "kernels/renamed.hpp"
#include "problem/forward.hpp"

namespace fovea::testing {
namespace {

/// Of each part of the kernels one: formats, dropout, tables of ranges, packed rows, parts of keys and what joins them,
/// the most columns of values.
constexpr const char* kLabels[] = {"dropout", "documents", "split", "packed_many_f32",
                                   "several_tiles_d256"};

/// Kernels that differ, by a name that ends theirs.
std::map<std::string, cuda::jit::KernelText> kernels_for(const cuda::DeviceTraits& device) {
  const std::vector<Case> cases = kernel_cases();
  std::map<std::string, cuda::jit::KernelText> kernels;
  std::set<std::string> units;
  for (const std::string label : kLabels) {
    CaseMemory memory(*std::ranges::find(cases, label, &Case::label));
    const ForwardProblem problem = validate(problem_of(memory.args()), "test");
    for (const auto& kernel : planned_kernels(choose_forward(problem, device))) {
      if (units.insert(kernel.text.unit).second)
        kernels[label + std::to_string(static_cast<int>(kernel.role))] = kernel.text;
    }
  }
  return kernels;
}

/// All of them as one: each compilation starts three programs.
std::string joined(const std::map<std::string, cuda::jit::KernelText>& kernels) {
  std::string unit;
  for (const auto& [name, text] : kernels) {
    std::string own = renamed(text.unit, "Mods", "Mods_" + name);
    own = renamed(own, " spec = ", " spec_" + name + " = ");
    own = renamed(own, "cuda::spec", "cuda::spec_" + name);
    unit += renamed(own, cuda::jit::kEntryName, "kernel_" + name);
  }
  return unit;
}

class ForAmd : public ::testing::TestWithParam<int> {};

TEST_P(ForAmd, EveryKernelCompilesWithoutSpills) {
  const cuda::DeviceTraits device = cuda::typical_amd_device(GetParam());
  const auto kernels = kernels_for(device);
  const cuda::CompiledForAmd compiled =
      cuda::compile_for_amd(joined(kernels), fmt::format("gfx{:x}", device.gfx));
  FOVEA_SKIP_WITHOUT_AMD_COMPILER(compiled);
  EXPECT_EQ(compiled.words, "");
  EXPECT_EQ(compiled.object.target, fmt::format("amdgcn-amd-amdhsa--gfx{:x}", device.gfx));
  ASSERT_EQ(compiled.object.kernels.size(), kernels.size());
  for (const cuda::jit::CodeObjectKernel& kernel : compiled.object.kernels) {
    SCOPED_TRACE(kernel.name);
    EXPECT_EQ(kernel.wave_lanes, device.warp_lanes);
    EXPECT_EQ(kernel.vector_spills, 0);
    EXPECT_EQ(kernel.private_bytes, 0);
    EXPECT_LE(kernel.vector_registers, 256);
  }
  const std::regex unwanted("\\t(flat|scratch)_(load|store)");
  EXPECT_FALSE(std::regex_search(compiled.listing, unwanted));
}

INSTANTIATE_TEST_SUITE_P(All, ForAmd, ::testing::Values(0x942, 0x950, 0x1100, 0x1201),
                         [](const auto& each) { return fmt::format("gfx{:x}", each.param); });

}  // namespace
}  // namespace fovea::testing
