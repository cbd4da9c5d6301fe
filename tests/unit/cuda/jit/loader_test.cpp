#include "cuda/jit/loader.hpp"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <thread>

#include "fovea/error.hpp"

#include "cuda/availability.hpp"
#include "cuda/driver/launch.hpp"
#include "cuda/kernel_set.hpp"
#include "unit/cuda/driver/fake_libcuda.hpp"
#include "unit/cuda/jit/fake_libnvrtc.hpp"
#include "unit/cuda/jit/support.hpp"

namespace fovea::cuda::jit {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr Architecture kHopper{9, 0};

/// Loaders over one folder, with or without a compiler and a pack; a fake device to load into.
class LoaderTest : public testing::Test {
 protected:
  LoaderOptions options() const {
    LoaderOptions result;
    result.disk = {.folder = folder / "kernels"};
    result.pack = std::nullopt;
    return result;
  }
  LoaderOptions without_compiler() const {
    LoaderOptions result = options();
    result.nvrtc = search_nowhere();
    return result;
  }
  /// A pack of the small kernels 0 .. count - 1 whose cubins are not real: the fake driver takes them.
  std::string make_pack(int count) const {
    std::vector<PackItem> items;
    for (int i = 0; i < count; ++i) {
      items.push_back({text_key(small_kernel(i), embedded_device_text(), kHopper),
                       entry_number(static_cast<std::uint64_t>(i))});
    }
    write_pack(folder / "kernels.pack", items);
    return folder / "kernels.pack";
  }

  TemporaryFolder folder;
  driver::FakeState& fake = driver::fresh_fake();
  driver::Driver driver{kFakeLibcuda};
  driver::DeviceContext context{driver, 0};
};

TEST_F(LoaderTest, SecondLoaderFindsOnDiskWhatTheFirstCompiled) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  Loader first(options());
  const Cubin compiled = first.cubin(small_kernel(), kHopper);
  EXPECT_EQ(first.counts().compiled, 1);
  EXPECT_EQ(first.counts().from_disk, 0);

  Loader second(options());
  const Cubin found = second.cubin(small_kernel(), kHopper);
  EXPECT_EQ(second.counts().compiled, 0);
  EXPECT_EQ(second.counts().from_disk, 1);
  EXPECT_EQ(found.image, compiled.image);
  EXPECT_EQ(found.report.registers, compiled.report.registers);
  EXPECT_EQ(found.report.log, compiled.report.log);
}

// Each of these shapes the code, so each compiles; the label does not.
TEST_F(LoaderTest, TextArchitectureAndHeadersAreTheKeyAndTheLabelIsNot) {
  const Sha256 key = text_key(small_kernel(), embedded_device_text(), kHopper);
  KernelText renamed = small_kernel();
  renamed.label = "another name";
  EXPECT_EQ(text_key(renamed, embedded_device_text(), kHopper), key);
  EXPECT_NE(text_key(small_kernel(1), embedded_device_text(), kHopper), key);
  EXPECT_NE(text_key(small_kernel(), embedded_device_text(), {8, 0}), key);
  const SourceFile headers[] = {{"shared/types.h", "// another text\n"}};
  EXPECT_NE(text_key(small_kernel(), make_device_text(headers), kHopper), key);
}

/// A release that changes the text of other kernels finds this one on disk.
TEST_F(LoaderTest, HeadersThatAUnitDoesNotIncludeAreNotItsKey) {
  const KernelText unit{.unit = "#include \"a/kernel.cuh\"\nvoid f() {}\n", .label = "f"};
  const auto key_of = [&](std::vector<SourceFile> files) {
    return text_key(unit, make_device_text(files), kHopper);
  };
  const SourceFile kernel{"a/kernel.cuh", "#pragma once\n#if 0\n#include \"a/base.cuh\"\n#endif\n"};
  const SourceFile base{"a/base.cuh", "#include \"a/kernel.cuh\"\n// includes it in turn\n"};
  const SourceFile other{"a/other.cuh", "// of another kernel\n"};
  const Sha256 key = key_of({kernel, base, other});
  EXPECT_EQ(key_of({other, base, kernel}), key_of({base, kernel}));
  EXPECT_EQ(key_of({kernel, base, {"a/other.cuh", "// another text\n"}}), key);
  EXPECT_NE(key_of({kernel, {"a/base.cuh", "// another text\n"}, other}), key);
  EXPECT_NE(key_of({{"a/kernel.cuh", "#pragma once\n"}, base, other}), key);
  EXPECT_NE(key_of({kernel, other}), key);
}

