#include "cuda/driver/driver.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fovea/error.hpp"

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
  const Driver driver(FOVEA_FAKE_LIBCUDA);
  EXPECT_EQ(driver.why_absent(), "cuInit: CUDA_ERROR_FAKE (100, as the test asked)");
}

TEST(Driver, MachineWithoutDevicesIsAbsent) {
  fresh_fake().num_devices = 0;
  EXPECT_THAT(Driver(FOVEA_FAKE_LIBCUDA).why_absent(), HasSubstr("no device"));
}

TEST(Driver, DescribesEveryDevice) {
  fresh_fake().num_devices = 2;
  const Driver driver(FOVEA_FAKE_LIBCUDA);
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
  const Driver driver(FOVEA_FAKE_LIBCUDA);
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
  const Driver driver(FOVEA_FAKE_LIBCUDA);
  EXPECT_NO_THROW(driver.check(kSuccess, "cuSomething"));
  try {
    driver.check(700, "cuSomething", "kernel k");
    FAIL();
  } catch (const DeviceError& error) {
    EXPECT_EQ(error.kind(), ErrorKind::device_error);
    EXPECT_STREQ(error.what(), "cuSomething: CUDA_ERROR_FAKE (700, as the test asked); kernel k");
  }
}

}  // namespace
}  // namespace fovea::cuda::driver
