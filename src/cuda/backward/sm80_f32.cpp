#include "cuda/backward/sm80_f32.hpp"

#include <algorithm>
#include <array>

#include "problem/head_dim.hpp"

namespace fovea::cuda {
namespace {

struct Tile {
  std::int32_t owned, walked;
};
/// The first that fits is taken: heads of 128 take 129 KB with the first; of 576 and 576 the last takes 74 KB.
constexpr std::array kTiles = {Tile{32, 32}, Tile{32, 16}, Tile{16, 16}, Tile{16, 8}, Tile{8, 8}};

/// Above, sums of both gradients of keys leave no registers.
constexpr std::int32_t kMostBothDims = 384;  // head_dim_qk + head_dim_v

std::size_t shared_bytes(const PlainBackwardSpec& spec) {
  return static_cast<std::size_t>(plain_backward_shared_bytes(spec));
}

bool fits(const PlainBackwardSpec& spec, const DeviceTraits& device) {
  return shared_bytes(spec) <= static_cast<std::size_t>(device.shared_bytes_per_cta);
}

PlainBackwardSpec with_tile(PlainBackwardSpec spec, const Tile& tile) {
  spec.tile_owned = tile.owned;
  spec.tile_walked = tile.walked;
  spec.num_warps = tile.owned / 8;  // four threads to a row
  return spec;
}

PlainBackwardSpec choose_tile(PlainBackwardSpec spec, const DeviceTraits& device) {
  for (const Tile& tile : kTiles) {
    spec = with_tile(spec, tile);
    if (fits(spec, device)) break;
  }
  return spec;
}

BackwardStep step_of(Gradients part, const PlainBackwardSpec& spec) {
  return {role_of(part), spec, shared_bytes(spec)};
}

PlainBackwardSpec spec_without_tile(const GradientProblem& g) {
  PlainBackwardSpec spec{{common_spec(g)}};
  spec.has_origins = true;
  return spec;
}

std::vector<Gradients> parts_of(const GradientProblem& g, const PlainBackwardSpec& spec) {
  return wanted_gradients(g, spec.head_dim_qk + spec.head_dim_v <= kMostBothDims);
}

}  // namespace

std::optional<Refusal> Sm80BackwardF32::refuses(const GradientProblem& g,
                                                const DeviceTraits& device) {
  if (auto refusal = refuses_any(g, device)) return refusal;
  const ForwardProblem& f = g.forward;
  if (f.problem.compute_dtype == ComputeDtype::bf16)
    return Refusal{"compute_dtype is bf16; this kernel multiplies f32"};
  if (auto refusal = refuses_head_dims(f, kMaxHeadDim)) return refusal;
  for (const BackwardStep& step : choose(g, device)) {
    if (auto refusal = refuses_shared_bytes(step.shared_bytes, device)) return refusal;
  }
  return std::nullopt;
}

std::vector<BackwardStep> Sm80BackwardF32::choose(const GradientProblem& g,
                                                  const DeviceTraits& device) {
  PlainBackwardSpec spec = spec_without_tile(g);
  std::vector<BackwardStep> steps;
  for (const Gradients part : parts_of(g, spec)) {
    set_gradients(part, spec);
    steps.push_back(step_of(part, choose_tile(spec, device)));
  }
  return steps;
}

std::vector<std::vector<BackwardStep>> Sm80BackwardF32::alternatives(const GradientProblem& g,
                                                                     const DeviceTraits& device) {
  PlainBackwardSpec spec = spec_without_tile(g);
  std::vector<std::vector<BackwardStep>> steps_of_parts;
  for (const Gradients part : parts_of(g, spec)) {
    set_gradients(part, spec);
    std::vector<BackwardStep>& steps = steps_of_parts.emplace_back();
    for (const Tile& tile : kTiles) {
      const PlainBackwardSpec other = with_tile(spec, tile);
      if (fits(other, device)) steps.push_back(step_of(part, other));
    }
  }
  return combinations(steps_of_parts);
}

}  // namespace fovea::cuda
