// On a real device: what the fake driver cannot know. Without one, every test is skipped by name.
#include "cuda/driver/launch.hpp"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "fovea/error.hpp"
#include "fovea/mask.hpp"

#include "cuda/availability.hpp"
#include "cuda/driver/resources.hpp"
#include "cuda/driver/tensor_map.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/jit/loader.hpp"
#include "unit/cuda/jit/support.hpp"

namespace fovea::cuda {
namespace {

using driver::Stream;
using testing::HasSubstr;

constexpr std::size_t kCount = 1000;  // not a multiple of the CTA's 128 threads

struct Params {
  std::uint32_t* out;
  std::uint32_t count;
  std::uint32_t addend;
};

/// out[i] += i + addend.
jit::KernelText adding_kernel() {
  return {.unit = R"(#include "shared/types.h"
struct Params { std::uint32_t* out; std::uint32_t count; std::uint32_t addend; };
extern "C" __global__ void __launch_bounds__(128) fovea_kernel(const __grid_constant__ Params p) {
  extern __shared__ std::uint32_t scratch[];
  const std::uint32_t i = blockIdx.x * 128U + threadIdx.x;
  scratch[threadIdx.x] = i;
  __syncthreads();
  if (i < p.count) p.out[i] += scratch[threadIdx.x] + p.addend;
}
)",
          .label = "adding"};
}

double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    const driver::Driver& driver = driver::process_driver();
    if (!driver.is_present()) GTEST_SKIP() << "needs a GPU: " << driver.why_absent();
    options.disk = {.folder = folder / "kernels"};
    options.pack = std::nullopt;
    jit::Loader loader(options);
    if (const std::string why = why_unavailable(driver, loader, 0); !why.empty())
      GTEST_SKIP() << why;
    context = &driver::process_context(Device::cuda());
  }

  driver::LaunchConfig config(Stream stream) const {
    return {.grid = {(kCount + 127) / 128}, .block = {128}, .shared_bytes = 512, .stream = stream};
  }
  std::vector<std::uint32_t> read(const driver::DeviceMemory& memory,
                                  const driver::OwnedStream& stream) const {
    std::vector<std::uint32_t> host(kCount);
    memory.copy_to(std::as_writable_bytes(std::span(host)), stream.get());
    stream.synchronize();
    return host;
  }

  jit::TemporaryFolder folder;
  jit::LoaderOptions options;
  const driver::DeviceContext* context = nullptr;
};

TEST_F(Gpu, KernelRunsAndWritesWhatItShould) {
  jit::Loader loader(options);
  const auto kernel = loader.load(adding_kernel(), *context);
  EXPECT_GT(kernel->function.num_registers, 0);
  const driver::OwnedStream stream(*context);
  driver::DeviceMemory out(*context, kCount * 4);
  out.fill(0, stream.get());
  const Params params{static_cast<std::uint32_t*>(out.data()), kCount, 5};
  driver::launch(config(stream.get()), kernel->function, params);
  const auto host = read(out, stream);
  for (std::size_t i = 0; i < kCount; ++i) ASSERT_EQ(host[i], i + 5) << i;
}

// All dynamic shared memory that the device has may be used at once: the attribute is set at the load.
TEST_F(Gpu, AllSharedMemoryCanBeAskedFor) {
  jit::Loader loader(options);
  const auto kernel = loader.load(adding_kernel(), *context);
  const driver::OwnedStream stream(*context);
  driver::DeviceMemory out(*context, kCount * 4);
  out.fill(0, stream.get());
  driver::LaunchConfig large = config(stream.get());
  large.shared_bytes = static_cast<unsigned>(context->info().shared_bytes_per_cta);
  driver::launch(large, kernel->function,
                 Params{static_cast<std::uint32_t*>(out.data()), kCount, 0});
  EXPECT_EQ(read(out, stream)[999], 999U);
  large.shared_bytes += 16;
  EXPECT_THROW(driver::launch(large, kernel->function, Params{nullptr, 0, 0}), DeviceError);
}

