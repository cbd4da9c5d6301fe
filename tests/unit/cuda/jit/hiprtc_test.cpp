// AMD's compiler: on a fake that ends the process where it is asked for what it does not know, and on a real one where
// there is one.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/error.hpp"

#include "cuda/availability.hpp"
#include "cuda/jit/code_object.hpp"
#include "cuda/jit/loader.hpp"
#include "unit/cuda/driver/fake_libcuda.hpp"
#include "unit/cuda/jit/fake_libhiprtc.hpp"
#include "unit/cuda/jit/support.hpp"

namespace fovea::cuda::jit {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr Architecture kMi300{.major = 0, .minor = 0, .gfx = 0x942};

CompilerSearch search_for(const std::string& named) {
  CompilerSearch search;
  search.kind = CompilerKind::hiprtc;
  search.named = named;
  return search;
}

/// Of the fake's file, its state as new.
FakeHiprtcState& fresh_compiler() {
  void* const library = ::dlopen(kFakeLibhiprtc, RTLD_NOW | RTLD_LOCAL);
  auto* const find =
      reinterpret_cast<FakeHiprtcState* (*)()>(::dlsym(library, "fake_hiprtc_state"));
  return *find() = {};
}

std::vector<std::string> names_of(const std::vector<Architecture>& architectures) {
  std::vector<std::string> names;
  for (const Architecture& architecture : architectures) names.push_back(architecture.name());
  return names;
}

class Hiprtc : public testing::Test {
 protected:
  FakeHiprtcState& fake = fresh_compiler();
  Compiler compiler{search_for(kFakeLibhiprtc), amd_device_text()};
};

TEST_F(Hiprtc, CompilesByItsOwnOptionsAndReportsWhatTheCodeObjectSays) {
  const Cubin cubin = compiler.compile(small_kernel(), kMi300);
  EXPECT_EQ(fake.options.back(), "--offload-arch=gfx942 -std=c++20 -O3 ");
  EXPECT_EQ(cubin.report.registers, 300);
  EXPECT_EQ(cubin.report.spill_bytes, 20);
  EXPECT_EQ(compiler.num_compiles(), 1);
}

TEST_F(Hiprtc, VersionIsItsClangsSinceItsOwnIsAlways9) {
  EXPECT_EQ(compiler.version(), "20.0.0git");
  EXPECT_STREQ(compiler.name(), "hipRTC");
}

// Old ones end the process when they are asked for a target that they do not know, and so does the fake.
TEST_F(Hiprtc, TargetsThatItsClangDoesNotKnowAreNeverAskedFor) {
  EXPECT_THAT(names_of(compiler.architectures()),
              ElementsAre("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"));
  fake.clang = 18;
  Compiler of_rocm_62(search_for(kFakeLibhiprtc), amd_device_text());
  EXPECT_THAT(names_of(of_rocm_62.architectures()),
              ElementsAre("gfx90a", "gfx942", "gfx1100", "gfx1201"));
  fake.clang = 15;
  Compiler old(search_for(kFakeLibhiprtc), amd_device_text());
  EXPECT_THAT(names_of(old.architectures()), ElementsAre("gfx90a"));
  try {
    old.compile(small_kernel(), kMi300);
    FAIL();
  } catch (const Unsupported& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("hipRTC 15.0.0git does not know gfx942"),
                                    HasSubstr(kFakeLibhiprtc)));
  }
  EXPECT_EQ(old.num_compiles(), 0);
}

TEST_F(Hiprtc, ReadsAmdsTwinsInThePlaceOfNvidiasText) {
  compiler.compile({.unit = "#include \"sm80/attention_forward_f32.cuh\"\n", .label = "f32"},
                   kMi300);
  const auto count = [&](const char* name) { return std::ranges::count(fake.headers, name); };
  EXPECT_EQ(count("ptx/base.cuh"), 1);
  EXPECT_EQ(count("sm80/attention_forward_f32.cuh"), 1);
  const auto text_of = [](const DeviceText& text) {
    return std::string_view(
        std::ranges::find(text.files, std::string_view("ptx/base.cuh"), &SourceFile::name)->text);
  };
  EXPECT_THAT(std::string(text_of(amd_device_text())), HasSubstr("amdgcn"));
  EXPECT_THAT(std::string(text_of(embedded_device_text())), Not(HasSubstr("amdgcn")));
  EXPECT_NE(amd_device_text().digest, embedded_device_text().digest);
}

