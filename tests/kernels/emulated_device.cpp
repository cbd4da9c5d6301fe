#include "kernels/emulated_device.hpp"

namespace fovea::testing {

namespace emulator = cuda::emulator;

namespace {

/// As launch bounds have ptxas give a thread; 0: all that an SM has.
std::uint32_t registers_per_thread(int ctas_per_sm, std::uint32_t threads) {
  constexpr std::uint32_t kRegistersOfSm = 65536;
  if (ctas_per_sm == 1) return 0;
  return kRegistersOfSm / (static_cast<std::uint32_t>(ctas_per_sm) * threads) / 8 * 8;
}

}  // namespace

void Emulation::launch(cuda::Grid grid, std::uint32_t threads, std::size_t shared_bytes,
                       const std::function<void()>& kernel) {
  if (grid.x == 0) return;
  const emulator::LaunchConfig config{
      .grid = {static_cast<std::int32_t>(grid.x), static_cast<std::int32_t>(grid.y), 1},
      .block = {static_cast<std::int32_t>(threads), 1, 1},
      .cluster = {},
      .shared_bytes = static_cast<std::uint32_t>(shared_bytes),
      .registers_per_thread = registers_per_thread(ctas_per_sm, threads),
      .clusters_at_once = ctas_at_once,
      .is_dependent = is_dependent};
  const emulator::Report report = device.launch(config, options, kernel);
  for (const emulator::Finding& finding : report.findings) {
    if (!passes_over || !passes_over(finding)) findings += finding.text + "\n";
  }
}

}  // namespace fovea::testing
