#include <fmt/format.h>

#include "cuda/emulator/instructions.hpp"
#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {

Dim3 thread_idx() { return machine().thread().idx; }
Dim3 block_idx() { return machine().thread().cta->idx; }
Dim3 block_dim() { return machine().config().block; }
Dim3 grid_dim() { return machine().config().grid; }
std::uint32_t lane_idx() { return machine().thread().lane; }
std::uint32_t warp_idx() { return machine().thread().warp->idx; }
void set_role(const char* role) { machine().thread().role = role; }

std::uint32_t dynamic_shared() {
  return (machine().thread().cta->rank << kRankShift) + kSharedBase;
}

void trap(Site site) {
  machine().report(Fault::trap, &machine().thread(), "ends the grid", site);
  machine().end_launch();
}

void require(int compute_capability, Instruction what) {
  const int has = machine().config().compute_capability;
  if (has == 0 || has >= compute_capability) return;
  machine().report(
      Fault::architecture, &machine().thread(),
      fmt::format("{} needs compute capability {}.{}; the GPU has {}.{}", what.name,
                  compute_capability / 10, compute_capability % 10, has / 10, has % 10),
      what.site);
}

void report_in_flight(Instruction what) {
  const Thread& thread = machine().thread();
  if (thread.warp->tensor.has_loaded) {
    machine().report(
        Fault::tensor_load_in_flight, &thread,
        fmt::format("uses by {} what a register held before the tcgen05.wait::ld of its load",
                    what.name),
        what.site);
    return;
  }
  if (thread.warp->wgmma.issued == 0) return;
  machine().report(
      Fault::accumulator_in_flight, &thread,
      fmt::format("uses by {} what an accumulator held before its wgmma.wait_group", what.name),
      what.site);
}

}  // namespace fovea::cuda::emulator
