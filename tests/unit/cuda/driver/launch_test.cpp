#include "cuda/driver/launch.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <type_traits>
#include <vector>

#include "fovea/error.hpp"

#include "cuda/driver/resources.hpp"
#include "cuda/driver/tensor_map.hpp"
#include "unit/cuda/driver/fake_libcuda.hpp"

namespace fovea::cuda::driver {
namespace {

using testing::HasSubstr;
using testing::Not;

static_assert(!std::is_default_constructible_v<Stream>, "a launch cannot forget its stream");

constexpr std::array<std::byte, 4> kImage{};

/// A fake device, its context, and a kernel in it.
class Launch : public testing::Test {
 protected:
  FakeState& fake = fresh_fake();
  Driver driver{kFakeLibcuda};
  DeviceContext context{driver, 0};
  Module module{context, kImage, "kernel of the test"};
  Function function = module.function("fovea_kernel");
};

TEST_F(Launch, PassesExtentsBytesStreamAndParameters) {
  struct Params {
    int a;
    float b;
  };
  fake.first_parameter_bytes = sizeof(Params);
  const Params params{.a = 7, .b = 0.5F};
  auto* stream = reinterpret_cast<void*>(0x99);
  launch({.grid = {3, 4, 5}, .block = {128}, .shared_bytes = 1024, .stream = Stream(stream)},
         function, params);
  EXPECT_EQ(fake.launch.grid_x, 3U);
  EXPECT_EQ(fake.launch.grid_y, 4U);
  EXPECT_EQ(fake.launch.grid_z, 5U);
  EXPECT_EQ(fake.launch.block_x, 128U);
  EXPECT_EQ(fake.launch.block_y, 1U);
  EXPECT_EQ(fake.launch.shared_bytes, 1024U);
  EXPECT_EQ(fake.launch.stream, stream);
  EXPECT_TRUE(fake.attributes.empty());
  Params seen{};
  std::memcpy(&seen, fake.first_parameter.data(), sizeof(seen));
  EXPECT_EQ(seen.a, 7);
  EXPECT_EQ(seen.b, 0.5F);
}

TEST_F(Launch, ClusterAndDependentLaunchAreAttributes) {
  launch(
      {.grid = {4}, .block = {32}, .stream = Stream(nullptr), .cluster = {2, 1, 1}, .is_pdl = true},
      function, 0);
  ASSERT_EQ(fake.attributes.size(), 2U);
  EXPECT_EQ(fake.attributes[0].id, LaunchAttribute::cluster_dimension);
  EXPECT_EQ(fake.attributes[0].value.cluster.x, 2U);
  EXPECT_EQ(fake.attributes[1].id, LaunchAttribute::programmatic_stream_serialization);
  EXPECT_EQ(fake.attributes[1].value.is_programmatic, 1);
}

// Loads are among the calls that would end a capture, whoever's it is.
TEST_F(Launch, ModulesAreLoadedAndUnloadedInRelaxedCaptureMode) {
  constexpr int kGlobal = 0, kRelaxed = 2;
  fake.modes_of_loads.clear();
  { const Module another(context, kImage, "another"); }
  EXPECT_EQ(fake.modes_of_loads, (std::vector{kRelaxed, kRelaxed}));
  EXPECT_EQ(fake.capture_mode, kGlobal);
  fake.fail("cuModuleLoadDataEx", 200);
  EXPECT_THROW(Module(context, kImage, "refused"), ImageRefused);
  EXPECT_EQ(fake.capture_mode, kGlobal);
}

TEST_F(Launch, ModuleKnowsWhetherAGraphHasCapturedALaunch) {
  const Stream stream(reinterpret_cast<void*>(0x99));
  launch({.grid = {1}, .block = {32}, .stream = stream}, function, 0);
  EXPECT_FALSE(module.is_captured());
  fake.is_capturing = true;
  launch({.grid = {1}, .block = {32}, .stream = stream}, function, 0);
  EXPECT_TRUE(module.is_captured());
  fake.is_capturing = false;
  launch({.grid = {1}, .block = {32}, .stream = stream}, function, 0);
  EXPECT_TRUE(module.is_captured());
  EXPECT_EQ(fake.count("cuStreamIsCapturing"), 2) << "what is known is not asked again";
}

constexpr LaunchConfig kOnDefaultStream{.grid = {1}, .block = {32}, .stream = Stream(nullptr)};

// As PyTorch has them: its default stream is NULL there, which is the green context's as long as that is current.
TEST_F(Launch, GreenContextStaysCurrentSoThatTheDefaultStreamIsItsOwn) {
  fake.context_stack = {reinterpret_cast<ContextHandle>(0x77)};
  fake.green_context = reinterpret_cast<GreenContextHandle>(0x88);
  fake.calls.clear();
  launch(kOnDefaultStream, function, 0);
  EXPECT_EQ(fake.count("cuLaunchKernelEx"), 1);
  EXPECT_EQ(fake.count("cuCtxPushCurrent_v2"), 0);
}

// The primary context's default stream would run beside it, before what it waits for.
TEST_F(Launch, DefaultStreamOfAMadeContextIsRefusedByName) {
  fake.context_stack = {reinterpret_cast<ContextHandle>(0x77)};
  fake.calls.clear();
  try {
    launch(kOnDefaultStream, function, 0);
    FAIL();
  } catch (const DeviceError& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("the default stream is of another context than the primary one of Fake"));
  }
  EXPECT_EQ(fake.count("cuLaunchKernelEx"), 0);
  launch({.grid = {1}, .block = {32}, .stream = Stream(reinterpret_cast<void*>(0x99))}, function,
         0);
  EXPECT_EQ(fake.count("cuCtxPushCurrent_v2"), 1) << "a named stream is what it is";
  EXPECT_EQ(fake.context_stack.size(), 1U);
}

TEST_F(Launch, DefaultStreamIsTheDevicesOwnWhereAnotherDeviceIsCurrent) {
  fake.context_stack = {reinterpret_cast<ContextHandle>(0x101)};
  fake.current_device = 1;
  fake.calls.clear();
  launch(kOnDefaultStream, function, 0);
  EXPECT_EQ(fake.count("cuCtxPushCurrent_v2"), 1);
  EXPECT_EQ(fake.count("cuLaunchKernelEx"), 1);
}

TEST_F(Launch, StreamOfAnotherContextIsRefusedByName) {
  constexpr Result kInvalidHandle = 400;
  fake.fail("cuLaunchKernelEx", kInvalidHandle);
  fake.stream_context = reinterpret_cast<ContextHandle>(0x77);
  try {
    launch({.grid = {1}, .block = {32}, .stream = Stream(reinterpret_cast<void*>(0x99))}, function,
           0);
    FAIL();
  } catch (const DeviceError& error) {
    EXPECT_THAT(
        error.what(),
        HasSubstr(
            "the stream is none of the primary context of Fake H200, but of a green context"));
  }
}

TEST_F(Launch, EmptyGridLaunchesNothing) {
  launch({.grid = {4, 0, 1}, .block = {32}, .stream = Stream(nullptr)}, function, 0);
  EXPECT_EQ(fake.count("cuLaunchKernelEx"), 0);
}

TEST_F(Launch, RefusalTellsTheConfiguration) {
  fake.failing_call = "cuLaunchKernelEx";
  fake.failing_result = 701;
  try {
    launch({.grid = {2}, .block = {1024}, .shared_bytes = 99, .stream = Stream(nullptr)}, function,
           0);
    FAIL();
  } catch (const DeviceError& error) {
    EXPECT_THAT(error.what(), HasSubstr("cuLaunchKernelEx: CUDA_ERROR_FAKE"));
    EXPECT_THAT(error.what(), HasSubstr("1024x1x1 threads, 99 bytes"));
    EXPECT_THAT(error.what(), Not(HasSubstr("green context")));
  }
}

// The thread's own context is another's: ours is pushed for the launch and popped behind it. Where it
// is ours already, nothing is pushed.
TEST_F(Launch, LeavesTheThreadsContextAsItWas) {
  const auto foreign = reinterpret_cast<ContextHandle>(0x77);
  fake.context_stack = {foreign};
  fake.current_device = 1;
  fake.calls.clear();
  launch({.grid = {1}, .block = {32}, .stream = Stream(nullptr)}, function, 0);
  EXPECT_EQ(fake.context_stack, std::vector{foreign});
  EXPECT_EQ(fake.count("cuCtxPushCurrent_v2"), 1);

  fake.context_stack = {context.handle()};
  fake.calls.clear();
  launch({.grid = {1}, .block = {32}, .stream = Stream(nullptr)}, function, 0);
  EXPECT_EQ(fake.count("cuCtxPushCurrent_v2"), 0);
}

TEST_F(Launch, SharedMemoryIsOptedInOnceAndNotByLaunches) {
  EXPECT_EQ(fake.max_dynamic_shared_bytes, kFakeSharedBytesPerCta - kFakeStaticSharedBytes);
  launch({.grid = {1}, .block = {32}, .stream = Stream(nullptr)}, function, 0);
  launch({.grid = {1}, .block = {32}, .stream = Stream(nullptr)}, function, 0);
  EXPECT_EQ(fake.count("cuFuncSetAttribute"), 1);
}

TEST_F(Launch, ImageThatTheDriverRefusesIsNamed) {
  fake.failing_call = "cuModuleLoadDataEx";
  fake.failing_result = 200;
  try {
    const Module refused(context, kImage, "sm80/attention_forward bf16");
    FAIL();
  } catch (const DeviceError& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("kernel sm80/attention_forward bf16, 4 bytes, on Fake H200"));
  }
}

