#include "kernels/emulated_device.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

namespace fovea::testing {

namespace emulator = cuda::emulator;

namespace {

/// As launch bounds have ptxas give a thread; 0: all that an SM has.
std::uint32_t registers_per_thread(int ctas_per_sm, std::uint32_t threads) {
  constexpr std::uint32_t kRegistersOfSm = 65536;
  if (ctas_per_sm == 1) return 0;
  return kRegistersOfSm / (static_cast<std::uint32_t>(ctas_per_sm) * threads) / 8 * 8;
}

std::string shown(const std::vector<Launched>& launches) {
  std::vector<std::string> lines;
  for (const Launched& each : launches) {
    lines.push_back(fmt::format("{} x {} CTAs of {} threads, {} bytes{}", each.ctas_x, each.ctas_y,
                                each.threads, each.shared_bytes,
                                each.is_dependent ? ", dependent" : ""));
  }
  return fmt::format("{}", fmt::join(lines, "\n"));
}

}  // namespace

void Emulation::launch(cuda::Grid grid, std::uint32_t threads, std::size_t shared_bytes,
                       const std::function<void()>& kernel) {
  if (grid.x == 0) return;
  launched.push_back({grid.x, grid.y, threads, shared_bytes, is_dependent});
  const emulator::LaunchConfig config{
      .grid = {static_cast<std::int32_t>(grid.x), static_cast<std::int32_t>(grid.y), 1},
      .block = {static_cast<std::int32_t>(threads), 1, 1},
      .cluster = {ctas_of_cluster, 1, 1},
      .shared_bytes = static_cast<std::uint32_t>(shared_bytes),
      .warp_lanes = warp_lanes,
      .registers_per_thread = registers_per_thread(ctas_per_sm, threads),
      .clusters_at_once = ctas_at_once,
      .is_dependent = is_dependent,
      .compute_capability = compute_capability,
      .gfx = gfx};
  const emulator::Report report = device.launch(config, options, kernel);
  for (const emulator::Finding& finding : report.findings) {
    if (!passes_over || !passes_over(finding)) findings += finding.text + "\n";
  }
}

void Emulation::expect_launched(const cuda::KernelLaunches& by_host) {
  std::vector<Launched> expected;
  for (const cuda::KernelLaunch& each : by_host) {
    if (each.grid.x == 0) continue;
    expected.push_back(
        {each.grid.x, each.grid.y, each.num_threads, each.shared_bytes, each.is_pdl});
  }
  EXPECT_EQ(shown(expected), shown(launched));
  launched.clear();
}

}  // namespace fovea::testing
