// AMD's driver: what differs from NVIDIA's, on a fake without a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "fovea/error.hpp"

#include "cuda/driver/launch.hpp"
#include "cuda/driver/resources.hpp"
#include "unit/cuda/driver/fake_libcuda.hpp"

namespace fovea::cuda::driver {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr std::array<std::byte, 4> kImage{};

Driver hip_of(const std::string& library) { return Driver(Device::Kind::rocm, {library}); }

TEST(HipDriver, AbsentLibraryIsOneLineThatNamesIt) {
  const Driver driver(Device::Kind::rocm, {"libamdhip64_of_nobody.so.6", "libamdhip64_nor.so"});
  EXPECT_FALSE(driver.is_present());
  EXPECT_THAT(driver.why_absent(), AllOf(HasSubstr("AMD"), HasSubstr("libamdhip64_of_nobody.so.6"),
                                         HasSubstr("ROCM_PATH"), Not(HasSubstr("\n"))));
  EXPECT_THROW(driver.api(), Unsupported);
}

// A library without what ROCm 6 has: here another maker's.
TEST(HipDriver, OlderOneIsRefusedByTheFunctionItLacks) {
  EXPECT_THAT(hip_of(kFakeLibcuda).why_absent(),
              AllOf(HasSubstr("lacks hipInit"), HasSubstr("ROCm 6 or newer")));
}

TEST(HipDriver, FirstThatCanBeOpenedIsTaken) {
  fresh_fake(kFakeLibamdhip64);
  const Driver driver(Device::Kind::rocm, {"libamdhip64_of_nobody.so.6", kFakeLibamdhip64});
  EXPECT_EQ(driver.why_absent(), "");
  EXPECT_EQ(driver.path(), kFakeLibamdhip64);
}

// Two of them in one process would not know each other's memory. The first name is that of a library which can be
// opened.
TEST(HipDriver, WhatTheProcessHasComesBeforeWhatIsNamedFirst) {
  EXPECT_THAT(Driver(Device::Kind::rocm, {kFakeLibnccl, "libm.so.6"}).why_absent(),
              HasSubstr("libm.so.6 lacks hipInit"));
  EXPECT_THAT(hip_of(kFakeLibnccl).why_absent(), HasSubstr("lacks hipInit"));
}

TEST(HipDriver, SaysWhatADeviceIs) {
  FakeState& fake = fresh_fake(kFakeLibamdhip64);
  fake.num_devices = 2;
  const Driver driver = hip_of(kFakeLibamdhip64);
  ASSERT_EQ(driver.why_absent(), "");
  EXPECT_EQ(driver.version(), 6020);
  ASSERT_EQ(driver.devices().size(), 2U);
  const DeviceInfo& device = driver.device(1);
  EXPECT_EQ(device.name, "Fake MI300X");
  EXPECT_EQ(device.gfx, 0x942);
  EXPECT_EQ(device.warp_lanes, kFakeHipWarpLanes);
  EXPECT_EQ(device.num_sms, 304);
  EXPECT_EQ(device.shared_bytes_per_cta, kFakeHipSharedBytes);
  EXPECT_EQ(device.l2_bytes, 4 << 20);
  EXPECT_EQ(device.memory_bytes, std::int64_t{192} << 30U);
  EXPECT_EQ(to_string(device.device()), "rocm:1");
}

TEST(HipDriver, ArchitectureIsReadToTheColonAndNothingElse) {
  FakeState& fake = fresh_fake(kFakeLibamdhip64);
  for (const auto& [name, gfx] : {std::pair{"gfx90a:sramecc+:xnack-", 0x90a},
                                  std::pair{"gfx1100", 0x1100}, std::pair{"gfx1201", 0x1201}}) {
    fake.architecture = name;
    EXPECT_EQ(hip_of(kFakeLibamdhip64).device(0).gfx, gfx) << name;
  }
  for (const char* name : {"", "gfx", "gfx9-generic", "sm_90"}) {
    fake.architecture = name;
    EXPECT_THAT(hip_of(kFakeLibamdhip64).why_absent(),
                HasSubstr(std::string("rocm:0 is '") + name + "'"));
  }
}

TEST(HipDriver, DeviceThatIsNotThereIsRefusedByItsName) {
  fresh_fake(kFakeLibamdhip64);
  const Driver driver = hip_of(kFakeLibamdhip64);
  try {
    driver.device(3);
    FAIL();
  } catch (const Unsupported& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("no rocm:3"), HasSubstr("1 device")));
  }
}