TEST_F(Launch, GraphHoldsWhatIsEnqueuedWhileItIsCaptured) {
  fake.calls.clear();
  const Graph graph(context, [&](Stream stream) {
    launch({.grid = {1}, .block = {32}, .stream = stream}, function, 0);
  });
  graph.launch(Stream(nullptr));
  EXPECT_EQ(fake.count("cuGraphLaunch"), 1);
  EXPECT_EQ(fake.count("cuGraphDestroy"), 1);
  EXPECT_EQ(fake.count("cuStreamDestroy_v2"), 1);
}

TEST_F(Launch, CaptureEndsWhereEnqueueingThrows) {
  fake.calls.clear();
  EXPECT_THROW(Graph(context, [](Stream) { throw Unsupported("no"); }), Unsupported);
  EXPECT_EQ(fake.count("cuStreamEndCapture"), 1);
  EXPECT_EQ(fake.count("cuGraphDestroy"), 1);
}

TEST_F(Launch, ResourcesAreGivenBack) {
  fake.calls.clear();
  {
    DeviceMemory memory(context, 64);
    const DeviceMemory moved = std::move(memory);
    const Event event(context);
    const OwnedStream stream(context);
    EXPECT_EQ(moved.bytes(), 64U);
  }
  EXPECT_EQ(fake.count("cuMemFree_v2"), 1);
  EXPECT_EQ(fake.count("cuEventDestroy_v2"), 1);
  EXPECT_EQ(fake.count("cuStreamDestroy_v2"), 1);
}

TEST_F(Launch, TensorMapStridesAreThoseOfTheOuterDimensions) {
  const TensorMapSpec spec{
      .rank = 3, .shape = {128, 512, 8}, .stride_bytes = {2, 256, 131072}, .box = {64, 128, 1}};
  encode_tiled(context, spec, nullptr);
  EXPECT_THAT(fake.map_strides, testing::ElementsAre(256U, 131072U));
  fake.failing_call = "cuTensorMapEncodeTiled";
  fake.failing_result = 1;
  try {
    encode_tiled(context, spec, nullptr);
    FAIL();
  } catch (const DeviceError& error) {
    EXPECT_THAT(error.what(), HasSubstr("shape [128, 512, 8]"));
  }
}

}  // namespace
}  // namespace fovea::cuda::driver