/// The roles that come last, too: there once were more of them than places.
TEST_F(LoaderTest, ASetHasAPlaceForEveryRole) {
  LoaderOptions packed = without_compiler();
  packed.pack = make_pack(3);
  Loader loader(packed);
  PlannedKernels kernels;
  for (const KernelRole role :
       {KernelRole::range_tables, KernelRole::write_sums, KernelRole::captured_tiles})
    kernels.push_back({role, small_kernel(static_cast<int>(kernels.size()))});
  const KernelSet set(loader, context, kernels);
  EXPECT_EQ(&set.context(), &context);
  EXPECT_EQ(&set.loader(), &loader);
  for (const PlannedKernel& kernel : kernels) EXPECT_NO_THROW(set[kernel.role]);
}

TEST_F(LoaderTest, TornEntryIsCompiledAgainAndReplaced) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  const Cubin right = Loader(options()).cubin(small_kernel(), kHopper);
  std::string file;
  for (const auto& row : DiskCache(options().disk).list()) file = folder / ("kernels/" + row.file);
  std::string bytes = read_text(file);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 0x10);
  write_text(file, bytes);

  Loader loader(options());
  EXPECT_EQ(loader.cubin(small_kernel(), kHopper).image, right.image);
  EXPECT_EQ(loader.counts().compiled, 1);
  Loader after(options());
  EXPECT_EQ(after.cubin(small_kernel(), kHopper).image, right.image);
  EXPECT_EQ(after.counts().compiled, 0);
}

TEST_F(LoaderTest, FolderThatCannotBeWrittenCostsACompilationAndNoMore) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  write_text(folder / "file", "");
  LoaderOptions nowhere = options();
  nowhere.disk.folder = folder / "file/kernels";
  Loader loader(nowhere);
  EXPECT_FALSE(loader.cubin(small_kernel(), kHopper).image.empty());
  EXPECT_EQ(loader.counts().compiled, 1);
  EXPECT_THAT(loader.disk().why_not_kept(), HasSubstr("file/kernels"));
}

// Compilations killed at any moment, then the result that an undisturbed one gives.
TEST_F(LoaderTest, KilledCompilationsLeaveTheRightResult) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  std::vector<Cubin> right;
  Compiler compiler;
  for (int i = 0; i < 3; ++i) right.push_back(compiler.compile(small_kernel(i), kHopper));
  std::minstd_rand random(11);
  for (int round = 0; round < 25; ++round) {
    kill_after(static_cast<useconds_t>(random() % 120000), [&] {
      for (int i = 0;; ++i) Loader(options()).cubin(small_kernel(i % 3), kHopper);
    });
    Loader loader(options());
    const int i = round % 3;
    EXPECT_EQ(loader.cubin(small_kernel(i), kHopper).image,
              right[static_cast<std::size_t>(i)].image);
    if (round % 8 == 7) loader.disk().clear();
  }
}

TEST_F(LoaderTest, EightProcessesAtOnceGetTheSameKernel) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  Compiler compiler;
  const Cubin right = compiler.compile(small_kernel(), kHopper);
  std::array<pid_t, 8> children{};
  for (pid_t& child : children) {
    child = ::fork();
    if (child != 0) continue;
    try {
      ::_exit(Loader(options()).cubin(small_kernel(), kHopper).image == right.image ? 0 : 1);
    } catch (...) {
      ::_exit(2);
    }
  }
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  Loader after(options());
  after.cubin(small_kernel(), kHopper);
  EXPECT_EQ(after.counts().compiled, 0);
}

