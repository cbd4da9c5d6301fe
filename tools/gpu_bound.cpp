#include "gpu_bound.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cuda/driver/launch.hpp"
#include "cuda/driver/resources.hpp"
#include "failure.hpp"
#include "rates/rate_params.h"

namespace fovea::tools {
namespace {

namespace rates = cuda::rates;

constexpr int kRepeats = 4;
constexpr std::size_t kCopyBytes = std::size_t{1} << 30U;

/// A kernel of rates/, and what a CTA of it does in a round.
struct Rate {
  std::string includes, entry;
  unsigned ctas_per_sm;
  unsigned shared_bytes;
  double flops_per_round;
};

constexpr const char* kIncludeRates = "#include \"rates/rates.cuh\"\n";

Rate fma_rate() {
  return {.includes = kIncludeRates,
          .entry = "fma_rate",
          .ctas_per_sm = 4,
          .shared_bytes = 0,
          .flops_per_round = 2.0 * rates::kRateChains * rates::kRateThreads};
}

/// wgmma on Hopper, else mma.sync.
Rate product_rate(cuda::jit::Architecture architecture) {
  if (architecture.major != 9) {
    constexpr int kProducts =
        rates::kRateRowBlocks * rates::kRateColBlocks * (rates::kRateThreads / 32);
    return {.includes = kIncludeRates,
            .entry = "mma_rate",
            .ctas_per_sm = 2,
            .shared_bytes = 0,
            .flops_per_round = 2.0 * 16 * 8 * 16 * kProducts};
  }
  return {
      .includes = "#include \"ptx/generated/wgmma_bf16.cuh\"\n#include \"rates/wgmma_rate.cuh\"\n",
      .entry = "wgmma_rate",
      .ctas_per_sm = 1,
      .shared_bytes = rates::kRateSharedBytes,
      .flops_per_round = 2.0 * 64 * rates::kRateGroups * rates::kRateCols * rates::kRateDepth};
}

cuda::jit::KernelText text_of(const Rate& rate) {
  return {
      .unit = fmt::format("{}extern \"C\" __global__ void __launch_bounds__({})\n"
                          "{}(const __grid_constant__ fovea::cuda::rates::RateParams p) {{\n"
                          "  fovea::cuda::rates::{}(p);\n}}\n",
                          rate.includes, rates::kRateThreads, cuda::jit::kEntryName, rate.entry),
      .label = rate.entry};
}

cuda::jit::Loader& rate_loader() {
  // Never destroyed, as the process's loader is not.
  static cuda::jit::Loader* const loader = [] {
    auto options = cuda::jit::process_loader_options();
    options.device_text = rate_text();
    options.pack.reset();  // which holds kernels of the library's text
    return new cuda::jit::Loader(std::move(options));
  }();
  return *loader;
}

/// The best of several, each long enough for the power limit to show.
double measure(const Gpu& gpu, const Rate& rate) {
  constexpr double kMilliseconds = 40;
  const auto kernel = rate_loader().load(text_of(rate), gpu.context());
  const cuda::driver::DeviceMemory sink(gpu.context(), sizeof(float));
  rates::RateParams params{static_cast<float*>(sink.data()), 1000};
  const unsigned num_ctas = rate.ctas_per_sm * static_cast<unsigned>(gpu.context().info().num_sms);
  const auto milliseconds = [&] {
    return gpu.milliseconds([&] {
      cuda::driver::launch({.grid = {.x = num_ctas},
                            .block = {.x = rates::kRateThreads},
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

cuda::jit::DeviceText rate_text() {
  static const std::vector<cuda::jit::SourceFile> files = [] {
    std::vector<cuda::jit::SourceFile> all;
    for (const auto& text : {cuda::jit::embedded_device_text(), cuda::jit::embedded_rate_text()})
      all.insert(all.end(), text.files.begin(), text.files.end());
    return all;
  }();
  return cuda::jit::make_device_text(files);
}

std::vector<cuda::jit::KernelText> rate_kernels(cuda::jit::Architecture architecture) {
  return {text_of(product_rate(architecture)), text_of(fma_rate())};
}

Bounds GpuBounds::of(Dtype inputs) const {
  const bool is_plain = inputs == Dtype::f32;
  return {.compute = is_plain ? "fma" : "product",
          .compute_gflops = is_plain ? fma_gflops : product_gflops,
          .memory = "copy",
          .memory_gigabytes = copy_gigabytes};
}

GpuBounds measure_bounds(const Gpu& gpu) {
  const auto architecture = cuda::jit::architecture_of(gpu.context().info());
  if (architecture.is_amd()) return {};
  return {.product_gflops = measure(gpu, product_rate(architecture)),
          .fma_gflops = measure(gpu, fma_rate()),
          .copy_gigabytes = measure_copy_gigabytes(gpu)};
}

}  // namespace fovea::tools
