// What benches of single steps share: memory, the time of each step, the line that says where it goes.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "fovea/dtype.hpp"

namespace fovea::cpu {

/// Memory aligned as the library's workspaces are.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : memory_(bytes + 4096) {
    void* at = memory_.data();
    std::size_t space = memory_.size();
    at_ = static_cast<std::byte*>(std::align(4096, bytes, at, space));
  }
  std::byte* bytes() { return at_; }
  std::uint8_t* codes() { return reinterpret_cast<std::uint8_t*>(at_); }
  float* floats() { return reinterpret_cast<float*>(at_); }

 private:
  std::vector<std::byte> memory_;
  std::byte* at_ = nullptr;
};

template <std::size_t num_steps>
using StepTimes = std::array<double, num_steps>;  // seconds

/// One step after the other: what passes belongs to the step that ends.
template <std::size_t num_steps>
class StepClock {
 public:
  void start() { last_ = Clock::now(); }
  void tick(std::size_t step) {
    const Clock::time_point now = Clock::now();
    times_[step] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }
  const StepTimes<num_steps>& times() const { return times_; }

 private:
  using Clock = std::chrono::steady_clock;
  StepTimes<num_steps> times_{};
  Clock::time_point last_{};
};

/// ns of each step that took any, of `units` panels and tiles; ends the line.
template <std::size_t num_steps>
void print_steps(const std::array<const char*, num_steps>& names, const StepTimes<num_steps>& times,
                 double units) {
  for (std::size_t step = 0; step < num_steps; ++step) {
    if (times[step] > 0) std::printf("  %s %.0f", names[step], times[step] / units * 1e9);
  }
  std::printf("  ns\n");
}

/// Numbers in [-1, 1) in the dtype that the target multiplies.
inline void fill(Buffer& buffer, std::int64_t count, Dtype dtype) {
  std::uint32_t state = 1;
  for (std::int64_t i = 0; i < count; ++i) {
    state = state * 1664525U + 1013904223U;
    const float value = static_cast<float>(state >> 8U) * 0x1p-23F - 1.0F;
    if (dtype == Dtype::f32) {
      buffer.floats()[i] = value;
    } else {
      const bfloat16 narrow(value);
      std::memcpy(buffer.bytes() + 2 * i, &narrow, 2);
    }
  }
}

template <std::size_t num_steps>
double total(const StepTimes<num_steps>& times) {
  return std::accumulate(times.begin(), times.end(), 0.0);
}

/// Of so many rounds the one that took least; run() gives the times of one.
template <class Run>
auto least_of(int rounds, const Run& run) {
  auto best = run();
  for (int round = 1; round < rounds; ++round) {
    const auto times = run();
    if (total(times) < total(best)) best = times;
  }
  return best;
}

}  // namespace fovea::cpu
