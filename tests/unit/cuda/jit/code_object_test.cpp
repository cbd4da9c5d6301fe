// What is read from code objects: from one put together byte by byte, from what scripts/compile_amd makes, and from
// bytes that are broken everywhere.
#include "cuda/jit/code_object.hpp"

#include <gtest/gtest.h>

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/error.hpp"

#include "compile/amd_compiler.hpp"
#include "cuda/jit/message_pack.hpp"
#include "unit/cuda/jit/made_code_object.hpp"

namespace fovea::cuda::jit {
namespace {

TEST(CodeObjects, SayWhatKernelsTake) {
  const CodeObject object = read_code_object(bytes_of(code_object()));
  EXPECT_EQ(object.target, "amdgcn-amd-amdhsa--gfx942");
  ASSERT_EQ(object.kernels.size(), 1U);
  const CodeObjectKernel& kernel = object.kernels[0];
  EXPECT_EQ(kernel.name, "fovea_kernel");
  EXPECT_EQ(kernel.vector_registers, 300);
  EXPECT_EQ(kernel.accumulation_registers, 8);
  EXPECT_EQ(kernel.scalar_registers, 98);
  EXPECT_EQ(kernel.vector_spills, 5);
  EXPECT_EQ(kernel.scalar_spills, 7);
  EXPECT_EQ(kernel.private_bytes, 32);
  EXPECT_EQ(kernel.shared_bytes, 65536);
  EXPECT_EQ(kernel.most_threads, 256);
  EXPECT_EQ(kernel.wave_lanes, 64);
}

TEST(CodeObjects, ReportInTheWordsOfEveryCompiler) {
  const CompileReport report = report_of(read_code_object(bytes_of(code_object())));
  EXPECT_EQ(report.registers, 300);
  EXPECT_EQ(report.spill_bytes, 20);
  EXPECT_EQ(report.local_bytes, 32);
  EXPECT_EQ(report.shared_bytes, 65536);
}

std::string refusal_of(const std::string& image) {
  try {
    report_of(read_code_object(bytes_of(image)));
  } catch (const CompileError& error) {
    return error.what();
  }
  return "";
}

TEST(CodeObjects, SayWhatIsWrongWithOthers) {
  constexpr const char* kExpected = "; expected an ELF file for AMD GPUs with a note of metadata";
  const auto with = [](std::size_t at, char byte) {
    std::string image = code_object();
    image[at] = byte;
    return image;
  };
  EXPECT_EQ(refusal_of(""),
            std::string("code object: it does not begin as an ELF file") + kExpected);
  EXPECT_EQ(refusal_of(with(4, 1)),
            std::string("code object: it does not begin as an ELF file") + kExpected);
  EXPECT_EQ(refusal_of(with(18, 62)),
            std::string("code object: it is for another machine") + kExpected);
  EXPECT_EQ(refusal_of(with(64, 1)),
            std::string("code object: it has no note of metadata") + kExpected);
  EXPECT_EQ(refusal_of(code_object("another.kernels")),
            "code object: no kernel fovea_kernel in it");
}

/// Wherever it ends, there is a reason; whatever a byte becomes, it is read or there is one. (Under sanitizers no byte
/// beyond the end is looked at.)
TEST(CodeObjects, BrokenOnesAreRefusedAndNothingElseHappens) {
  const std::string whole = code_object();
  for (std::size_t end = 0; end < whole.size(); ++end)
    EXPECT_NE(refusal_of(whole.substr(0, end)), "") << end;
  int refused = 0;
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (const char mask : {'\x01', '\x80', '\xff'}) {
      std::string image = whole;
      image[at] = static_cast<char>(image[at] ^ mask);
      refused += refusal_of(image).empty() ? 0 : 1;
    }
  }
  EXPECT_GT(refused, 100);
}

TEST(MessagePack, CountsThatNoBytesFollowEndWithTheBytes) {
  const auto bytes = bytes_of("\xdf\xff\xff\xff\xff\xdf\xff\xff\xff\xff");
  MessagePackReader reader(bytes);
  reader.skip();
  EXPECT_FALSE(reader.is_whole());
  EXPECT_EQ(reader.number(), 0U);
  EXPECT_EQ(reader.text(), "");
}

/// Through the compiler that is installed with NVRTC.
TEST(CodeObjects, OfTheCompilerAreRead) {
  const std::string unit =
      "#include \"ptx/warp.cuh\"\n"
      "extern \"C\" __global__ void __launch_bounds__(128) fovea_kernel(float* out) {\n"
      "  using namespace fovea::cuda::ptx;\n"
      "  out[thread_idx().x] = shfl_bfly(out[thread_idx().x], 1);\n}\n";
  for (const auto& [target, lanes] : {std::pair{"gfx950", 64}, std::pair{"gfx1201", 32}}) {
    const CompiledForAmd compiled = compile_for_amd(unit, target);
    FOVEA_SKIP_WITHOUT_AMD_COMPILER(compiled);
    EXPECT_EQ(compiled.words, "");
    EXPECT_EQ(compiled.object.target, std::string("amdgcn-amd-amdhsa--") + target);
    ASSERT_EQ(compiled.object.kernels.size(), 1U);
    const CodeObjectKernel& kernel = compiled.object.kernels[0];
    EXPECT_EQ(kernel.name, kEntryName);
    EXPECT_EQ(kernel.wave_lanes, lanes);
    EXPECT_EQ(kernel.most_threads, 128);
    EXPECT_EQ(report_of(compiled.object).spill_bytes, 0);
    EXPECT_GT(report_of(compiled.object).registers, 0);
  }
}

}  // namespace
}  // namespace fovea::cuda::jit