TEST_F(LoaderTest, PackServesWithoutCompilerAndComesBeforeTheDisk) {
  LoaderOptions packed = without_compiler();
  packed.pack = make_pack(2);
  Loader loader(packed);
  EXPECT_TRUE(is_number({loader.cubin(small_kernel(1), kHopper), "kernel 1", "", ""}, 1));
  EXPECT_EQ(loader.counts().from_pack, 1);
  EXPECT_EQ(loader.counts().compiled, 0);
}

TEST_F(LoaderTest, KernelsSayWhereTheyComeFrom) {
  LoaderOptions packed = without_compiler();
  packed.pack = make_pack(1);
  Loader loader(packed);
  const Availability found = loader.look_for(small_kernel(0), kHopper);
  EXPECT_EQ(found.why_missing, "");
  EXPECT_EQ(found.source, KernelSource::pack);
  EXPECT_EQ(loader.load(small_kernel(0), context)->source, KernelSource::pack);
  EXPECT_EQ(loader.describe(KernelSource::pack, {8, 0}), "kernel pack " + *packed.pack);
  EXPECT_THAT(loader.look_for(small_kernel(1), kHopper).why_missing,
              HasSubstr("is in no kernel pack"));
}

TEST_F(LoaderTest, KernelsOfTheCompilerAndTheDiskSaySo) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  Loader first(options());
  EXPECT_EQ(first.look_for(small_kernel(), kHopper).source, KernelSource::compiler);
  EXPECT_EQ(first.load(small_kernel(), context)->source, KernelSource::compiler);
  Loader second(options());
  EXPECT_EQ(second.look_for(small_kernel(), kHopper).source, KernelSource::disk);
  EXPECT_EQ(second.load(small_kernel(), context)->source, KernelSource::disk);
  EXPECT_EQ(second.describe(KernelSource::disk, {8, 0}), "disk cache");
  EXPECT_EQ(second.describe(KernelSource::compiler, {8, 0}),
            "NVRTC " + second.compiler().version());
}

TEST_F(LoaderTest, KernelThatIsNowhereIsRefusedByName) {
  LoaderOptions packed = without_compiler();
  packed.pack = make_pack(1);
  Loader loader(packed);
  try {
    loader.cubin(small_kernel(5), kHopper);
    FAIL();
  } catch (const Unsupported& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("small kernel 5"), HasSubstr("sm_90a"),
                                    HasSubstr("no kernel compiler")));
  }
}

TEST_F(LoaderTest, PackThatDoesNotServeIsTold) {
  write_text(folder / "bad.pack", "hello");
  LoaderOptions bad = without_compiler();
  bad.pack = folder / "bad.pack";
  const Loader loader(bad);
  EXPECT_EQ(loader.pack(), nullptr);
  EXPECT_THAT(loader.why_no_pack(), HasSubstr("is no kernel pack"));
}

TEST_F(LoaderTest, KernelIsLoadedOnceForEachDevice) {
  LoaderOptions packed = without_compiler();
  packed.pack = make_pack(2);
  Loader loader(packed);
  const auto one = loader.load(small_kernel(0), context);
  const auto again = loader.load(small_kernel(0), context);
  const auto other = loader.load(small_kernel(1), context);
  EXPECT_EQ(one, again);
  EXPECT_NE(one, other);
  EXPECT_EQ(fake.count("cuModuleLoadDataEx"), 2);
  EXPECT_EQ(loader.counts().from_memory, 1);
  EXPECT_EQ(loader.counts().from_pack, 2);

  fake.num_devices = 2;
  const driver::Driver two_devices(kFakeLibcuda);
  const driver::DeviceContext second(two_devices, 1);
  EXPECT_NE(loader.load(small_kernel(0), second), one);
  EXPECT_EQ(fake.count("cuModuleLoadDataEx"), 3);
}

constexpr driver::Result kInvalidImage = 200, kNoSuchFunction = 500, kOutOfMemory = 2;

