#include "cuda/forward/sm90_selections.hpp"

#include <algorithm>

#include "expr/position_steps.hpp"

namespace fovea::cuda {
namespace {

/// Pieces of fewer positions are as good as none: hardly a tile of a warpgroup's rows would be without any.
constexpr std::int64_t kFewestPositions = 16;

/// Beyond, Q, K and V leave room for one CTA, whose one warpgroup would wait for its own softmax.
constexpr std::int32_t kWidest = 128;

expr::PositionSteps steps_of(const ForwardProblem& problem) {
  return expr::position_steps(problem.problem.mask.expr().node());
}

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

/// Several CTAs share what an SM has.
bool fits(const Sm90ForwardSpec& spec, const DeviceTraits& device) {
  const std::int32_t of_cta = device.shared_bytes_per_sm / spec.ctas_per_sm - kReservedSharedBytes;
  return sm90_forward_layout(spec).bytes <= std::min(device.shared_bytes_per_cta, of_cta);
}

}  // namespace

bool has_selections(const ForwardProblem& problem, const Sm90ForwardSpec& usual) {
  if (usual.loads_by_cp_async || std::max(usual.head_dim_qk, usual.head_dim_v) > kWidest)
    return false;
  const expr::PositionSteps steps = steps_of(problem);
  if (std::min(steps.q, steps.kv) < kFewestPositions) return false;
  return steps.q % usual.tile_q != 0 || steps.kv % usual.tile_kv != 0;
}

Sm90ForwardSpec with_selections(const Sm90ForwardSpec& usual, const ForwardProblem& problem) {
  const PieceTile tile = tile_of(steps_of(problem));
  Sm90ForwardSpec spec = usual;
  spec.tile_q = tile.q;
  spec.tile_kv = tile.kv;
  spec.num_warps = 4 * (tile.q / 64 + 1);
  if (tile.q == 64) {
    // A third leaves no registers for sums of more than 64 columns, nor for the generator of dropout.
    const bool is_slim = std::max(spec.head_dim_qk, spec.head_dim_v) <= 64 && !spec.has_dropout;
    spec.ctas_per_sm = is_slim ? 3 : 2;
  }
  // As many bytes under way on an SM as with the usual tile: with a third more, 64 of 1,713 tiles at random took 5 %
  // longer (measured), since CTAs drift apart, and what one has loaded is gone from L2 when the next asks for it.
  const std::int32_t as_many = usual.stages * usual.tile_kv / tile.kv / spec.ctas_per_sm;
  spec.stages = std::max(usual.stages, as_many);
  return spec;
}

std::vector<Sm90ForwardSpec> selections_alternatives(const Sm90ForwardSpec& chosen,
                                                     const DeviceTraits& device) {
  std::vector<Sm90ForwardSpec> specs;
  for (const std::int32_t q_stages : {1, 2}) {
    for (const std::int32_t ctas : {1, 2, 3}) {
      if (chosen.tile_q > 64 && ctas > 1) continue;
      for (const std::int32_t stages : {2, 3, 4}) {
        Sm90ForwardSpec spec = chosen;
        spec.q_stages = q_stages;
        spec.ctas_per_sm = ctas;
        spec.stages = stages;
        if (fits(spec, device)) specs.push_back(spec);
      }
    }
  }
  return specs;
}

// Half of the CTAs are enough to keep them in step, and cost less than seven of eight where rows see what lies around
// them (measured: docs/kernels/attention_forward_sm90.md).
std::int32_t claims_of_wave(const Sm90ForwardSpec& spec, const ForwardProblem& problem,
                            const DeviceTraits& device, std::uint32_t num_ctas) {
  const std::int64_t bytes_of_head =
      problem.seqlen_kv * element_bytes(spec.element) * (problem.head_dim_qk + problem.head_dim_v);
  if (spec.ctas_per_sm == 1 || bytes_of_head <= device.l2_bytes) return 0;
  return static_cast<std::int32_t>(num_ctas / 2);
}

}  // namespace fovea::cuda
