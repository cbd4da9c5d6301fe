// The emulator as tests launch kernels on it, one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cuda/emulator/emulator.hpp"
#include "cuda/forward/launch.hpp"
#include "cuda/kernel_set.hpp"

namespace fovea::testing {

/// What of a launch is the host's to say.
struct Launched {
  std::uint32_t ctas_x, ctas_y, threads;
  std::size_t shared_bytes;
  bool is_dependent;

  bool operator==(const Launched&) const = default;
};

struct Emulation {
  cuda::emulator::Device device;
  cuda::emulator::Options options;
  std::string findings;
  /// Findings that are no mistake here; empty: all are.
  std::function<bool(const cuda::emulator::Finding&)> passes_over;
  std::uint32_t warp_lanes = 32;
  int ctas_at_once = 1;
  int ctas_per_sm = 1;          // that share its registers
  bool is_dependent = false;    // launches start beside those before them
  int ctas_of_cluster = 1;      // of launches
  int compute_capability = 0;   // of the GPU, as LaunchConfig has it
  int gfx = 0;                  // likewise of AMD's
  std::int64_t num_redone = 0;  // row tiles that Hopper's kernel computed again
  std::vector<Launched> launched;

  void launch(cuda::Grid grid, std::uint32_t threads, std::size_t shared_bytes,
              const std::function<void()>& kernel);

  /// Has a call launched here what the host launches for it on a device? Forgets what was launched.
  void expect_launched(const cuda::KernelLaunches& by_host);
};

}  // namespace fovea::testing