// Of the pack, then of the disk: the compiler's is taken at last, and the disk has it.
TEST_F(LoaderTest, CubinThatTheDriverRefusesIsLookedForAtTheNextPlace) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  Loader(options()).cubin(small_kernel(), kHopper);
  LoaderOptions packed = options();
  packed.pack = make_pack(1);
  for (const auto& [call, result] : {std::pair{"cuModuleLoadDataEx", kInvalidImage},
                                     std::pair{"cuModuleGetFunction", kNoSuchFunction}}) {
    SCOPED_TRACE(call);
    fake.fail(call, result, 1);
    Loader refused_once(packed);
    EXPECT_NE(refused_once.load(small_kernel(), context), nullptr);
    EXPECT_EQ(refused_once.counts().from_pack, 0);
    EXPECT_EQ(refused_once.counts().from_disk, 1);

    fake.fail(call, result, 2);
    Loader refused_twice(packed);
    EXPECT_NE(refused_twice.load(small_kernel(), context), nullptr);
    EXPECT_EQ(refused_twice.counts().from_disk, 0);
    EXPECT_EQ(refused_twice.counts().compiled, 1);
    EXPECT_EQ(DiskCache(options().disk).list().size(), 1U);
  }
}

TEST_F(LoaderTest, EntryThatTheDriverRefusesIsRemovedFromTheDiskAndOneMoreIsNotKept) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  Loader(options()).cubin(small_kernel(), kHopper);
  fake.fail("cuModuleLoadDataEx", kInvalidImage);
  Loader loader(options());
  EXPECT_THROW(loader.load(small_kernel(), context), driver::ImageRefused);
  EXPECT_EQ(loader.counts().compiled, 1);
  EXPECT_TRUE(DiskCache(options().disk).list().empty());
}

// Another image would fail alike.
TEST_F(LoaderTest, DeviceThatFailsCostsNoEntry) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  Loader(options()).cubin(small_kernel(), kHopper);
  fake.fail("cuModuleLoadDataEx", kOutOfMemory);
  Loader loader(options());
  EXPECT_THROW(loader.load(small_kernel(), context), DeviceError);
  EXPECT_EQ(loader.counts().compiled, 0);
  EXPECT_EQ(DiskCache(options().disk).list().size(), 1U);
}

TEST_F(LoaderTest, RefusalOfThePacksCubinIsToldWhereThereIsNoCompiler) {
  LoaderOptions packed = without_compiler();
  packed.pack = make_pack(1);
  Loader loader(packed);
  fake.fail("cuModuleLoadDataEx", kInvalidImage);
  try {
    loader.load(small_kernel(0), context);
    FAIL();
  } catch (const Unsupported& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("of the kernel pack is refused: cuModuleLoadDataEx"),
                                    HasSubstr("no kernel compiler")));
  }
}

// Plans without end must not fill the device with kernels: those that no plan has any more go, the least recently asked
// first.
TEST_F(LoaderTest, KernelsOfPlansThatAreGoneAreUnloadedBeyondACount) {
  LoaderOptions packed = without_compiler();
  packed.pack = make_pack(8);
  packed.max_unused = 3;
  Loader loader(packed);
  const auto kept = loader.load(small_kernel(0), context);
  for (int i = 1; i < 8; ++i) loader.load(small_kernel(i), context);
  EXPECT_EQ(fake.count("cuModuleUnload"), 3) << "the last is in use while it is loaded";
  EXPECT_EQ(loader.num_loaded(), 5U);
  EXPECT_EQ(loader.load(small_kernel(0), context), kept);
  loader.load(small_kernel(7), context);
  EXPECT_EQ(fake.count("cuModuleLoadDataEx"), 8);
  loader.load(small_kernel(1), context);
  EXPECT_EQ(fake.count("cuModuleLoadDataEx"), 9) << "1 was gone";
}

TEST_F(LoaderTest, KernelsOfPlansThatAreGoneAreUnloadedBeyondAnAmountOfBytes) {
  LoaderOptions packed = without_compiler();
  packed.pack = make_pack(6);
  packed.max_unused_bytes = 2 * 64;  // of two small kernels
  Loader loader(packed);
  for (int i = 0; i < 6; ++i) loader.load(small_kernel(i), context);
  EXPECT_EQ(loader.num_loaded(), 3U);
}

