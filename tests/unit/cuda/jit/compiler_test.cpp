#include "cuda/jit/compiler.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string_view>

#include "fovea/error.hpp"

#include "unit/cuda/jit/support.hpp"

namespace fovea::cuda::jit {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;
using testing::StartsWith;

std::string message_of(Compiler& compiler, const KernelText& text, Architecture architecture) {
  try {
    compiler.compile(text, architecture);
  } catch (const CompileError& error) {
    return error.what();
  }
  return "compiled";
}

// Ampere, Ada, Hopper, and the Blackwells of data centres and of desks.
TEST(Compiler, CompilesForEveryArchitectureWithoutADevice) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  Compiler compiler;
  for (const Architecture architecture :
       {Architecture{8, 0}, Architecture{8, 6}, Architecture{8, 9}, Architecture{9, 0},
        Architecture{10, 0}, Architecture{10, 3}, Architecture{12, 0}}) {
    const Cubin cubin = compiler.compile(small_kernel(), architecture);
    ASSERT_GT(cubin.image.size(), 4U) << architecture.name();
    EXPECT_EQ(std::memcmp(cubin.image.data(),
                          "\x7f"
                          "ELF",
                          4),
              0)
        << architecture.name();
    EXPECT_GT(cubin.report.registers, 0) << architecture.name();
    EXPECT_EQ(cubin.report.spill_bytes, 0) << architecture.name();
    EXPECT_EQ(cubin.report.local_bytes, 0) << architecture.name();
  }
  EXPECT_EQ(compiler.num_compiles(), 7);
}

TEST(Compiler, EqualTextsGiveEqualCubins) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  Compiler one, two;
  EXPECT_EQ(one.compile(small_kernel(), {9, 0}).image, two.compile(small_kernel(), {9, 0}).image);
}

TEST(Compiler, EveryEmbeddedHeaderIsThere) {
  const DeviceText& text = embedded_device_text();
  EXPECT_FALSE(text.files.empty());
  bool has_types = false;
  for (const SourceFile& file : text.files) {
    has_types = has_types || std::string_view(file.name) == "shared/types.h";
    EXPECT_NE(file.text[0], '\0') << file.name;
  }
  EXPECT_TRUE(has_types);
  EXPECT_NE(text.digest, Sha256{});
}

TEST(Compiler, ErrorTellsThePlaceInTheUnitAndTheLineThere) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  Compiler compiler;
  const KernelText text{.unit = "\nint f() { return missing_name; }\n", .label = "broken"};
  EXPECT_THAT(
      message_of(compiler, text, {8, 0}),
      AllOf(StartsWith("kernel broken for sm_80 does not compile: fovea_kernel.cu:2: identifier "
                       "\"missing_name\" is undefined, in 'int f() { return missing_name; }'\n"),
            HasSubstr("1 error detected")));
}

/// A key counts what such lines include (device_text.hpp): whatever else would include a file does not compile.
TEST(Compiler, SeesNoFileThatAKeyDoesNotCount) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  const SourceFile headers[] = {{"a/b.cuh", "\n"}};
  Compiler compiler(default_search(CompilerKind::nvrtc), make_device_text(headers));
  EXPECT_NO_THROW(compiler.compile({.unit = "#include \"a/b.cuh\"\n", .label = "plain"}, {8, 0}));
  for (const char* line : {"# include \"a/b.cuh\"\n", "#include <a/b.cuh>\n",
                           "#define FILE \"a/b.cuh\"\n#include FILE\n"}) {
    EXPECT_THAT(message_of(compiler, {.unit = line, .label = "hidden"}, {8, 0}),
                HasSubstr("does not compile"))
        << line;
  }
}

TEST(Compiler, ErrorInAHeaderTellsThePlaceInTheHeader) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  const SourceFile headers[] = {{"a/b.cuh", "// fine\nint g() { return wrong; }\n"}};
  Compiler compiler(default_search(CompilerKind::nvrtc), make_device_text(headers));
  const KernelText text{.unit = "#include \"a/b.cuh\"\n", .label = "broken"};
  EXPECT_THAT(message_of(compiler, text, {8, 0}),
              AllOf(HasSubstr("a/b.cuh:2: "), HasSubstr("in 'int g() { return wrong; }'")));
}

// What lies in the folder that the program was started in is not device text.
TEST(Compiler, ReadsNoHeaderFromDisk) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  const TemporaryFolder folder;
  write_text(folder / "stray.cuh", "// a header of somebody else\n");
  EXPECT_TRUE(holds_in_child([&] {
    std::filesystem::current_path(folder.path());
    Compiler compiler;
    return message_of(compiler, {.unit = "#include \"stray.cuh\"\n", .label = "x"}, {8, 0})
               .find("stray.cuh") != std::string::npos;
  }));
}

