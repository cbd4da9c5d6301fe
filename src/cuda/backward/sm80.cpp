#include "cuda/backward/sm80.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>

namespace fovea::cuda {
namespace {

/// Enumerated in order of preference; the first that leaves room for its CTAs on an SM is taken.
struct Tile {
  std::int32_t owned, walked, stages, num_warps, ctas_per_sm;
};

// 32 rows a warp where sums of all leave registers for it: half the reads of shared memory. Sums of dk and dv take
// head_dim_qk + head_dim_v registers for each 32 rows of a warp, S and dP twice the walked rows.
constexpr std::array kSlimKeyTiles = {Tile{128, 64, 2, 8, 1}};
constexpr std::array kKeyTiles = {Tile{128, 64, 2, 8, 1}, Tile{128, 32, 2, 8, 1},
                                  Tile{128, 32, 1, 8, 1}, Tile{64, 32, 1, 4, 1}};
constexpr std::array kSlimQueryTiles = {Tile{128, 32, 2, 4, 2}, Tile{128, 32, 2, 4, 1}};
constexpr std::array kQueryTiles = {Tile{128, 32, 2, 4, 2}, Tile{128, 64, 2, 8, 1},
                                    Tile{128, 32, 2, 8, 1}, Tile{128, 32, 1, 8, 1},
                                    Tile{64, 32, 1, 4, 1}};
// Programs, the generator of dropout and packed sequences need registers beside the sums.
constexpr std::array kLeanTiles = {Tile{128, 32, 2, 8, 1}, Tile{128, 32, 1, 8, 1},
                                   Tile{64, 32, 1, 4, 1}};
// Heads above 128: 16 rows a warp, one sum.
constexpr std::array kWideTiles = {Tile{128, 32, 2, 8, 1}, Tile{128, 32, 1, 8, 1},
                                   Tile{64, 32, 2, 4, 1}, Tile{64, 32, 1, 4, 1}};
// Turing has 64 KB of shared memory, and the next tile waits in registers, which leave none for both sums of keys above
// head_dim 64: dk and dv have a walk each.
constexpr std::array kTuringTiles = {Tile{128, 32, 1, 8, 1}, Tile{64, 32, 1, 4, 1}};
constexpr std::array kWideTuringTiles = {Tile{64, 16, 1, 4, 1}, Tile{32, 16, 1, 2, 1}};
constexpr std::int32_t kMostHeadDimOfBothOnTuring = 64;

std::size_t shared_bytes(const Sm80BackwardSpec& spec) {
  return static_cast<std::size_t>(sm80_backward_shared_bytes(spec));
}

bool fits(const Sm80BackwardSpec& spec, const DeviceTraits& device) {
  const std::size_t bytes = shared_bytes(spec);
  const auto of_sm = static_cast<std::size_t>(spec.ctas_per_sm) * (bytes + kReservedSharedBytes);
  return bytes <= static_cast<std::size_t>(device.shared_bytes_per_cta) &&
         of_sm <= static_cast<std::size_t>(device.shared_bytes_per_sm);
}

Sm80BackwardSpec with_tile(Sm80BackwardSpec spec, const Tile& tile) {
  spec.tile_owned = tile.owned;
  spec.tile_walked = tile.walked;
  spec.stages = tile.stages;
  spec.num_warps = tile.num_warps;
  spec.ctas_per_sm = tile.ctas_per_sm;
  return spec;
}

Sm80BackwardSpec choose_tile(Sm80BackwardSpec spec, std::span<const Tile> tiles,
                             const DeviceTraits& device) {
  for (const Tile& tile : tiles) {
    spec = with_tile(spec, tile);
    if (fits(spec, device)) break;
  }
  return spec;
}

std::span<const Tile> tiles_of(const Sm80BackwardSpec& spec) {
  const std::int32_t widest = std::max(spec.head_dim_qk, spec.head_dim_v);
  if (spec.instructions == Instructions::sm75)
    return widest <= 128 ? std::span<const Tile>(kTuringTiles) : kWideTuringTiles;
  if (widest > 128) return kWideTiles;
  if (spec.has_origins || spec.has_dropout || spec.is_varlen) return kLeanTiles;
  if (spec.owns_keys) return widest > 64 ? std::span<const Tile>(kKeyTiles) : kSlimKeyTiles;
  return widest > 64 ? std::span<const Tile>(kQueryTiles) : kSlimQueryTiles;
}

/// Those of tiles_of, and where sums are slim what wider heads have too.
std::span<const Tile> tuned_tiles_of(const Sm80BackwardSpec& spec) {
  const std::span<const Tile> tiles = tiles_of(spec);
  if (tiles.data() == kSlimKeyTiles.data()) return kKeyTiles;
  return tiles.data() == kSlimQueryTiles.data() ? std::span<const Tile>(kQueryTiles) : tiles;
}

BackwardStep step_of(Gradients part, const Sm80BackwardSpec& spec) {
  return {role_of(part), spec, shared_bytes(spec)};
}

Sm80BackwardSpec spec_without_tile(const GradientProblem& g, const DeviceTraits& device) {
  Sm80BackwardSpec spec{{common_spec(g)}};
  spec.instructions = device.instructions();
  spec.has_origins = has_program(g);
  return spec;
}

std::vector<Gradients> parts_of(const GradientProblem& g, const Sm80BackwardSpec& spec) {
  const bool is_turing = spec.instructions == Instructions::sm75;
  return wanted_gradients(g, std::max(spec.head_dim_qk, spec.head_dim_v) <=
                                 (is_turing ? kMostHeadDimOfBothOnTuring : 128));
}

}  // namespace

std::optional<Refusal> Sm80Backward::refuses(const GradientProblem& g, const DeviceTraits& device) {
  if (auto refusal = refuses_16_bit(g, device)) return refusal;
  const ForwardProblem& f = g.forward;
  if (auto refusal = refuses_head_dims(f, kMaxTensorCoreHeadDim)) return refusal;
  return std::nullopt;
}

std::vector<BackwardStep> Sm80Backward::choose(const GradientProblem& g,
                                               const DeviceTraits& device) {
  Sm80BackwardSpec spec = spec_without_tile(g, device);
  std::vector<BackwardStep> steps;
  for (const Gradients part : parts_of(g, spec)) {
    set_gradients(part, spec);
    steps.push_back(step_of(part, choose_tile(spec, tiles_of(spec), device)));
  }
  return steps;
}

std::vector<std::vector<BackwardStep>> Sm80Backward::alternatives(const GradientProblem& g,
                                                                  const DeviceTraits& device) {
  Sm80BackwardSpec spec = spec_without_tile(g, device);
  std::vector<std::vector<BackwardStep>> steps_of_parts;
  for (const Gradients part : parts_of(g, spec)) {
    set_gradients(part, spec);
    std::vector<BackwardStep>& steps = steps_of_parts.emplace_back();
    for (const Tile& tile : tuned_tiles_of(spec)) {
      const Sm80BackwardSpec other = with_tile(spec, tile);
      if (fits(other, device)) steps.push_back(step_of(part, other));
    }
  }
  return combinations(steps_of_parts);
}

std::vector<BackwardStep> Sm80Backward::choose_redo(const GradientProblem& g,
                                                    const DeviceTraits& device) {
  std::vector<BackwardStep> steps = choose(g, device);
  for (BackwardStep& step : steps) {
    auto spec = step.spec.as<Sm80BackwardSpec>();
    spec.is_redo = true;
    step.spec = spec;
    step.role = !spec.owns_keys    ? KernelRole::redo_queries
                : spec.sums_scores ? KernelRole::redo_keys
                                   : KernelRole::redo_values;
    step.header = kHeader;
    step.entry = kEntry;
    step.params = kParams;
  }
  return steps;
}

}  // namespace fovea::cuda