// clang's words, and the folder that hipRTC has written the unit to.
TEST_F(Hiprtc, ErrorTellsThePlaceInTheUnitAndTheLineThere) {
  const KernelText text{.unit = "\nint f() { return missing; }\n", .label = "broken"};
  fake.failure =
      "/somewhere/comgr-827b22/input/fovea_kernel.cu:2:18: error: use of undeclared identifier "
      "'missing'\n1 error generated.\n";
  try {
    compiler.compile(text, kMi300);
    FAIL();
  } catch (const CompileError& error) {
    EXPECT_THAT(error.what(),
                StartsWith("kernel broken for gfx942 does not compile: fovea_kernel.cu:2: use of "
                           "undeclared identifier 'missing', in 'int f() { return missing; }'\n"));
  }
  fake.failure = "/somewhere/comgr-827b22/include/ptx/base.cuh:1:1: error: of a test\n";
  try {
    compiler.compile(text, kMi300);
    FAIL();
  } catch (const CompileError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr(": ptx/base.cuh:1: of a test"),
                                    HasSubstr("in '// The AMD twin of")));
  }
}

TEST(HiprtcLibrary, AbsenceIsOneLineThatSaysWhatToDo) {
  CompilerSearch nowhere = search_nowhere();
  nowhere.kind = CompilerKind::hiprtc;
  EXPECT_THAT(CompilerLibrary(nowhere).why_absent(),
              AllOf(HasSubstr("libhiprtc.so"), HasSubstr("ROCm"), HasSubstr("FOVEA_HIPRTC"),
                    Not(HasSubstr("\n"))));
  EXPECT_THAT(CompilerLibrary(search_for("/nowhere/libhiprtc.so")).why_absent(),
              AllOf(HasSubstr("FOVEA_HIPRTC is '/nowhere/libhiprtc.so'")));
  EXPECT_THAT(CompilerLibrary(search_for(kFakeLibnvrtc)).why_absent(),
              AllOf(HasSubstr("lacks hiprtcVersion"), HasSubstr("ROCm 6 or newer")));
}

TEST(HiprtcLibrary, NewestOfAFolderIsTakenAndThatWithoutAVersionLast) {
  const TemporaryFolder folder;
  CompilerSearch search = search_nowhere();
  search.kind = CompilerKind::hiprtc;
  search.folders = {folder.path().string()};
  for (const char* name : {"libhiprtc.so", "libhiprtc.so.6", "libhiprtc.so.7"}) {
    write_text(folder / name, "");
    EXPECT_EQ(find_compiler_file(search), folder / name);
  }
}

/// A fake device of AMD's and the fake compiler.
class HipLoader : public testing::Test {
 protected:
  LoaderOptions options() const {
    LoaderOptions result;
    result.hiprtc = search_for(kFakeLibhiprtc);
    result.nvrtc = search_nowhere();
    result.disk = {.folder = folder / "kernels"};
    result.pack = std::nullopt;
    return result;
  }

  TemporaryFolder folder;
  FakeHiprtcState& compiler = fresh_compiler();
  driver::FakeState& fake = driver::fresh_fake(kFakeLibamdhip64);
  driver::Driver driver{Device::Kind::rocm, {kFakeLibamdhip64}};
  driver::DeviceContext context{driver, 0};
};