/// A fake device of AMD's, and a kernel in it.
class HipLaunch : public testing::Test {
 protected:
  FakeState& fake = fresh_fake(kFakeLibamdhip64);
  Driver driver{Device::Kind::rocm, {kFakeLibamdhip64}};
  DeviceContext context{driver, 0};
  Module module{context, kImage, "kernel of the test"};
  Function function = module.function("fovea_kernel");
};

TEST_F(HipLaunch, PassesExtentsBytesStreamAndParameters) {
  fake.first_parameter_bytes = sizeof(int);
  auto* stream = reinterpret_cast<void*>(0x99);
  launch({.grid = {3, 4, 5}, .block = {128}, .shared_bytes = 1024, .stream = Stream(stream)},
         function, 7);
  EXPECT_EQ(fake.launch.grid_x, 3U);
  EXPECT_EQ(fake.launch.grid_y, 4U);
  EXPECT_EQ(fake.launch.grid_z, 5U);
  EXPECT_EQ(fake.launch.block_x, 128U);
  EXPECT_EQ(fake.launch.block_z, 1U);
  EXPECT_EQ(fake.launch.shared_bytes, 1024U);
  EXPECT_EQ(fake.launch.stream, stream);
  int seen = 0;
  std::memcpy(&seen, fake.first_parameter.data(), sizeof(seen));
  EXPECT_EQ(seen, 7);
}

TEST_F(HipLaunch, FailureIsToldByHipsNameOfTheCall) {
  constexpr Result kIllegalAddress = 700;
  fake.fail("hipModuleLaunchKernel", kIllegalAddress);
  try {
    launch({.grid = {3}, .block = {64}, .stream = Stream(nullptr)}, function, 0);
    FAIL();
  } catch (const DeviceError& error) {
    EXPECT_THAT(error.what(), AllOf(StartsWith("hipModuleLaunchKernel: "), HasSubstr("700"),
                                    HasSubstr("grid 3x1x1, 64x1x1 threads")));
  }
  fake.fail("hipMalloc", 2);
  try {
    const DeviceMemory memory(context, 64);
    FAIL();
  } catch (const DeviceError& error) {
    EXPECT_THAT(error.what(), StartsWith("hipMalloc: "));
  }
}

TEST_F(HipLaunch, ImageThatIsRefusedMayBeReplacedByAnother) {
  constexpr Result kNoBinaryForGpu = 209;
  fake.fail("hipModuleLoadDataEx", kNoBinaryForGpu);
  EXPECT_THROW(Module(context, kImage, "refused"), ImageRefused);
}

// HIP has no contexts: what is current is a device, and the caller's stays what it was.
TEST_F(HipLaunch, DeviceIsSetForTheCallAndTheCallersRestored) {
  fake.num_devices = 2;
  const Driver two = hip_of(kFakeLibamdhip64);
  const DeviceContext second(two, 1);
  fake.current_device = 0;
  {
    const ContextScope outer(second);
    EXPECT_EQ(fake.current_device, 1);
    {
      const ContextScope same(second);
      EXPECT_EQ(fake.count("hipSetDevice"), 1) << "it is the current one already";
    }
    const ContextScope inner(context, nullptr);
    EXPECT_EQ(fake.current_device, 0);
  }
  EXPECT_EQ(fake.current_device, 0);
  fake.calls.clear();
  { const Module another(second, kImage, "another"); }
  EXPECT_EQ(fake.count("hipModuleUnload"), 1);
  EXPECT_EQ(fake.count("hipSetDevice"), 4) << "there and back, to load and to unload";
  EXPECT_EQ(fake.current_device, 0);
}

TEST_F(HipLaunch, StreamsEventsAndGraphsAreHips) {
  fake.calls.clear();
  {
    const OwnedStream stream(context);
    Event event(context, Event::Timing::off);
    event.record(stream.get());
    const Graph graph(context, [](Stream) {});
    graph.launch(stream.get());
  }
  EXPECT_THAT(fake.calls,
              testing::IsSupersetOf({"hipStreamCreateWithFlags", "hipEventCreateWithFlags",
                                     "hipEventRecord", "hipStreamBeginCapture",
                                     "hipGraphInstantiateWithFlags", "hipGraphLaunch",
                                     "hipEventDestroy", "hipStreamDestroy"}));
}

}  // namespace
}  // namespace fovea::cuda::driver