TEST_F(Gpu, LaunchesAreLegalInAGraphAndRunAtEachOfItsLaunches) {
  jit::Loader loader(options);
  const auto kernel = loader.load(adding_kernel(), *context);
  const driver::OwnedStream stream(*context);
  driver::DeviceMemory out(*context, kCount * 4);
  out.fill(0, stream.get());
  const driver::Graph graph(*context, [&](Stream captured) {
    const Params params{static_cast<std::uint32_t*>(out.data()), kCount, 1};
    driver::launch(config(captured), kernel->function, params);
    driver::launch(config(captured), kernel->function, params);
  });
  EXPECT_EQ(read(out, stream)[7], 0U);  // nothing ran while it was captured
  for (int i = 0; i < 3; ++i) graph.launch(stream.get());
  EXPECT_EQ(read(out, stream)[7], 6U * (7 + 1));
}

// Loading and unloading among the calls of a capture, which the driver ends by itself where they may not be there.
TEST_F(Gpu, KernelsAreLoadedAndUnloadedWhileAStreamIsCaptured) {
  jit::Loader loader(options);
  const jit::Cubin cubin = loader.cubin(adding_kernel(), jit::architecture_of(context->info()));
  const driver::OwnedStream stream(*context);
  driver::DeviceMemory out(*context, kCount * 4);
  out.fill(0, stream.get());
  stream.synchronize();
  std::shared_ptr<const jit::LoadedKernel> kernel;
  const driver::Graph graph(*context, [&](Stream captured) {
    { const driver::Module gone(*context, cubin.image, "unloaded at once"); }
    kernel = loader.load(adding_kernel(), *context);
    driver::launch(config(captured), kernel->function,
                   Params{static_cast<std::uint32_t*>(out.data()), kCount, 1});
  });
  EXPECT_TRUE(kernel->module.is_captured());
  graph.launch(stream.get());
  EXPECT_EQ(read(out, stream)[7], 7U + 1);
}

// A plan may go, and its kernels with it, while they run.
TEST_F(Gpu, KernelThatRunsOutlivesItsModule) {
  jit::Loader loader(options);
  const jit::Cubin cubin = loader.cubin(adding_kernel(), jit::architecture_of(context->info()));
  const driver::OwnedStream stream(*context);
  driver::DeviceMemory ahead(*context, std::size_t{1} << 30U), out(*context, kCount * 4);
  out.fill(0, stream.get());
  {
    const driver::Module module(*context, cubin.image, "soon unloaded");
    const driver::Function function = module.function(jit::kEntryName);
    for (int i = 0; i < 20; ++i) ahead.fill(1, stream.get());  // milliseconds
    driver::launch(config(stream.get()), function,
                   Params{static_cast<std::uint32_t*>(out.data()), kCount, 1});
  }
  EXPECT_EQ(read(out, stream)[7], 7U + 1);
}

/// The driver's functions that make a stream of another context than the primary one; null where it cannot.
template <class Function>
Function function_of(const char* name) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Function>(dlsym(library, name));
}

driver::StreamHandle stream_of_a_made_context() {
  const auto create = function_of<int (*)(driver::ContextHandle*, unsigned, int)>("cuCtxCreate_v2");
  driver::ContextHandle made = nullptr;
  if (create == nullptr || create(&made, 0, 0) != 0) return nullptr;  // pushed
  const driver::Api& api = driver::process_driver().api();
  driver::StreamHandle stream = nullptr;
  api.stream_create(&stream, 1);
  api.context_pop(&made);
  return stream;
}

/// Of all SMs; null where the driver has none.
void* green_context() {
  alignas(8) std::array<std::byte, 256> resource{};  // CUdevResource: 144 bytes in CUDA 12.4 to 13
  void* description = nullptr;
  void* green = nullptr;
  const auto get = function_of<int (*)(int, void*, int)>("cuDeviceGetDevResource");
  const auto describe = function_of<int (*)(void**, void*, unsigned)>("cuDevResourceGenerateDesc");
  const auto create = function_of<int (*)(void**, void*, int, unsigned)>("cuGreenCtxCreate");
  if (get == nullptr || describe == nullptr || create == nullptr) return nullptr;
  constexpr int kSms = 1;
  constexpr unsigned kDefaultStream = 1;
  if (get(0, resource.data(), kSms) != 0 || describe(&description, resource.data(), 1) != 0)
    return nullptr;
  return create(&green, description, 0, kDefaultStream) == 0 ? green : nullptr;
}