TEST_F(HipLoader, KernelIsCompiledLoadedAndKeptOnDiskByItsTarget) {
  {
    Loader loader(options());
    EXPECT_NE(loader.load(small_kernel(), context), nullptr);
    EXPECT_EQ(fake.count("hipModuleLoadDataEx"), 1);
    EXPECT_EQ(loader.counts().compiled, 1);
    EXPECT_EQ(loader.describe(KernelSource::compiler, kMi300), "hipRTC 20.0.0git");
  }
  Loader again(options());
  const std::size_t asked = compiler.options.size();
  again.load(small_kernel(), context);
  EXPECT_EQ(again.counts().from_disk, 1);
  EXPECT_EQ(compiler.options.size(), asked) << "the disk knows its version too";
  const auto listed = again.disk().list();
  ASSERT_EQ(listed.size(), 1U);
  EXPECT_EQ(listed[0].architecture, "gfx942");
  EXPECT_EQ(listed[0].compiler, "20.0.0git");
  again.cubin(small_kernel(), {.major = 0, .minor = 0, .gfx = 0x1100});
  EXPECT_EQ(again.counts().compiled, 1) << "another target, another key";
}

TEST_F(HipLoader, PackServesWithoutACompiler) {
  const Sha256 key = text_key(small_kernel(), amd_device_text(), kMi300);
  write_pack(folder / "kernels.pack", std::vector<PackItem>{{key, entry_number(1)}});
  LoaderOptions packed = options();
  packed.hiprtc = search_nowhere();
  packed.hiprtc.kind = CompilerKind::hiprtc;
  packed.pack = folder / "kernels.pack";
  Loader loader(packed);
  EXPECT_EQ(why_unavailable(driver, loader, 0), "");
  EXPECT_EQ(loader.load(small_kernel(), context)->source, KernelSource::pack);
  EXPECT_THROW(loader.load(small_kernel(2), context), Unsupported);
}

TEST_F(HipLoader, AvailabilityNamesThePieceThatIsMissing) {
  Loader whole(options());
  EXPECT_EQ(why_unavailable(driver, whole, 0), "");
  EXPECT_THAT(why_unavailable(driver, whole, 3), HasSubstr("rocm:3"));
  LoaderOptions without = options();
  without.hiprtc = search_nowhere();
  without.hiprtc.kind = CompilerKind::hiprtc;
  Loader nothing(without);
  EXPECT_THAT(why_unavailable(driver, nothing, 0),
              AllOf(HasSubstr("no kernel compiler"), HasSubstr("libhiprtc.so")));
  fake.architecture = "gfx1030";
  const driver::Driver rdna2(Device::Kind::rocm, {kFakeLibamdhip64});
  EXPECT_THAT(why_unavailable(rdna2, whole, 0),
              AllOf(HasSubstr("rocm:0 (Fake MI300X) is gfx1030"),
                    HasSubstr("expected gfx90a, gfx942, gfx950, gfx1100 or gfx1201")));
}

// Where FOVEA_HIPRTC names one, or ROCm is installed; no GPU is needed. Debian's (ROCm 5.2.3) is inside
// libamdhip64.so.5.
TEST(RealHiprtc, CompilesForWhatItKnows) {
  Compiler compiler(default_search(CompilerKind::hiprtc), amd_device_text());
  if (!compiler.library().is_present())
    GTEST_SKIP() << "needs hipRTC: " << compiler.library().why_absent();
  ASSERT_THAT(names_of(compiler.architectures()), Contains("gfx90a")) << compiler.version();
  for (const Architecture& architecture : compiler.architectures()) {
    SCOPED_TRACE(architecture.name());
    const Cubin cubin = compiler.compile(small_kernel(), architecture);
    EXPECT_GT(cubin.report.registers, 0);
    EXPECT_THAT(read_code_object(cubin.image).target, HasSubstr(architecture.name()));
  }
  try {
    compiler.compile({.unit = "\nint f() { return missing_name; }\n", .label = "broken"},
                     compiler.architectures().front());
    FAIL();
  } catch (const CompileError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr(":2: use of undeclared identifier 'missing_name'"),
                                    HasSubstr("in 'int f() { return missing_name; }'")));
  }
}

}  // namespace
}  // namespace fovea::cuda::jit