TEST(Compiler, ReportsRegistersSpillsAndStack) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  Compiler compiler;
  const KernelText spilling{
      .unit =
          "extern \"C\" __global__ void __launch_bounds__(1024) fovea_kernel(float* p, int n) {\n"
          "  float a[96];\n"
          "  for (int i = 0; i < 96; ++i) a[i] = p[i * n];\n"
          "  __syncthreads();\n"
          "  for (int i = 0; i < 96; ++i) p[i * n + 1] = a[i] * a[95 - i];\n"
          "}\n",
      .label = "spilling"};
  const CompileReport report = compiler.compile(spilling, {9, 0}).report;
  EXPECT_GT(report.registers, 0);
  EXPECT_LE(report.registers, 64);  // what 1024 threads leave for each
  EXPECT_GT(report.spill_bytes, 0);
  EXPECT_GT(report.local_bytes, 0);
  EXPECT_THAT(report.log, HasSubstr("spill stores"));
}

TEST(Compiler, ArchitectureThatItDoesNotKnowIsRefusedByName) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  Compiler compiler;
  try {
    compiler.compile(small_kernel(), {99, 0});
    FAIL();
  } catch (const Unsupported& error) {
    EXPECT_THAT(error.what(), HasSubstr("does not know sm_990a"));
  }
  EXPECT_EQ(compiler.num_compiles(), 0);
}

TEST(Compiler, VersionHasTheReleaseThatItsFunctionHides) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  Compiler compiler;
  EXPECT_THAT(compiler.version(), MatchesRegex("1[2-9]\\.[0-9]+\\.[0-9]+"));
  EXPECT_EQ(compiler.num_compiles(), 0);  // the probe is no kernel
}

TEST(Nvrtc, AbsenceIsOneLineThatSaysWhatToDo) {
  const CompilerLibrary nvrtc(search_nowhere());
  EXPECT_FALSE(nvrtc.is_present());
  EXPECT_THAT(nvrtc.why_absent(), AllOf(HasSubstr("nvidia-cuda-nvrtc"), HasSubstr("FOVEA_NVRTC"),
                                        Not(HasSubstr("\n"))));
  EXPECT_THROW(nvrtc.api(), Unsupported);
  EXPECT_THROW(Compiler(search_nowhere()).compile(small_kernel(), {8, 0}), Unsupported);
}

TEST(Nvrtc, NamedLibraryThatIsNotThereIsNotReplacedByAnother) {
  CompilerSearch search = default_search(CompilerKind::nvrtc);
  search.named = "/nowhere/libnvrtc.so";
  const CompilerLibrary nvrtc(search);
  EXPECT_FALSE(nvrtc.is_present());
  EXPECT_THAT(nvrtc.why_absent(), HasSubstr("/nowhere/libnvrtc.so"));
}

TEST(Nvrtc, FileThatIsNoCompilerIsRefused) {
  const TemporaryFolder folder;
  write_text(folder / "libnvrtc.so.13", "not a library");
  CompilerSearch search = search_nowhere();
  search.folders = {folder.path().string()};
  EXPECT_EQ(find_compiler_file(search), folder / "libnvrtc.so.13");
  const CompilerLibrary nvrtc(search);
  EXPECT_FALSE(nvrtc.is_present());
  EXPECT_THAT(nvrtc.why_absent(), HasSubstr(folder / "libnvrtc.so.13"));
}

// A driver of CUDA 12 cannot load what NVRTC 13 makes.
TEST(Nvrtc, NewerThanTheDriverIsPassedOver) {
  const TemporaryFolder folder;
  write_text(folder / "libnvrtc.so.13", "");
  write_text(folder / "libnvrtc.so.12", "");
  CompilerSearch search = search_nowhere();
  search.folders = {folder.path().string()};
  EXPECT_EQ(find_compiler_file(search), folder / "libnvrtc.so.13");
  search.max_major = 12;
  EXPECT_EQ(find_compiler_file(search), folder / "libnvrtc.so.12");
}

// ptxas' words as they were, of two functions.
TEST(Report, TakesTheNumbersOfItsOwnFunction) {
  const CompileReport report = parse_report(
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function 'other' for 'sm_90a'\n"
      "ptxas info    : Function properties for other\n"
      "    8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads\n"
      "ptxas info    : Used 255 registers, used 1 barriers\n"
      "ptxas info    : Compiling entry function 'fovea_kernel' for 'sm_90a'\n"
      "ptxas info    : (C7519) Potential Performance Loss: wgmma.mma_async instructions are "
      "serialized\n"
      "ptxas info    : Function properties for fovea_kernel\n"
      "ptxas         .     160 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 3 barriers, 160 bytes cumulative stack size, 1024 "
      "bytes smem\n");
  EXPECT_EQ(report.registers, 168);
  EXPECT_EQ(report.spill_bytes, 32);
  EXPECT_EQ(report.local_bytes, 160);
  EXPECT_EQ(report.shared_bytes, 1024);
  EXPECT_EQ(report.num_wgmma_notes, 1);
}

}  // namespace
}  // namespace fovea::cuda::jit
