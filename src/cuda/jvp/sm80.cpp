#include "cuda/jvp/sm80.hpp"

#include <fmt/format.h>

#include <array>
#include <span>
#include <tuple>

namespace fovea::cuda {
namespace {

/// Enumerated in order of preference; the first that leaves room for two CTAs on an SM, else for one, is taken: one
/// keeps the tensor cores busy while the other is in its softmax.
struct Tile {
  std::int32_t tile_kv, stages, num_warps = 4;
};

// 16 rows a warp: O and T take head_dim_v registers of a thread, S and S' as many as there are keys.
constexpr std::array kSlimTiles = {Tile{64, 2}, Tile{64, 1}, Tile{32, 2}, Tile{32, 1}};
constexpr std::array kTiles = {Tile{32, 2}, Tile{32, 1}, Tile{16, 2}, Tile{16, 1}};
// Turing's copies are there at once: a second stage would hide nothing. Q and Q' of 64 rows of head_dim 256 would be
// all of its shared memory.
constexpr std::array kTuringTiles = {Tile{32, 1}, Tile{16, 1}, Tile{16, 1, 2}};
constexpr std::int32_t kMostSlimColumns = 64;
constexpr std::int32_t kMostColumns = 128;

/// Programs, the generator of dropout and packed sequences hold registers beside the sums.
bool needs_registers(const ForwardProblem& f) {
  const Problem& p = f.problem;
  return f.is_varlen || !p.score.is_identity() || !p.mask.captures().tensors.empty() ||
         p.dropout.p > 0;
}

JvpSpec with_tile(JvpSpec spec, const Tile& tile, const DeviceTraits& device) {
  spec.tile_q = 16 * tile.num_warps;
  spec.tile_kv = tile.tile_kv;
  spec.num_warps = tile.num_warps;
  spec.stages = tile.stages;
  const auto bytes = static_cast<int>(Sm80Jvp::shared_bytes(spec));
  const bool fits_twice = 2 * (bytes + kReservedSharedBytes) <= device.shared_bytes_per_sm;
  spec.ctas_per_sm = bytes > device.shared_bytes_per_cta ? 0 : fits_twice ? 2 : 1;
  return spec;
}

}  // namespace

std::optional<Refusal> Sm80Jvp::refuses(const TangentProblem& problem, const DeviceTraits& device) {
  const ForwardProblem& f = problem.forward;
  if (auto refusal = refuses_tensor_cores(f, device)) return refusal;
  if (auto refusal = refuses_margin(f)) return refusal;
  const Dtype dtype = f.problem.q.dtype;
  const JvpProblem& posed = problem.posed;
  for (const auto& [label, tangent] : {std::tuple{"q_tangent", &posed.q_tangent},
                                       {"k_tangent", &posed.k_tangent},
                                       {"v_tangent", &posed.v_tangent}}) {
    if (tangent->rank == 0 || tangent->dtype == dtype) continue;
    return Refusal{fmt::format("{} is {} and q is {}; this kernel multiplies one dtype", label,
                               name(tangent->dtype), name(dtype))};
  }
  return refuses_shared_bytes(shared_bytes(choose(problem, device)), device);
}

JvpSpec Sm80Jvp::choose(const TangentProblem& problem, const DeviceTraits& device) {
  JvpSpec spec = common_spec(problem, kMostColumns);
  spec.instructions = device.instructions();
  const bool is_slim = spec.head_dim_v <= kMostSlimColumns && !needs_registers(problem.forward);
  std::span<const Tile> tiles = is_slim ? std::span<const Tile>(kSlimTiles) : kTiles;
  if (spec.instructions == Instructions::sm75) tiles = kTuringTiles;
  for (const int wanted : {2, 1}) {
    for (const Tile& tile : tiles) {
      const JvpSpec chosen = with_tile(spec, tile, device);
      if (chosen.ctas_per_sm >= wanted) return chosen;
    }
  }
  return with_tile(spec, tiles.back(), device);
}

std::size_t Sm80Jvp::shared_bytes(const JvpSpec& spec) {
  return static_cast<std::size_t>(sm80_jvp_shared_bytes(spec));
}

}  // namespace fovea::cuda
