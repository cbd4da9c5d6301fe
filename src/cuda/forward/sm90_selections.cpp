#include "cuda/forward/sm90_selections.hpp"

#include <algorithm>
#include <utility>

#include "expr/position_steps.hpp"

namespace fovea::cuda {
namespace {

/// Pieces of fewer positions are as good as none: hardly a tile of a warpgroup's rows would be without any.
constexpr std::int64_t kFewestPositions = 16;

/// Beyond, Q, K and V leave room for one CTA, whose one warpgroup would wait for its own softmax.
constexpr std::int32_t kWidest = 128;

/// More are of no use: what is under way by then covers memory's latency at its full rate.
constexpr std::int32_t kMostStages = 4;

struct PieceTile {
  std::int32_t q, kv;
};

/// The largest tiles that no piece cuts, at least of 64 rows and 32 keys: a warpgroup's, and a warp's when it reads a
/// program's parts. Finer pieces share tiles.
PieceTile tile_of(const expr::PositionSteps& steps) {
  const std::int32_t q = steps.q % 128 == 0 ? 128 : 64;
  if (steps.kv % 64 != 0) return {q, 32};
  // Beside a second CTA there is room for stages of 64 keys.
  return {q, q == 128 && steps.kv % 128 == 0 ? 128 : 64};
}

std::int32_t shared_bytes_of_cta(const Sm90ForwardSpec& spec, const DeviceTraits& device) {
  return std::min(device.shared_bytes_per_cta,
                  device.shared_bytes_per_sm / spec.ctas_per_sm - kReservedSharedBytes);
}

std::int32_t stages_that_fit(Sm90ForwardSpec spec, const DeviceTraits& device) {
  const std::int32_t most_bytes = shared_bytes_of_cta(spec, device);
  spec.stages = 1;
  while (spec.stages <= kMostStages && sm90_forward_layout(spec).bytes <= most_bytes) ++spec.stages;
  return spec.stages - 1;
}

}  // namespace

bool has_selections(const ForwardProblem& problem, const Sm90ForwardSpec& usual) {
  if (usual.loads_by_cp_async || std::max(usual.head_dim_qk, usual.head_dim_v) > kWidest)
    return false;
  const expr::PositionSteps steps = expr::position_steps(problem.problem.mask.expr().node());
  if (std::min(steps.q, steps.kv) < kFewestPositions) return false;
  return steps.q % usual.tile_q != 0 || steps.kv % usual.tile_kv != 0;
}

Sm90ForwardSpec with_selections(const Sm90ForwardSpec& usual, const ForwardProblem& problem,
                                const DeviceTraits& device) {
  const PieceTile tile = tile_of(expr::position_steps(problem.problem.mask.expr().node()));
  Sm90ForwardSpec spec = usual;
  spec.tile_q = tile.q;
  spec.tile_kv = tile.kv;
  spec.num_warps = 4 * (tile.q / 64 + 1);
  if (tile.q == 64) {
    // A third leaves no registers for sums of more than 64 columns, nor for the generator of dropout.
    const bool is_slim = std::max(spec.head_dim_qk, spec.head_dim_v) <= 64 && !spec.has_dropout;
    spec.ctas_per_sm = is_slim ? 3 : 2;
    spec.q_stages = 1;  // another CTA computes across the gap between row tiles
  }
  spec.stages = stages_that_fit(spec, device);
  return spec;
}

std::vector<Sm90ForwardSpec> selections_alternatives(const Sm90ForwardSpec& chosen,
                                                     const DeviceTraits& device) {
  std::vector<Sm90ForwardSpec> specs;
  for (const std::int32_t q_stages : {1, 2}) {
    for (const std::int32_t ctas : {1, 2, 3}) {
      Sm90ForwardSpec spec = chosen;
      spec.q_stages = q_stages;
      spec.ctas_per_sm = chosen.tile_q == 64 ? ctas : 1;
      const std::int32_t most = stages_that_fit(spec, device);
      for (spec.stages = 2; spec.stages <= most; ++spec.stages) {
        if (std::ranges::find(specs, spec) == specs.end()) specs.push_back(spec);
      }
    }
  }
  return specs;
}

}  // namespace fovea::cuda
