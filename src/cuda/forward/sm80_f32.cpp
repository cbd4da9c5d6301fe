#include "cuda/forward/sm80_f32.hpp"

#include <fmt/format.h>

#include <array>

#include "cuda/device/shared/split.h"
#include "problem/head_dim.hpp"

namespace fovea::cuda {
namespace {

struct Tile {
  std::int32_t tile_q, tile_kv;
};
/// The first that fits is taken: keys of 576 and values of 512 take 218 KB, 146 KB and 72 KB, as GPUs of 9.0, 8.0 and
/// 8.6 have them.
constexpr std::array kTiles = {Tile{32, 32}, Tile{32, 16}, Tile{16, 8}};
constexpr std::int32_t kThreadsOfRow = 4;
/// A thread has a quarter of a row of O in registers. With 512 columns and all that is beside them, LLVM spills on
/// RDNA, whose lanes have 256 registers, and needs 294 on CDNA.
constexpr std::int64_t kMostValuesOnAmd = 256;

/// Rows of a kv head whose keys are split among CTAs: a tile's. Of wide heads, where a tile takes its CTA longest, as
/// many as multi-head latent attention has heads.
constexpr std::int64_t kMostSplitRows = 32, kMostSplitRowsOfWideHeads = 128;
constexpr std::int64_t kWideHead = 512;

PlainSpec with_tile(PlainSpec spec, const ForwardProblem& f, const DeviceTraits& device,
                    const Tile& tile) {
  spec.tile_q = tile.tile_q;
  spec.tile_kv = tile.tile_kv;
  spec.num_warps = kThreadsOfRow * tile.tile_q / device.warp_lanes;
  spec.heads_per_tile = packed_heads(f, tile.tile_q);
  return spec;
}

bool fits(const PlainSpec& spec, const DeviceTraits& device) {
  return sm80_plain_layout(spec).bytes <= device.shared_bytes_per_cta;
}

bool is_split(const ForwardProblem& f) {
  const std::int64_t rows = f.head_dim_qk > kWideHead ? kMostSplitRowsOfWideHeads : kMostSplitRows;
  return !has_packed_tiles(f) && f.group * f.seqlen_q <= rows && f.seqlen_kv > kFewestKeysPerSplit;
}

}  // namespace

std::optional<Refusal> Sm80ForwardF32::refuses(const ForwardProblem& f,
                                               const DeviceTraits& device) {
  if (auto refusal = refuses_any(f, device, Machines::nvidia_and_amd)) return refusal;
  if (auto refusal = refuses_margin(f)) return refusal;
  if (f.problem.compute_dtype == ComputeDtype::bf16)
    return Refusal{"compute_dtype is bf16; this kernel multiplies f32"};
  if (auto refusal = refuses_head_dims(f, kMaxHeadDim)) return refusal;
  if (device.is_amd() && f.head_dim_v > kMostValuesOnAmd) {
    return Refusal{fmt::format("head_dim_v is {}; expected at most {} on GPUs of AMD", f.head_dim_v,
                               kMostValuesOnAmd)};
  }
  return refuses_shared_bytes(shared_bytes(choose(f, device)), device);
}

PlainSpec Sm80ForwardF32::choose(const ForwardProblem& f, const DeviceTraits& device) {
  PlainSpec spec{common_spec(f)};
  spec.stages = 1;
  spec.ctas_per_sm = 1;
  spec.is_split = is_split(f);
  for (const Tile& tile : kTiles) {
    spec = with_tile(spec, f, device, tile);
    if (fits(spec, device)) break;
  }
  return spec;
}

/// Of f32 inputs, which have no other kernel: those of 16 bits come here for head dims that leave no room for more.
std::vector<PlainSpec> Sm80ForwardF32::alternatives(const ForwardProblem& f,
                                                    const DeviceTraits& device) {
  const PlainSpec chosen = choose(f, device);
  std::vector<PlainSpec> specs;
  for (const Tile& tile : {Tile{32, 64}, Tile{64, 32}, Tile{64, 64}, kTiles.back()}) {
    const PlainSpec spec = with_tile(chosen, f, device, tile);
    if (fits(spec, device)) specs.push_back(spec);
  }
  return specs;
}

std::size_t Sm80ForwardF32::shared_bytes(const PlainSpec& spec) {
  return static_cast<std::size_t>(sm80_plain_layout(spec).bytes);
}

}  // namespace fovea::cuda