driver::StreamHandle stream_of_a_green_context() {
  driver::StreamHandle stream = nullptr;
  void* const green = green_context();
  const auto make =
      function_of<int (*)(driver::StreamHandle*, void*, unsigned, int)>("cuGreenCtxStreamCreate");
  if (green == nullptr || make == nullptr || make(&stream, green, 1, 0) != 0) return nullptr;
  return stream;
}

// As PyTorch does it: the green context is made current, and the stream is NULL.
TEST_F(Gpu, DefaultStreamOfAGreenContextIsUsed) {
  void* const green = green_context();
  const auto convert = function_of<int (*)(driver::ContextHandle*, void*)>("cuCtxFromGreenCtx");
  driver::ContextHandle current = nullptr;
  if (green == nullptr || convert == nullptr || convert(&current, green) != 0)
    GTEST_SKIP() << "the driver has no green contexts";
  jit::Loader loader(options);
  const auto kernel = loader.load(adding_kernel(), *context);
  const driver::OwnedStream stream(*context);
  driver::DeviceMemory out(*context, kCount * 4);
  out.fill(0, stream.get());
  stream.synchronize();
  const driver::Api& api = context->api();
  ASSERT_EQ(api.context_push(current), driver::kSuccess);
  driver::launch(config(Stream(nullptr)), kernel->function,
                 Params{static_cast<std::uint32_t*>(out.data()), kCount, 3});
  EXPECT_EQ(function_of<int (*)()>("cuCtxSynchronize")(), 0);
  api.context_pop(&current);
  EXPECT_EQ(read(out, stream)[5], 8U);
}

TEST_F(Gpu, StreamsOfOtherContextsAreUsedOrRefusedByName) {
  jit::Loader loader(options);
  const auto kernel = loader.load(adding_kernel(), *context);
  for (const auto& [name, handle] : {std::pair{"cuCtxCreate", stream_of_a_made_context()},
                                     std::pair{"green", stream_of_a_green_context()}}) {
    if (handle == nullptr) continue;
    const driver::OwnedStream stream(*context);
    driver::DeviceMemory out(*context, kCount * 4);
    out.fill(0, stream.get());
    stream.synchronize();
    try {
      driver::launch(config(Stream(handle)), kernel->function,
                     Params{static_cast<std::uint32_t*>(out.data()), kCount, 3});
      driver::process_driver().api().stream_synchronize(handle);
      EXPECT_EQ(read(out, stream)[5], 8U) << name;
      std::cout << name << ": used\n";
    } catch (const DeviceError& error) {
      EXPECT_THAT(error.what(), HasSubstr("none of the primary context")) << name;
      std::cout << name << ": refused by name\n";
    }
  }
}

TEST_F(Gpu, ForkedChildIsToldSo) {
  jit::Loader loader(options);
  const auto kernel = loader.load(adding_kernel(), *context);
  EXPECT_TRUE(jit::holds_in_child([&] {
    try {
      driver::launch(config(Stream(nullptr)), kernel->function, Params{nullptr, 0, 0});
    } catch (const DeviceError& error) {
      return error.what() == driver::kForked;
    }
    return false;
  }));
}

TEST_F(Gpu, ClustersAndDependentLaunchesWork) {
  if (context->info().compute_capability_major < 9) GTEST_SKIP() << "needs sm_90";
  jit::Loader loader(options);
  const auto kernel = loader.load(adding_kernel(), *context);
  const driver::OwnedStream stream(*context);
  driver::DeviceMemory out(*context, kCount * 4);
  out.fill(0, stream.get());
  driver::LaunchConfig clustered = config(stream.get());
  clustered.cluster = {2};
  clustered.is_pdl = true;
  driver::launch(clustered, kernel->function,
                 Params{static_cast<std::uint32_t*>(out.data()), kCount, 2});
  EXPECT_EQ(read(out, stream)[3], 5U);
}

