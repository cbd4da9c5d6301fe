#include "cuda/backward/sm100.hpp"

#include <fmt/format.h>

namespace fovea::cuda {
namespace {

/// Tiles of queries in shared memory: at head_dim 128 two are what fits.
constexpr std::int32_t kMostStages = 3;

}  // namespace

std::optional<Refusal> Sm100Backward::refuses(const GradientProblem& g,
                                              const DeviceTraits& device) {
  if (auto refusal = refuses_16_bit(g, device)) return refusal;
  if (!device.has_tensor_memory()) {
    return Refusal{fmt::format("compute capability is {}.{}; expected 10.0 or 10.3", device.major,
                               device.minor)};
  }
  return refuses_key_walk(g);
}

std::vector<BackwardStep> Sm100Backward::choose(const GradientProblem& g,
                                                const DeviceTraits& device) {
  if (!g.wants_dq() && !g.wants_dk() && !g.wants_dv()) return {};
  Sm100BackwardSpec spec{{key_walk_spec(g)}};
  spec.tile_q = kSm100BackwardQueries;
  spec.num_warps = kSm100BackwardWarps;
  spec.writes_elements = true;
  spec.subtracts_deltas = true;
  set_walks(g, spec);
  spec.stages = kMostStages;
  while (sm100_backward_layout(spec).bytes > device.shared_bytes_per_cta) --spec.stages;
  return with_steps_around(
      {KernelRole::main, spec, static_cast<std::size_t>(sm100_backward_layout(spec).bytes)}, g,
      device);
}

}  // namespace fovea::cuda
