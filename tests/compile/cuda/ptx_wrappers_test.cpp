// Every function of device/ptx, compiled alone by NVRTC: ptxas takes it without a note, and the machine code has the
// instruction meant.
#include "compile/cuda/ptx_wrappers.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <regex>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"

namespace fovea::cuda {
namespace {

constexpr const char* kNoDisassembler =
    "compiled, but not looked at: no nvdisasm (PyPI nvidia-cuda-nvdisasm)";

bool is_of_ptx(std::string_view name) {
  return name.starts_with("ptx/") && !name.starts_with("ptx/generated/");
}

bool has_tensor_memory(int architecture) { return architecture == 100 || architecture == 103; }

std::string prelude(int architecture) {
  std::string text;
  for (const char* file :
       {"base", "memory", "math", "exp_log", "ordered", "warp", "barrier", "cp_async", "mma"}) {
    text += std::string("#include \"ptx/") + file + ".cuh\"\n";
  }
  if (architecture >= 90) {
    for (const char* file :
         {"mbarrier", "fence", "bulk", "tma", "cluster", "setmaxnreg", "griddepcontrol", "red"}) {
      text += std::string("#include \"ptx/") + file + ".cuh\"\n";
    }
    text += has_tensor_memory(architecture)
                ? "#include \"ptx/math_f32x2.cuh\"\n#include \"ptx/tcgen05_ld_st.cuh\"\n"
            : architecture == 90 ? "#include \"ptx/generated/wgmma_bf16.cuh\"\n"
                                 : "#include \"ptx/mma_scaled.cuh\"\n";
  } else {
    text += "struct TensorMap {};\n";
  }
  return text +
         "using namespace fovea::cuda;\nusing namespace fovea::cuda::ptx;\n"
         "struct Args { float* f; std::uint32_t* u; std::int32_t* i32; SharedAddress s; int n; "
         "TensorMap map; };\n"
         "[[maybe_unused]] FOVEA_DEVICE std::uint32_t sum(U32x2 x) { return x.x + x.y; }\n"
         "[[maybe_unused]] FOVEA_DEVICE std::uint32_t sum(U32x4 x) { return x.x + x.y + x.z + x.w; "
         "}\n";
}

bool is_tried_on(const Wrapper& wrapper, int architecture) {
  return wrapper.architecture == architecture ||
         (wrapper.architecture == 100 && architecture == 103);
}

/// All wrappers of one architecture in one unit, a kernel each, named after its wrapper.
std::string unit(int architecture) {
  std::string text = prelude(architecture);
  for (const Wrapper& wrapper : kPtxWrappers) {
    if (!is_tried_on(wrapper, architecture)) continue;
    text +=
        std::string("extern \"C\" __global__ void __launch_bounds__(384, 1) kernel_") +
        wrapper.function +
        "(const __grid_constant__ Args a) {\n  [[maybe_unused]] const SharedAddress s = a.s;\n  ";
    if (has_tensor_memory(architecture)) text += "[[maybe_unused]] const TmemAddress t{a.s};\n  ";
    text += std::string(wrapper.body) + "\n}\n";
  }
  return text;
}

class PtxWrappers : public ::testing::TestWithParam<int> {};

TEST_P(PtxWrappers, GiveTheInstructionMeant) {
  if (const auto why = why_no_compiler()) GTEST_SKIP() << *why;
  const int architecture = GetParam();
  const jit::Cubin& cubin = compiled({.unit = unit(architecture), .label = "wrappers"},
                                     {architecture / 10, architecture % 10});
  EXPECT_EQ(cubin.report.num_wgmma_notes, 0) << cubin.report.log;

  const auto nvdisasm = find_nvdisasm();
  if (!nvdisasm) GTEST_SKIP() << kNoDisassembler;
  const auto functions = disassemble(*nvdisasm, cubin.image);
  ASSERT_FALSE(functions.empty()) << *nvdisasm << " cannot read what this compiler wrote";
  for (const Wrapper& wrapper : kPtxWrappers) {
    if (!is_tried_on(wrapper, architecture)) continue;
    const auto found = functions.find(std::string("kernel_") + wrapper.function);
    ASSERT_NE(found, functions.end()) << wrapper.function;
    for (const char* wanted : wrapper.sass) {
      EXPECT_NE(found->second.find(wanted), std::string::npos)
          << wrapper.function << ": no " << wanted << " in\n"
          << found->second;
    }
    EXPECT_EQ(found->second.find(" STL"), std::string::npos) << wrapper.function << " spills";
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, PtxWrappers,
                         ::testing::Values(75, 80, 89, 90, 100, 103, 120),
                         [](const auto& row) { return "sm_" + std::to_string(row.param); });

TEST(PtxWrappersTable, HasEveryFunctionOfDevicePtx) {
  std::set<std::string> functions, rows;
  const std::regex declaration(R"(FOVEA_DEVICE (?:constexpr )?[\w:]+ (\w+)\()");
  for (const jit::SourceFile& file : jit::embedded_device_text().files) {
    if (!is_of_ptx(file.name)) continue;
    const std::string text = file.text;
    for (std::sregex_iterator it(text.begin(), text.end(), declaration), end; it != end; ++it)
      functions.insert((*it)[1]);
  }
  for (const Wrapper& wrapper : kPtxWrappers) rows.insert(wrapper.function);
  EXPECT_GT(functions.size(), 100U) << "the search for declarations finds too few";
  for (const std::string& function : functions)
    EXPECT_TRUE(rows.contains(function)) << function << " has no row in ptx_wrappers.hpp";
  for (const std::string& row : rows)
    EXPECT_TRUE(functions.contains(row)) << row << " is no function of device/ptx";
}

std::string text_of(std::string_view name) {
  for (const jit::SourceFile& file : jit::embedded_device_text().files)
    if (file.name == name) return file.text;
  throw std::out_of_range(std::string(name));
}

/// By function: its instruction and what that reads, `cvt.rn.bf16x2.f32 %0, %1, %2; "f"(hi), "f"(lo)`.
std::map<std::string, std::string> statements_of(const std::string& text) {
  const std::regex function(
      R"re(FOVEA_DEVICE [\w:]+ (\w+)\([^{]*\{[^}]*?asm(?: volatile)?\("([^"]*)" : "[^"]*"\(\w+\) : ([^;]*)\);)re");
  std::map<std::string, std::string> statements;
  for (std::sregex_iterator it(text.begin(), text.end(), function), end; it != end; ++it)
    statements[(*it)[1]] = (*it)[2].str() + " " + (*it)[3].str();
  return statements;
}

/// The emulator knows the functions by their names alone, and a disassembler does not know which operand is which.
TEST(DeviceText, OrderedInstructionsAreThoseOfMath) {
  const auto math = statements_of(text_of("ptx/math.cuh"));
  int found = 0;
  for (const auto& [name, statement] : statements_of(text_of("ptx/ordered.cuh"))) {
    ASSERT_TRUE(name.starts_with("ordered_"));
    const auto plain = math.find(name.substr(std::string("ordered_").size()));
    if (plain == math.end()) continue;
    EXPECT_EQ(statement, plain->second) << name;
    ++found;
  }
  EXPECT_EQ(found, 5) << "the search for statements finds too few";
}

TEST(DeviceText, EachHeaderCompilesAlone) {
  if (const auto why = why_no_compiler()) GTEST_SKIP() << *why;
  for (const jit::SourceFile& file : jit::embedded_device_text().files) {
    if (!is_of_ptx(file.name) && !std::string_view(file.name).starts_with("tile/")) continue;
    const std::string unit = std::string("#include \"") + file.name +
                             "\"\nextern \"C\" __global__ void fovea_kernel() {}\n";
    const bool is_of_blackwell = std::string_view(file.name).find("tcgen05") != std::string::npos;
    const jit::Architecture architecture{is_of_blackwell ? 10 : 9, 0};
    EXPECT_NO_THROW(compiled({.unit = unit, .label = file.name}, architecture)) << file.name;
  }
}

// ---- wgmma: every form ---------------------------------------------------------------------------

struct WgmmaFamily {
  const char* a;
  std::vector<const char*> partners;
  bool is_integer, is_16_bit;
};

const WgmmaFamily kFamilies[] = {
    {"bf16", {"bf16"}, false, true},          {"f16", {"f16"}, false, true},
    {"e4m3", {"e4m3", "e5m2"}, false, false}, {"e5m2", {"e4m3", "e5m2"}, false, false},
    {"s8", {"s8", "u8"}, true, false},        {"u8", {"s8", "u8"}, true, false},
};

/// As the PTX ISA lists them.
std::vector<int> columns(const WgmmaFamily& family) {
  std::vector<int> all;
  for (int n = 8; n <= 256; n += 8) {
    if (!family.is_integer || n <= 32 || n % 16 == 0) all.push_back(n);
  }
  return all;
}

std::string kernel_name(const char* b, int n) {
  return std::string("kernel_") + b + "_" + std::to_string(n);
}

/// One kernel with each form of one pair of types and one n.
std::string kernel(const WgmmaFamily& family, const char* b, int n) {
  const std::string sum = family.is_integer ? "int" : "float";
  const std::string types =
      std::string("WgmmaType::") + family.a + ", WgmmaType::" + b + ", " + std::to_string(n);
  std::string products;
  if (family.is_16_bit) {
    for (const char* a_major : {"k", "mn"}) {
      for (const char* b_major : {"k", "mn"}) {
        products += "  wgmma_ss<" + types + ", Major::" + a_major + ", Major::" + b_major +
                    ">(d, s, s + 1, true);\n";
      }
    }
    for (const char* b_major : {"k", "mn"}) {
      products += "  wgmma_rs<" + types + ", Major::" + b_major + ">(d, x, s, true);\n";
    }
  } else {
    products = "  wgmma_ss<" + types + ">(d, s, s + 1, true);\n  wgmma_rs<" + types +
               ">(d, x, s, true);\n";
  }
  return "extern \"C\" __global__ void __launch_bounds__(128, 1) " + kernel_name(b, n) + "(" + sum +
         "* f, MatrixDescriptor s, const std::uint32_t* u) {\n  " + sum + " d[" +
         std::to_string(n / 2) +
         "] = {};\n  const std::uint32_t x[4] = {u[0], u[1], u[2], u[3]};\n  wgmma_fence();\n" +
         products + "  wgmma_commit_group();\n  wgmma_wait_group<0>();\n  f[0] = d[0];\n}\n";
}

/// "HGMMA.64x80x16.F32.BF16": what ptxas 13.0 calls the product.
std::string spelling(const WgmmaFamily& family, const char* b, int n) {
  const auto upper = [](std::string text) {
    std::transform(text.begin(), text.end(), text.begin(),
                   [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
    return text;
  };
  const std::string shape = ".64x" + std::to_string(n) + (family.is_16_bit ? "x16" : "x32");
  if (family.is_16_bit)
    return "HGMMA" + shape + ".F32" + (family.a == std::string("bf16") ? ".BF16 R" : " R");
  return (family.is_integer ? "IGMMA" + shape : "QGMMA" + shape + ".F32") + "." + upper(family.a) +
         "." + upper(b) + " R";
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++found;
  return found;
}

class WgmmaForms : public ::testing::TestWithParam<WgmmaFamily> {};

TEST_P(WgmmaForms, GiveTheProductMeant) {
  if (const auto why = why_no_compiler()) GTEST_SKIP() << *why;
  const WgmmaFamily& family = GetParam();
  std::string unit = std::string("#include \"ptx/generated/wgmma_") + family.a +
                     ".cuh\"\nusing namespace fovea::cuda::ptx;\n";
  for (const char* b : family.partners) {
    for (const int n : columns(family)) unit += kernel(family, b, n);
  }
  const jit::Cubin& cubin =
      compiled({.unit = unit, .label = std::string("wgmma ") + family.a}, {9, 0});
  EXPECT_EQ(cubin.report.num_wgmma_notes, 0) << cubin.report.log;

  const auto nvdisasm = find_nvdisasm();
  if (!nvdisasm) GTEST_SKIP() << kNoDisassembler;
  const auto functions = disassemble(*nvdisasm, cubin.image);
  for (const char* b : family.partners) {
    for (const int n : columns(family)) {
      const auto found = functions.find(kernel_name(b, n));
      ASSERT_NE(found, functions.end()) << kernel_name(b, n);
      const std::string& sass = found->second;
      const std::string wanted = spelling(family, b, n);
      EXPECT_EQ(count(sass, wanted), family.is_16_bit ? 6 : 2) << wanted << " in\n" << sass;
      EXPECT_EQ(count(sass, "GMMA"), family.is_16_bit ? 6 : 2) << kernel_name(b, n);
      EXPECT_EQ(count(sass, ".tnspA"), family.is_16_bit ? 2 : 0) << kernel_name(b, n);
      EXPECT_EQ(count(sass, ".tnspB"), family.is_16_bit ? 3 : 0) << kernel_name(b, n);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, WgmmaForms, ::testing::ValuesIn(kFamilies),
                         [](const auto& row) { return std::string(row.param.a); });

}  // namespace
}  // namespace fovea::cuda