TEST_F(Gpu, CubinOfAnotherArchitectureIsRefusedByTheDriver) {
  const jit::Architecture own = jit::architecture_of(context->info());
  const jit::Architecture other =
      own.major == 12 ? jit::Architecture{9, 0} : jit::Architecture{12, 0};
  jit::Compiler compiler;
  const jit::Cubin cubin = compiler.compile(adding_kernel(), other);
  try {
    const driver::Module module(*context, cubin.image, "adding");
    FAIL() << "loaded " << other.name();
  } catch (const DeviceError& error) {
    EXPECT_THAT(error.what(), HasSubstr("cuModuleLoadDataEx: CUDA_ERROR_"));
  }
}

TEST_F(Gpu, TensorMapsAreEncodedAndMisalignedOnesRefused) {
  if (context->info().compute_capability_major < 9) GTEST_SKIP() << "needs sm_90";
  driver::DeviceMemory tensor(*context, std::size_t{1} << 20U);
  const driver::TensorMapSpec spec{
      .rank = 2, .shape = {128, 1024}, .stride_bytes = {2, 256}, .box = {64, 64}};
  const auto* address = static_cast<const std::byte*>(tensor.data());
  const driver::TensorMap map = driver::encode_tiled(*context, spec, address);
  EXPECT_EQ(map.opaque[0], reinterpret_cast<std::uint64_t>(address));  // word 0 is the address
  EXPECT_THROW(driver::encode_tiled(*context, spec, address + 2), DeviceError);
}

TEST_F(Gpu, EventsMeasureWhatLiesBetweenThem) {
  const driver::OwnedStream stream(*context);
  driver::DeviceMemory memory(*context, std::size_t{64} << 20U);
  driver::Event start(*context), end(*context);
  start.record(stream.get());
  for (int i = 0; i < 20; ++i) memory.fill(1, stream.get());
  end.record(stream.get());
  end.synchronize();
  EXPECT_GT(end.milliseconds_since(start), 0.0F);
}

/// The kernels of a causal problem in bf16, as a plan has them.
PlannedKernels attention_kernels(const driver::DeviceInfo& device) {
  const TensorSpec spec = make_spec(Dtype::bf16, std::array<std::int64_t, 4>{1, 512, 8, 128});
  const ForwardProblem problem =
      validate({.q = spec, .k = spec, .v = spec, .mask = causal()}, "launch_test");
  return planned_kernels(choose_forward(
      problem, typical_device(device.compute_capability_major, device.compute_capability_minor)));
}

// The bar of the cache: 5 ms for a process's first call where the disk has the kernel, with a context
// that the caller has anyway.
TEST_F(Gpu, FirstCallFromDiskTakesMilliseconds) {
  const PlannedKernels kernels = attention_kernels(context->info());
  const auto compile_start = std::chrono::steady_clock::now();
  jit::Loader(options).load(kernels[0].text, *context);
  const double compile_ms = milliseconds_since(compile_start);
  double worst_ms = 0;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    jit::Loader loader(options);
    loader.load(kernels[0].text, *context);
    worst_ms = std::max(worst_ms, milliseconds_since(start));
    ASSERT_EQ(loader.counts().compiled, 0);
  }
  std::cout << kernels[0].text.label << ": compiled and loaded in " << compile_ms
            << " ms, from disk in " << worst_ms << " ms at worst\n";
  EXPECT_LT(worst_ms, 5);
}

// The bar of a warm call is 5 us of host time, of which this is the launch.
TEST_F(Gpu, WarmLaunchTakesMicroseconds) {
  jit::Loader loader(options);
  const auto kernel = loader.load(adding_kernel(), *context);
  const driver::OwnedStream stream(*context);
  driver::DeviceMemory out(*context, kCount * 4);
  const Params params{static_cast<std::uint32_t*>(out.data()), kCount, 0};
  double best_us = 1e9;
  for (int round = 0; round < 20; ++round) {
    stream.synchronize();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 50; ++i) driver::launch(config(stream.get()), kernel->function, params);
    best_us = std::min(best_us, milliseconds_since(start) * 1000 / 50);
  }
  std::cout << "warm launch " << best_us << " us of host time\n";
  EXPECT_LT(best_us, 5);
}

}  // namespace
}  // namespace fovea::cuda
