#include "cuda/jvp/sm80_f32.hpp"

#include <array>

#include "problem/head_dim.hpp"

namespace fovea::cuda {
namespace {

struct Tile {
  std::int32_t tile_q, tile_kv;
};
/// The first that fits is taken: heads of 128 take 107 KB with the first, keys of 576 and values of 512 take 128 KB
/// with the third and 64 KB with the last.
constexpr std::array kTiles = {Tile{32, 32}, Tile{32, 16}, Tile{16, 8}, Tile{8, 8}, Tile{8, 4}};

/// Of O and T a thread has a quarter of the columns each.
constexpr std::int32_t kMostColumns = 256;

}  // namespace

std::optional<Refusal> Sm80JvpF32::refuses(const TangentProblem& problem,
                                           const DeviceTraits& device) {
  if (auto refusal = refuses_any(problem, device)) return refusal;
  const ForwardProblem& f = problem.forward;
  if (f.problem.compute_dtype == ComputeDtype::bf16)
    return Refusal{"compute_dtype is bf16; this kernel multiplies f32"};
  if (auto refusal = refuses_head_dims(f, kMaxHeadDim)) return refusal;
  return refuses_shared_bytes(shared_bytes(choose(problem, device)), device);
}

JvpSpec Sm80JvpF32::choose(const TangentProblem& problem, const DeviceTraits& device) {
  JvpSpec spec = common_spec(problem, kMostColumns);
  spec.stages = 1;
  spec.ctas_per_sm = 1;
  for (const Tile& tile : kTiles) {
    spec.tile_q = tile.tile_q;
    spec.tile_kv = tile.tile_kv;
    spec.num_warps = tile.tile_q / 8;  // four threads to a row
    if (shared_bytes(spec) <= static_cast<std::size_t>(device.shared_bytes_per_cta)) break;
  }
  return spec;
}

std::size_t Sm80JvpF32::shared_bytes(const JvpSpec& spec) {
  return static_cast<std::size_t>(sm80_plain_jvp_layout(spec).bytes);
}

}  // namespace fovea::cuda
