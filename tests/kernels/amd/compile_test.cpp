// What AMD's GPUs would run, compiled for each: registers suffice, nothing goes through private memory or by addresses
// of an unknown space. Nothing here says how fast it is.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "compile/amd_compiler.hpp"
#include "cuda/device/shared/forward_spec_cdna.h"
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

/// And of cdna/attention_forward: its widest tiles, both formats and head dims, masks, a score program beside dropout,
/// packed rows, pages of a cache, rows narrower than the tile.
constexpr const char* kCdnaLabels[] = {
    "cdna_d128",         "cdna_lean_d128",   "cdna_documents",    "cdna_packed_heads_of_dies",
    "cdna_narrow_split", "cdna_latent_d192", "gfx950_latent_d192"};

Case labelled(const std::vector<Case>& cases, const std::string& label) {
  return *std::ranges::find(cases, label, &Case::label);
}

cuda::ForwardPlan plan_for(const Case& problem, const cuda::DeviceTraits& device) {
  CaseMemory memory(problem);
  return choose_forward(validate(problem_of(memory.args()), "test"), device);
}

/// Kernels that differ, by a name that ends theirs.
std::map<std::string, cuda::jit::KernelText> kernels_for(const cuda::DeviceTraits& device) {
  std::vector<Case> cases;
  for (const char* const label : kLabels) cases.push_back(labelled(kernel_cases(), label));
  for (const char* const label : kCdnaLabels)
    if (cuda::is_cdna(device.gfx)) cases.push_back(labelled(cdna_cases(), label));
  if (device.gfx == 0x950) cases.push_back(labelled(cdna_cases(), "gfx950_latent_d192"));
  std::map<std::string, cuda::jit::KernelText> kernels;
  std::set<std::string> units;
  for (const Case& each : cases) {
    for (const auto& kernel : planned_kernels(plan_for(each, device))) {
      if (units.insert(kernel.text.unit).second)
        kernels[each.label + std::to_string(static_cast<int>(kernel.role))] = kernel.text;
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

/// Instructions of a kernel, block by block.
std::vector<std::vector<std::string>> blocks_of(const std::string& listing) {
  std::vector<std::vector<std::string>> blocks(1);
  std::istringstream lines(listing);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(".LBB") || line.starts_with("; %bb.")) blocks.emplace_back();
    if (line.starts_with("\t") && !line.starts_with("\t.") && !line.starts_with("\t;"))
      blocks.back().push_back(line.substr(1));
  }
  return blocks;
}

std::ptrdiff_t count(const std::vector<std::string>& block, std::string_view begin) {
  return std::ranges::count_if(block, [&](const auto& line) { return line.starts_with(begin); });
}

/// What the machine code of cdna/attention_forward may have, for a tile of keys and a wave.
struct CdnaBudget {
  int gfx;
  std::ptrdiff_t products, vector_instructions, copies;
  int registers;
};
void PrintTo(const CdnaBudget& budget, std::ostream* stream) { *stream << std::hex << budget.gfx; }

class CdnaMachineCode : public ::testing::TestWithParam<CdnaBudget> {};

/// Of 128 columns in bf16, without a mask. docs/kernels/attention_forward_cdna.md has where the budget comes from.
TEST_P(CdnaMachineCode, StaysWithinItsBudget) {
  Case problem = labelled(cdna_cases(), "cdna_d128");
  problem.mask = {};
  const auto kernels = planned_kernels(plan_for(problem, cuda::typical_amd_device(GetParam().gfx)));
  const cuda::CompiledForAmd compiled =
      cuda::compile_for_amd(kernels[0].text.unit, fmt::format("gfx{:x}", GetParam().gfx));
  FOVEA_SKIP_WITHOUT_AMD_COMPILER(compiled);
  ASSERT_EQ(compiled.words, "");
  // A tile goes through blocks that multiply, that find the maximum and that store the values.
  std::ptrdiff_t products = 0, vector_instructions = 0, powers = 0, transposed = 0;
  for (const auto& block : blocks_of(compiled.listing)) {
    const std::ptrdiff_t multiplied = count(block, "v_mfma");
    products += multiplied;
    const std::ptrdiff_t reads = count(block, "ds_read_b64_tr_b16");
    transposed += reads;
    // What comes for the next tile is not waited for beside them.
    if (reads > 0) {
      EXPECT_EQ(count(block, "s_waitcnt vmcnt"), 0);
    }
    if (multiplied + count(block, "v_max3") + count(block, "ds_write_b128") == 0) continue;
    powers += count(block, "v_exp_f32");
    vector_instructions += count(block, "v_") - multiplied - count(block, "v_exp_f32");
  }
  EXPECT_EQ(products, GetParam().products);
  EXPECT_LE(powers, 33);  // one of each score, and of the row's origin
  EXPECT_LE(vector_instructions, GetParam().vector_instructions);
  EXPECT_LE(compiled.object.kernels[0].vector_registers, GetParam().registers);
  // Values are transposed on their way from LDS to each product, or before.
  EXPECT_EQ(transposed, GetParam().gfx == 0x950 ? 32 : 0);
  EXPECT_EQ(compiled.listing.find("v_perm_b32") != std::string::npos, GetParam().gfx != 0x950);
  // Keys of the first tile, and of the next one, and values where they are copied: straight to LDS.
  const auto copies = std::regex("buffer_load_dword(x4)? [^\n]* lds\n");
  const auto found = std::distance(
      std::sregex_iterator(compiled.listing.begin(), compiled.listing.end(), copies), {});
  EXPECT_EQ(found, 2 * GetParam().copies);
  // All copies have landed before the barrier behind which they are read, and stores to LDS.
  EXPECT_TRUE(
      std::regex_search(compiled.listing, std::regex("s_waitcnt vmcnt\\(0\\)\n\ts_barrier")));
  EXPECT_FALSE(std::regex_search(compiled.listing, std::regex("ds_write[^\n]*\n\ts_barrier")));
  EXPECT_FALSE(std::regex_search(compiled.listing, std::regex("s_nop (9|1[0-9])")));
}

// Products: 2 x 64 x 128 columns of a wave's 32 rows, in blocks of 32 x 32 and depths of 8 or 16.
INSTANTIATE_TEST_SUITE_P(All, CdnaMachineCode,
                         ::testing::Values(CdnaBudget{0x942, 64, 170, 16, 232},
                                           CdnaBudget{0x950, 32, 130, 8, 176}),
                         [](const auto& each) { return fmt::format("gfx{:x}", each.param.gfx); });

INSTANTIATE_TEST_SUITE_P(All, ForAmd, ::testing::Values(0x942, 0x950, 0x1100, 0x1201),
                         [](const auto& each) { return fmt::format("gfx{:x}", each.param); });

}  // namespace
}  // namespace fovea::testing
