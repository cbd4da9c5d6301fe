// Every form of tcgen05, compiled for the two architectures that have it: each gives the instruction meant, as often as
// it was written, and other architectures refuse the header in words.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "fovea/error.hpp"

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"

namespace fovea::cuda {
namespace {

struct Form {
  std::string call;  // where t is a TmemAddress, d a SmemDescriptor, s an address, n a number
  std::string sass;
};

constexpr const char* kPrelude = R"(
#include "ptx/tcgen05_ld_st.cuh"
#include "ptx/warp.cuh"
#include "tile/tcgen05_descriptor.cuh"
using namespace fovea::cuda;
using namespace fovea::cuda::ptx;
)";

/// Products and copies of one cta_group: a kernel holds no other.
std::vector<Form> forms_of_one_thread(int cta_group, int minor) {
  const std::string group = std::to_string(cta_group), pair = cta_group == 2 ? ".2CTA" : "";
  const std::string lanes = cta_group == 2 ? "{n, 2, 3, 4, 5, 6, 7, 8}" : "{n, 2, 3, 4}";
  std::vector<Form> forms;
  const auto add = [&](const std::string& name, const std::string& kind,
                       const std::string& arguments, const std::string& sass) {
    forms.push_back({name + "<" + kind + ", " + group + ">(" + arguments + ");", sass});
  };
  struct Kind {
    const char *name, *sass;
  };
  for (const Kind& kind : {Kind{"f16", "UTCHMMA"}, Kind{"tf32", "UTCHMMA"},
                           Kind{"f8f6f4", "UTCQMMA"}, Kind{"i8", "UTCIMMA"}}) {
    if (kind.name == std::string("i8") && minor == 3) continue;
    const std::string type = std::string("Tcgen05Kind::") + kind.name, sass = kind.sass + pair;
    add("tcgen05_mma_ss", type, "t, d, d, {n}, n > 1", sass + " gdesc");
    add("tcgen05_mma_ts", type, "t, t, d, {n}, n > 1", sass + " tmem");
    add("tcgen05_mma_ss_masked", type, "t, d, d, {n}, " + lanes + ", true", sass + " gdesc");
    add("tcgen05_mma_ts_masked", type, "t, t, d, {n}, " + lanes + ", true", sass + " tmem");
  }
  for (const Kind& kind :
       {Kind{"mxf8f6f4_block32", "UTCQMMA"}, Kind{"mxf4_block32", "UTCOMMA"},
        Kind{"mxf4nvf4_block32", "UTCOMMA"}, Kind{"mxf4nvf4_block16", "UTCOMMA"}}) {
    const std::string type = std::string("Tcgen05ScaledKind::") + kind.name;
    // Two names for one thing.
    const std::string block = !type.ends_with("16") ? "" : minor == 3 ? ".BLOCK16" : ".4X";
    const std::string sass = kind.sass + pair + block;
    add("tcgen05_mma_scaled_ss", type, "t, d, d, {n}, t, t, n > 1", sass + " gdesc");
    add("tcgen05_mma_scaled_ts", type, "t, t, d, {n}, t, t, n > 1", sass + " tmem");
  }
  for (const Kind& kind : {Kind{"rows128x256b", ""}, Kind{"rows128x128b", ".128dp128bit"},
                           Kind{"rows64x128b_warpx2_02_13", ".2x64dp128bit_lw02_lw13"},
                           Kind{"rows64x128b_warpx2_01_23", ".2x64dp128bit_lw01_lw23"},
                           Kind{"rows32x128b_warpx4", ".4x32dp128bit"}}) {
    add("tcgen05_cp", std::string("TmemCopy::") + kind.name, "t, d",
        "UTCCP.T.S" + pair + kind.sass + " tmem");
  }
  return forms;
}

/// Loads and stores of every number of registers, of both types of register.
std::vector<Form> forms_of_a_warp() {
  struct Shape {
    const char *name, *split, *sass;
    int registers;
  };
  std::vector<Form> forms;
  for (const Shape& shape :
       {Shape{"32x32b", "", "", 1}, Shape{"16x64b", "", ".16dp64bit", 1},
        Shape{"16x128b", "", ".16dp128bit", 2}, Shape{"16x256b", "", ".16dp256bit", 4},
        Shape{"16x32bx2", "<16>", ".16dp32bit_t0_t15", 1}}) {
    for (int count = shape.registers; count <= 128; count *= 2) {
      const int repeats = count / shape.registers;
      const std::string suffix =
          std::string(shape.sass) + (repeats > 1 ? ".x" + std::to_string(repeats) : "");
      for (const char* type : {"float", "std::uint32_t"}) {
        const std::string declared = std::string(type) + " r[" + std::to_string(count) + "]";
        const std::string name = std::string(shape.name) + shape.split;
        forms.push_back({"{ " + declared + "; tcgen05_ld_" + name +
                             "(r, t); tcgen05_wait_ld(r); out += r[0]; }",
                         "LDTM" + suffix + " R"});
        forms.push_back(
            {"{ const " + declared + " = {" + type + "(n)}; tcgen05_st_" + name + "(t, r); }",
             "STTM" + suffix + " tmem"});
      }
    }
  }
  return forms;
}

std::string kernel(const std::string& name, const std::vector<Form>& forms, bool is_one_thread) {
  std::string text = "extern \"C\" __global__ void __launch_bounds__(128, 1) " + name +
                     "(std::uint32_t s, std::uint64_t bits, std::uint32_t n, float* to) {\n"
                     "  const TmemAddress t{s};\n  const SmemDescriptor d{bits};\n"
                     "  float out = d.bits == 0;\n";
  if (is_one_thread) text += "  if (elect_one()) {\n";
  for (const Form& form : forms) text += "  " + form.call + "\n";
  return text + (is_one_thread ? "  }\n" : "") + "  to[0] = out;\n}\n";
}

void expect_each(const std::string& sass, const std::vector<Form>& forms) {
  for (const Form& form : forms) {
    const auto wanted = std::count_if(forms.begin(), forms.end(),
                                      [&](const Form& other) { return other.sass == form.sass; });
    EXPECT_EQ(count(sass, form.sass), wanted) << form.sass << " of " << form.call;
  }
}

class Tcgen05Forms : public ::testing::TestWithParam<int> {};

TEST_P(Tcgen05Forms, GiveTheInstructionMeant) {
  if (const auto why = why_no_compiler()) GTEST_SKIP() << *why;
  const int minor = GetParam();
  const std::vector<Form> single = forms_of_one_thread(1, minor),
                          pair = forms_of_one_thread(2, minor), moves = forms_of_a_warp();
  const jit::Cubin& cubin =
      compiled({.unit = kPrelude + kernel("one", single, true) + kernel("two", pair, true) +
                        kernel("moves", moves, false),
                .label = "tcgen05"},
               {10, minor});
  const auto nvdisasm = find_nvdisasm();
  if (!nvdisasm) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  const auto functions = disassemble(*nvdisasm, cubin.image);
  expect_each(functions.at("one"), single);
  expect_each(functions.at("two"), pair);
  expect_each(functions.at("moves"), moves);
}

INSTANTIATE_TEST_SUITE_P(Architectures, Tcgen05Forms, ::testing::Values(0, 3),
                         [](const auto& row) { return "sm_10" + std::to_string(row.param) + "a"; });

/// What the compiler says of a unit that it must not take.
std::string refusal(const std::string& unit, jit::Architecture architecture) {
  try {
    compiled({.unit = kPrelude + unit, .label = "tcgen05"}, architecture);
  } catch (const CompileError& error) {
    return error.what();
  }
  return "compiled";
}

TEST(Tcgen05, IsRefusedInWordsWhereItDoesNotExist) {
  if (const auto why = why_no_compiler()) GTEST_SKIP() << *why;
  for (const jit::Architecture other : {jit::Architecture{9, 0}, jit::Architecture{12, 0}}) {
    EXPECT_NE(refusal("", other).find("tensor memory exist on sm_100a and sm_103a alone"),
              std::string::npos)
        << refusal("", other);
  }
  const std::string i8 =
      "extern \"C\" __global__ void f(SmemDescriptor d) { "
      "tcgen05_mma_ss<Tcgen05Kind::i8>({0}, d, d, {0}, true); }";
  EXPECT_NE(refusal(i8, {10, 3}).find("8-bit integers exist on sm_100a"), std::string::npos);
  const std::string max =
      "extern \"C\" __global__ void f(float* to) { float r[4], m; "
      "tcgen05_ld_max_32x32b(r, m, {0}); to[0] = m; }";
  EXPECT_NE(refusal(max, {10, 0}).find("tcgen05.ld.red exists on sm_103a"), std::string::npos);
}

TEST(Tcgen05, DescriptorsThatDoNotExistAreRefusedInWords) {
  if (const auto why = why_no_compiler()) GTEST_SKIP() << *why;
  struct Row {
    const char *fields, *words;
    bool is_scaled;
  };
  for (const Row& row : {
           Row{".b = TensorType::f16", "a and b are both f16", false},
           Row{".d = TensorType::f16", "of f16 and of small floats also f16", false},
           Row{".m = 256", "m is 64 or 128", false},
           Row{".n = 12", "n is a multiple of 8", false},
           Row{".m = 256, .n = 24, .cta_group = 2", "of a pair of 16", false},
           Row{".a = TensorType::s8, .b = TensorType::u8, .d = TensorType::s32, .n = 40",
               "n is a multiple of 8", false},
           Row{".a = TensorType::e4m3", "mxf4 and mxf4nvf4 multiply e2m1", true},
           Row{".m = 64", "m is 128", true},
           Row{".a_scale_byte = 1", "scales begin at byte", true},
           Row{".b_major = Major::mn", "packed operands of 4 bits are K-major", true},
       }) {
    const std::string fields(row.fields);
    const std::string unit =
        row.is_scaled
            ? "static_assert(scaled_instruction_descriptor<ScaledTensorProduct{" + fields +
                  "}>().bits);"
            : "static_assert(instruction_descriptor<TensorProduct{" + fields + "}>().bits);";
    EXPECT_NE(refusal(unit, {10, 0}).find(row.words), std::string::npos) << fields;
  }
}

}  // namespace
}  // namespace fovea::cuda
