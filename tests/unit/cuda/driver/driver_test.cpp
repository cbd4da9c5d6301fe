#include "cuda/driver/driver.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <memory>

#include "fovea/error.hpp"

#include "cuda/driver/launch.hpp"
#include "cuda/driver/resources.hpp"
#include "unit/cuda/driver/fake_libcuda.hpp"

namespace fovea::cuda::driver {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(Driver, AbsentLibraryIsOneLineThatNamesIt) {
  const Driver driver("libcuda_that_nobody_has.so.1");
  EXPECT_FALSE(driver.is_present());
  EXPECT_THAT(driver.why_absent(),
              AllOf(HasSubstr("libcuda_that_nobody_has.so.1"), Not(HasSubstr("\n"))));
  EXPECT_EQ(driver.version(), 0);
  EXPECT_TRUE(driver.devices().empty());
  EXPECT_THROW(driver.api(), Unsupported);
  EXPECT_THROW(driver.device(0), Unsupported);
}

// Any library that is no driver: the C library's mathematics.
TEST(Driver, LibraryThatIsNoDriverIsRefusedByTheFunctionItLacks) {
  const Driver driver("libm.so.6");
  EXPECT_FALSE(driver.is_present());
  EXPECT_THAT(driver.why_absent(), HasSubstr("libm.so.6 lacks cuInit"));
}

TEST(Driver, StartThatFailsIsToldInTheDriversOwnWords) {
  FakeState& fake = fresh_fake();
  fake.failing_call = "cuInit";
  fake.failing_result = 100;
  const Driver driver(kFakeLibcuda);
  EXPECT_EQ(driver.why_absent(), "cuInit: CUDA_ERROR_FAKE (100, as the test asked)");
}

TEST(Driver, MachineWithoutDevicesIsAbsent) {
  fresh_fake().num_devices = 0;
  EXPECT_THAT(Driver(kFakeLibcuda).why_absent(), HasSubstr("no device"));
}

TEST(Driver, DescribesEveryDevice) {
  fresh_fake().num_devices = 2;
  const Driver driver(kFakeLibcuda);
  ASSERT_TRUE(driver.is_present()) << driver.why_absent();
  EXPECT_EQ(driver.version(), 13000);
  ASSERT_EQ(driver.devices().size(), 2U);
  const DeviceInfo& device = driver.device(1);
  EXPECT_EQ(device.index, 1);
  EXPECT_EQ(device.name, "Fake H200");
  EXPECT_EQ(device.compute_capability_major, 9);
  EXPECT_EQ(device.num_sms, 132);
  EXPECT_EQ(device.shared_bytes_per_cta, kFakeSharedBytesPerCta);
  EXPECT_EQ(device.memory_bytes, std::int64_t{141} << 30U);
}

TEST(Driver, DeviceThatIsNotThereIsRefusedByItsNumber) {
  fresh_fake();
  const Driver driver(kFakeLibcuda);
  for (const int index : {-1, 1}) {
    try {
      driver.device(index);
      FAIL() << index;
    } catch (const Unsupported& error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("cuda:" + std::to_string(index)), HasSubstr("1 device")));
    }
  }
}

TEST(Driver, FailedCallIsADeviceErrorWithTheCallTheNameAndWhatItWasAbout) {
  fresh_fake();
  const Driver driver(kFakeLibcuda);
  EXPECT_NO_THROW(driver.check(kSuccess, "cuSomething"));
  try {
    driver.check(700, "cuSomething", "kernel k");
    FAIL();
  } catch (const DeviceError& error) {
    EXPECT_EQ(error.kind(), ErrorKind::device_error);
    EXPECT_STREQ(error.what(), "cuSomething: CUDA_ERROR_FAKE (700, as the test asked); kernel k");
  }
}

// Contexts do not survive a fork: the driver's own words would be "initialization error", from whatever call comes
// first.
TEST(Driver, ForkedChildIsToldSoByEveryCallAndFreesNothing) {
  FakeState& fake = fresh_fake();
  const Driver driver(kFakeLibcuda);
  const DeviceContext context(driver, 0);
  constexpr std::array<std::byte, 4> kImage{};
  auto module = std::make_unique<Module>(context, kImage, "kernel of the test");
  const Function function = module->function("fovea_kernel");
  auto memory = std::make_unique<DeviceMemory>(context, 64);
  EXPECT_TRUE(driver.is_usable());
  fake.calls.clear();
  const pid_t child = ::fork();
  if (child == 0) {
    const auto is_told = [&](const auto& call) {
      try {
        call();
      } catch (const DeviceError& error) {
        return error.what() == kForked;
      }
      return false;
    };
    const bool are_told =
        is_told([&] {
          launch({.grid = {1}, .block = {32}, .stream = Stream(nullptr)}, function, 0);
        }) &&
        is_told([&] { Module(context, kImage, "another"); }) &&
        is_told([&] { memory->fill(0, Stream(nullptr)); });
    module.reset();
    memory.reset();
    ::_exit(are_told && fake.calls.empty() ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(driver.is_usable()) << "the parent";
}

}  // namespace
}  // namespace fovea::cuda::driver
