// Plans for GPUs of AMD: chosen, compiled, loaded and launched on a fake device, and compiled by a real hipRTC where
// there is one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "fovea/error.hpp"

#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/kernels.hpp"
#include "cuda/kernel_set.hpp"
#include "unit/cuda/driver/fake_libcuda.hpp"
#include "unit/cuda/forward/posed.hpp"
#include "unit/cuda/jit/support.hpp"

namespace fovea::cuda {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

class HipPlan : public testing::Test {
 protected:
  jit::LoaderOptions options() const {
    jit::LoaderOptions result;
    result.hiprtc.named = kFakeLibhiprtc;
    result.disk = {.folder = folder / "kernels"};
    result.pack = std::nullopt;
    return result;
  }

  jit::TemporaryFolder folder;
  driver::FakeState& fake = driver::fresh_fake(kFakeLibamdhip64);
  driver::Driver driver{Device::Kind::rocm, {kFakeLibamdhip64}};
  driver::DeviceContext context{driver, 0};
};

TEST_F(HipPlan, KernelsOfEveryDtypeAreCompiledLoadedAndLaunched) {
  const DeviceTraits device = traits_of(context.info());
  EXPECT_EQ(device.gfx, 0x942);
  EXPECT_EQ(device.warp_lanes, 64);
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    const ForwardProblem problem = pose({.dtype = dtype, .head_dim_qk = 64, .head_dim_v = 64});
    ForwardPlan plan = choose_forward(problem, device);
    EXPECT_EQ(plan.candidate, dtype == Dtype::f32 ? "cuda/sm80/attention_forward_f32"
                                                  : "cuda/cdna/attention_forward")
        << name(dtype);
    jit::Loader loader(options());
    ForwardLadder::load_or_fall_back(loader, context, problem, plan);
    EXPECT_EQ(plan.kernel_source, "hipRTC 20.0.0git");
    ASSERT_NE(plan.kernels, nullptr);
    const int params = 0;
    KernelLaunch launch = kernel_launch(KernelRole::main, params);
    launch.grid = {2, 3, 1};
    launch.num_threads = 256;
    KernelLaunches launches;
    launches.add(launch);
    enqueue(*plan.kernels, launches, driver::Stream(nullptr));
    EXPECT_EQ(fake.launch.grid_y, 3U);
    EXPECT_EQ(fake.launch.block_x, 256U);
  }
}

TEST_F(HipPlan, WhatIsNvidiasIsRefusedByName) {
  const ForwardProblem problem = pose({.dtype = Dtype::bf16, .head_dim_qk = 64, .head_dim_v = 512});
  const ForwardPlan plan = choose_forward(problem, traits_of(context.info()));
  EXPECT_EQ(plan.candidate, "");
  const auto reason_of = [&](std::string_view candidate) {
    const auto found = std::ranges::find(plan.refused, candidate, &Explanation::Refused::candidate);
    return found == plan.refused.end() ? "it is not refused" : found->reason;
  };
  EXPECT_EQ(reason_of("cuda/sm80/attention_forward_f32"),
            "head_dim_v is 512; expected at most 256 on GPUs of AMD");
  for (const char* nvidias : {"cuda/sm80/attention_forward", "cuda/sm90/attention_forward"}) {
    EXPECT_EQ(reason_of(nvidias), "this is gfx942 of AMD; expected a GPU of NVIDIA") << nvidias;
  }
}

TEST_F(HipPlan, CompilerThatIsTooOldForTheDeviceIsARefusal) {
  const ForwardProblem problem = pose({.dtype = Dtype::f32, .head_dim_qk = 64, .head_dim_v = 64});
  ForwardPlan plan = choose_forward(problem, traits_of(context.info()));
  jit::Loader loader(options());
  ForwardLadder::check(loader, {.major = 0, .minor = 0, .gfx = 0x900}, problem, plan);
  EXPECT_EQ(plan.candidate, "");
  EXPECT_THAT(plan.refused.back().reason, HasSubstr("hipRTC 20.0.0git does not know gfx900"));
}

// The process's own driver is absent here, or FOVEA_HIP names one.
TEST(HipProcess, DeviceWithoutADriverIsRefusedByName) {
  if (driver::process_driver(Device::Kind::rocm).is_present()) GTEST_SKIP() << "there is one";
  const ForwardProblem problem = pose({.dtype = Dtype::f32, .head_dim_qk = 64, .head_dim_v = 64});
  try {
    ForwardLadder::plan_on(problem, Device::rocm(0));
    FAIL();
  } catch (const Unsupported& error) {
    EXPECT_THAT(error.what(), AllOf(StartsWith("plan: no kernel for this problem on rocm:0:"),
                                    HasSubstr("no AMD driver: ")));
  }
}

// All kernels of a plan of each dtype, as hipRTC itself compiles them: neither GPU nor driver is needed.
TEST(RealHiprtc, CompilesThePlansOfTheF32Kernel) {
  jit::Compiler compiler(jit::default_search(jit::CompilerKind::hiprtc), jit::amd_device_text());
  if (!compiler.library().is_present())
    GTEST_SKIP() << "needs hipRTC: " << compiler.library().why_absent();
  for (const jit::Architecture& architecture : compiler.architectures()) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      SCOPED_TRACE(architecture.name() + " " + std::string(name(dtype)));
      const ForwardProblem problem = pose({.dtype = dtype, .head_dim_qk = 64, .head_dim_v = 64});
      const ForwardPlan plan = choose_forward(problem, typical_device(architecture));
      for (const PlannedKernel& kernel : planned_kernels(plan)) {
        const jit::Cubin cubin = compiler.compile(kernel.text, architecture);
        EXPECT_GT(cubin.report.registers, 0);
        EXPECT_EQ(cubin.report.spill_bytes, 0);
      }
    }
  }
}

}  // namespace
}  // namespace fovea::cuda