TEST_F(LoaderTest, KernelThatAGraphHasCapturedStaysLoaded) {
  LoaderOptions packed = without_compiler();
  packed.pack = make_pack(6);
  packed.max_unused = 0;
  Loader loader(packed);
  fake.is_capturing = true;
  const driver::Stream stream(reinterpret_cast<void*>(0x99));
  driver::launch({.grid = {1}, .block = {32}, .stream = stream},
                 loader.load(small_kernel(0), context)->function, 0);
  for (int i = 1; i < 6; ++i) loader.load(small_kernel(i), context);
  EXPECT_EQ(loader.num_loaded(), 2U);
  loader.load(small_kernel(0), context);
  EXPECT_EQ(fake.count("cuModuleLoadDataEx"), 6);
}

TEST_F(LoaderTest, FailureIsToldAndTriedAnewByTheNext) {
  LoaderOptions packed = without_compiler();
  packed.pack = make_pack(1);
  Loader loader(packed);
  fake.fail("cuModuleLoadDataEx", 2);
  EXPECT_THROW(loader.load(small_kernel(0), context), DeviceError);
  fake.failing_call.clear();
  EXPECT_NE(loader.load(small_kernel(0), context), nullptr);
}

TEST_F(LoaderTest, ThreadsThatAskAtOnceCompileOnce) {
  FOVEA_SKIP_WITHOUT_NVRTC();
  Loader loader(options());
  std::array<std::shared_ptr<const LoadedKernel>, 6> kernels;
  {
    std::vector<std::jthread> threads;
    for (auto& kernel : kernels)
      threads.emplace_back([&] { kernel = loader.load(small_kernel(), context); });
  }
  for (const auto& kernel : kernels) EXPECT_EQ(kernel, kernels[0]);
  EXPECT_EQ(loader.counts().compiled, 1);
  EXPECT_EQ(loader.counts().from_memory, 5);
}

/// Kernels of one plan, with a compiler that says how many it compiled at once.
class LoadAllTest : public LoaderTest {
 protected:
  LoaderOptions with_fake_compiler(unsigned max_compiled_at_once) const {
    LoaderOptions result = options();
    result.nvrtc.named = kFakeLibnvrtc;
    result.max_compiled_at_once = max_compiled_at_once;
    return result;
  }
  /// Its state, as new.
  static FakeNvrtcState& fresh_compiler(int num_expected, int longest_wait_ms = 5000) {
    void* const library = ::dlopen(kFakeLibnvrtc, RTLD_NOW | RTLD_LOCAL);
    auto* const find =
        reinterpret_cast<FakeNvrtcState* (*)()>(::dlsym(library, "fake_nvrtc_state"));
    return *find() = {.num_expected = num_expected, .longest_wait_ms = longest_wait_ms};
  }

  const KernelText texts[4] = {small_kernel(0), small_kernel(1), small_kernel(2), small_kernel(3)};
  const KernelText broken{.unit = "#error of a program", .label = "a broken kernel"};
};

TEST_F(LoadAllTest, WhatHasToBeCompiledIsCompiledAtOnce) {
  const FakeNvrtcState& compiler = fresh_compiler(/*num_expected=*/3);
  LoaderOptions packed = with_fake_compiler(3);
  packed.pack = make_pack(1);
  Loader loader(packed);
  const KernelText* const asked[] = {&texts[3], &texts[0], &texts[1], &texts[1], &texts[2]};
  const auto kernels = loader.load_all(asked, context);
  EXPECT_EQ(compiler.most_at_once, 3);
  EXPECT_EQ(loader.counts().compiled, 3);
  EXPECT_EQ(loader.counts().from_pack, 1);
  for (std::size_t i = 0; i < kernels.size(); ++i)
    EXPECT_EQ(kernels[i], loader.load(*asked[i], context)) << "kernel " << i << " of the set";
  EXPECT_EQ(kernels[1]->source, KernelSource::pack);
}

