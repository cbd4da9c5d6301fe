#include "gpu_bound.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "cuda/device/shared/rate_params.h"
#include "cuda/driver/launch.hpp"
#include "cuda/driver/resources.hpp"
#include "cuda/jit/loader.hpp"

namespace fovea::tools {
namespace {

constexpr int kRepeats = 4;
constexpr std::size_t kCopyBytes = std::size_t{1} << 30U;

/// A kernel of device/common/rates.cuh or device/sm90/product_rate.cuh, and what a CTA of it does in a round.
struct Rate {
  std::string includes, entry;
  unsigned ctas_per_sm;
  unsigned shared_bytes;
  double flops_per_round;
};

constexpr const char* kIncludeRates = "#include \"common/rates.cuh\"\n";

Rate fma_rate() {
  return {.includes = kIncludeRates,
          .entry = "fma_rate",
          .ctas_per_sm = 4,
          .shared_bytes = 0,
          .flops_per_round = 2.0 * cuda::kRateChains * cuda::kRateThreads};
}

/// wgmma on Hopper, else mma.sync.
Rate product_rate(const cuda::driver::DeviceInfo& device) {
  if (device.compute_capability_major != 9) {
    constexpr int kProducts =
        cuda::kRateRowBlocks * cuda::kRateColBlocks * (cuda::kRateThreads / 32);
    return {.includes = kIncludeRates,
            .entry = "mma_rate",
            .ctas_per_sm = 2,
            .shared_bytes = 0,
            .flops_per_round = 2.0 * 16 * 8 * 16 * kProducts};
  }
  return {
      .includes = "#include \"ptx/generated/wgmma_bf16.cuh\"\n#include \"sm90/product_rate.cuh\"\n",
      .entry = "sm90::wgmma_rate",
      .ctas_per_sm = 1,
      .shared_bytes = cuda::kRateSharedBytes,
      .flops_per_round = 2.0 * 64 * cuda::kRateGroups * cuda::kRateCols * cuda::kRateDepth};
}

cuda::jit::KernelText text_of(const Rate& rate) {
  return {.unit = fmt::format("{}extern \"C\" __global__ void __launch_bounds__({})\n"
                              "{}(const __grid_constant__ fovea::cuda::RateParams p) {{\n"
                              "  fovea::cuda::{}(p);\n}}\n",
                              rate.includes, cuda::kRateThreads, cuda::jit::kEntryName, rate.entry),
          .label = rate.entry};
}

/// The best of several, each long enough for the power limit to show.
double measure(const Gpu& gpu, const Rate& rate) {
  constexpr double kMilliseconds = 40;
  const auto kernel = cuda::jit::process_loader().load(text_of(rate), gpu.context());
  const cuda::driver::DeviceMemory sink(gpu.context(), sizeof(float));
  cuda::RateParams params{static_cast<float*>(sink.data()), 1000};
  const unsigned num_ctas = rate.ctas_per_sm * static_cast<unsigned>(gpu.context().info().num_sms);
  const auto milliseconds = [&] {
    return gpu.milliseconds([&] {
      cuda::driver::launch({.grid = {.x = num_ctas},
                            .block = {.x = cuda::kRateThreads},
                            .shared_bytes = rate.shared_bytes,
                            .stream = gpu.stream()},
                           kernel->function, params);
    });
  };
  milliseconds();
  params.rounds = static_cast<std::int32_t>(params.rounds * kMilliseconds / milliseconds());
  double best = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat)
    best = std::max(best, rate.flops_per_round * params.rounds * num_ctas / milliseconds());
  return best * 1e-6;
}

double measure_copy_gigabytes(const Gpu& gpu) {
  cuda::driver::DeviceMemory from(gpu.context(), kCopyBytes), to(gpu.context(), kCopyBytes);
  from.fill(1, gpu.stream());
  const auto address = [](const cuda::driver::DeviceMemory& memory) {
    return reinterpret_cast<cuda::driver::DevicePointer>(memory.data());
  };
  double best = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const double milliseconds = gpu.milliseconds([&] {
      const cuda::driver::ContextScope scope(gpu.context());
      gpu.context().driver().check(
          gpu.context().api().copy_on_device(address(to), address(from), kCopyBytes,
                                             gpu.stream().handle()),
          "cuMemcpyDtoDAsync");
    });
    best = std::max(best, 2.0 * kCopyBytes / milliseconds);
  }
  return best * 1e-6;
}

}  // namespace

Bounds GpuBounds::of(Dtype inputs) const {
  const bool is_plain = inputs == Dtype::f32;
  return {.compute = is_plain ? "fma" : "product",
          .compute_gflops = is_plain ? fma_gflops : product_gflops,
          .memory = "copy",
          .memory_gigabytes = copy_gigabytes};
}

GpuBounds measure_bounds(const Gpu& gpu) {
  return {.product_gflops = measure(gpu, product_rate(gpu.context().info())),
          .fma_gflops = measure(gpu, fma_rate()),
          .copy_gigabytes = measure_copy_gigabytes(gpu)};
}

}  // namespace fovea::tools
