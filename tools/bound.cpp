#include "bound.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "array.hpp"

namespace fovea::tools {
namespace {

using Clock = std::chrono::steady_clock;

// Latency 4 or 5 times two units: ten chains keep them busy, twelve leave slack. All fit in 16 registers.
constexpr int kNumChains = 12;
constexpr std::int64_t kStepsPerTask = 200'000;
constexpr int kTasksPerWorker = 8;
constexpr int kRepeats = 5;
constexpr std::size_t kReadBytes = std::size_t{256}
                                   << 20U;  // several times the share of a last-level cache
constexpr std::size_t kReadChunk = std::size_t{1} << 20U;

std::atomic<float> g_float_sink;  // keeps results alive
std::atomic<std::uint64_t> g_integer_sink;

using Vector4 [[gnu::vector_size(16)]] = float;
using Vector8 [[gnu::vector_size(32)]] = float;
using Vector16 [[gnu::vector_size(64)]] = float;

/// Multiply-adds in independent chains. Inlined into functions that may use wider registers.
template <typename Vector>
[[gnu::always_inline]] inline float multiply_add_chains(float seed) {
  Vector chains[kNumChains];
  for (int i = 0; i < kNumChains; ++i) chains[i] = Vector{} + (seed + static_cast<float>(i));
  const Vector factor = Vector{} + 0.999F;
  const Vector addend = Vector{} + seed;
  for (std::int64_t step = 0; step < kStepsPerTask; ++step) {
    for (Vector& chain : chains) chain = chain * factor + addend;
  }
  Vector sum = chains[0];
  for (int i = 1; i < kNumChains; ++i) sum += chains[i];
  return sum[0];
}

#if defined(__x86_64__)
[[gnu::target("avx512f")]] float chains_avx512(float seed) {
  return multiply_add_chains<Vector16>(seed);
}
[[gnu::target("avx2,fma")]] float chains_avx2(float seed) {
  return multiply_add_chains<Vector8>(seed);
}
#endif
float chains_portable(float seed) { return multiply_add_chains<Vector4>(seed); }

struct FmaKernel {
  float (*run)(float seed);
  int lanes;
};

FmaKernel best_kernel() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {chains_avx512, 16};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {chains_avx2, 8};
#endif
  return {chains_portable, 4};
}

double seconds_of(Executor& executor, std::int64_t count, const Executor::Task& task) {
  const Clock::time_point begin = Clock::now();
  executor.run(count, task);
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double measure_fma_gflops(Executor& executor) {
  FmaKernel kernel = best_kernel();
  const Executor::Task task{[](void* context, int worker, std::int64_t) {
                              const auto& chosen = *static_cast<const FmaKernel*>(context);
                              g_float_sink = chosen.run(static_cast<float>(worker) + 1);
                            },
                            &kernel};
  const std::int64_t count = std::int64_t{kTasksPerWorker} * executor.concurrency();
  const double flops = 2.0 * kernel.lanes * kNumChains * static_cast<double>(kStepsPerTask) *
                       static_cast<double>(count);
  double best = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    best = std::max(best, flops / seconds_of(executor, count, task));
  }
  return best * 1e-9;
}

double measure_read_gigabytes(Executor& executor) {
  const Buffer buffer = Buffer::zeroed(kReadBytes);
  const Executor::Task task{[](void* context, int, std::int64_t index) {
                              using Vector [[gnu::vector_size(64)]] = std::uint64_t;
                              const auto* data = static_cast<const std::byte*>(context) +
                                                 index * std::int64_t{kReadChunk};
                              Vector sums[4] = {};
                              for (std::size_t at = 0; at < kReadChunk; at += sizeof(sums)) {
                                Vector values[4];
                                std::memcpy(values, data + at, sizeof(values));
                                for (int i = 0; i < 4; ++i) sums[i] += values[i];
                              }
                              const Vector sum = sums[0] + sums[1] + sums[2] + sums[3];
                              g_integer_sink = sum[0] + sum[7];
                            },
                            buffer.data()};
  double best = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    best = std::max(
        best, static_cast<double>(kReadBytes) /
                  seconds_of(executor, static_cast<std::int64_t>(kReadBytes / kReadChunk), task));
  }
  return best * 1e-9;
}

}  // namespace

Bounds measure_bounds(Executor& executor) {
  return {.compute_gflops = measure_fma_gflops(executor),
          .memory_gigabytes = measure_read_gigabytes(executor)};
}

}  // namespace fovea::tools