TEST_F(LoadAllTest, AtMostSoManyAreCompiledAtOnce) {
  const FakeNvrtcState& compiler = fresh_compiler(/*num_expected=*/3, /*longest_wait_ms=*/100);
  Loader loader(with_fake_compiler(2));
  const KernelText* const asked[] = {&texts[0], &texts[1], &texts[2], &texts[3]};
  loader.load_all(asked, context);
  EXPECT_EQ(compiler.most_at_once, 2);
}

TEST_F(LoadAllTest, OneThatFailsIsToldWhenTheOthersAreThere) {
  fresh_compiler(/*num_expected=*/1);
  for (const unsigned at_once : {1U, 3U}) {
    Loader loader(with_fake_compiler(at_once));
    const KernelText* const asked[] = {&texts[0], &broken, &texts[1]};
    try {
      loader.load_all(asked, context);
      FAIL();
    } catch (const CompileError& error) {
      EXPECT_THAT(error.what(), HasSubstr("a broken kernel"));
    }
    EXPECT_EQ(loader.num_loaded(), 2U) << "the broken one is tried anew";
    EXPECT_NE(loader.load(texts[0], context), nullptr);
    EXPECT_EQ(loader.counts().from_memory, 1);
    EXPECT_THROW(loader.load(broken, context), CompileError);
    loader.disk().clear();
  }
}

// Each waits for what the other brings: at last, or none of them would ever be done.
TEST_F(LoadAllTest, PlansThatShareKernelsDoNotWaitForEachOtherForever) {
  fresh_compiler(/*num_expected=*/1);
  for (int round = 0; round < 50; ++round) {
    LoaderOptions fresh = with_fake_compiler(1);
    fresh.disk.folder = "";
    Loader loader(fresh);
    const KernelText* const asked[] = {&texts[0], &texts[1], &texts[2], &texts[3]};
    const KernelText* const reversed[] = {&texts[3], &texts[2], &texts[1], &texts[0]};
    std::vector<std::shared_ptr<const LoadedKernel>> here, there;
    {
      const std::jthread other([&] { there = loader.load_all(reversed, context); });
      here = loader.load_all(asked, context);
    }
    EXPECT_TRUE(std::equal(here.begin(), here.end(), there.rbegin()));
    EXPECT_EQ(loader.counts().compiled, 4);
  }
}

// Some hundred names are asked of the file system: once, not for every plan.
TEST_F(LoaderTest, CompilerIsSearchedOnce) {
  write_text(folder / "libnvrtc.so.13", "found by its name");
  LoaderOptions here = without_compiler();
  here.nvrtc.folders = {folder.path().string()};
  Loader loader(here);
  EXPECT_EQ(why_unavailable(driver, loader, 0), "");
  std::filesystem::remove(folder / "libnvrtc.so.13");
  EXPECT_EQ(why_unavailable(driver, loader, 0), "");
}

TEST_F(LoaderTest, AvailabilityNamesThePieceThatIsMissing) {
  Loader with_nothing(without_compiler());
  EXPECT_THAT(why_unavailable(driver::Driver("libcuda_that_nobody_has.so.1"), with_nothing, 0),
              HasSubstr("no NVIDIA driver"));
  EXPECT_THAT(why_unavailable(driver, with_nothing, 3), HasSubstr("cuda:3"));
  EXPECT_THAT(why_unavailable(driver, with_nothing, 0), HasSubstr("no kernel compiler"));

  LoaderOptions packed = without_compiler();
  packed.pack = make_pack(1);
  Loader with_pack(packed);
  EXPECT_EQ(why_unavailable(driver, with_pack, 0), "");

  EXPECT_TRUE(
      holds_in_child([&] { return why_unavailable(driver, with_pack, 0) == driver::kForked; }));

  fake.major = 7;
  const driver::Driver old(kFakeLibcuda);
  EXPECT_THAT(why_unavailable(old, with_pack, 0),
              AllOf(HasSubstr("capability 7.0"), HasSubstr("expected 7.5")));
}

}  // namespace
}  // namespace fovea::cuda::jit
