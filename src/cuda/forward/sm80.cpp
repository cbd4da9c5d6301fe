#include "cuda/forward/sm80.hpp"

#include <algorithm>
#include <array>
#include <span>

#include "cuda/device/shared/quantize_k.h"
#include "cuda/device/shared/split.h"

namespace fovea::cuda {
namespace {

int ctas_that_fit(const TeamSpec& spec, const DeviceTraits& device) {
  const int bytes = sm80_forward_layout(spec).bytes;
  if (bytes > device.shared_bytes_per_cta) return 0;
  return device.shared_bytes_per_sm / (bytes + kReservedSharedBytes);
}

/// Enumerated in order of preference; the first that leaves room for two CTAs, else for one, is taken. Two CTAs keep
/// the tensor cores busy while one is in its softmax or waits at a barrier.
struct Tile {
  std::int32_t tile_q, tile_kv, stages, num_warps = 4;
};

TeamSpec with_tile(TeamSpec spec, const Tile& tile, const DeviceTraits& device) {
  spec.tile_q = tile.tile_q;
  spec.tile_kv = tile.tile_kv;
  spec.stages = tile.stages;
  spec.num_warps = tile.num_warps;
  // O and S of wide heads leave no registers for Q.
  spec.keeps_queries = tile.tile_q == 16 * spec.num_warps && spec.head_dim_v <= 128;
  // Eight warps have all registers of an SM; on Turing shared memory ends first.
  const bool has_all_registers = spec.num_warps > 4 && spec.instructions != Instructions::sm75;
  spec.ctas_per_sm = std::min(has_all_registers ? 1 : 2, ctas_that_fit(spec, device));
  return spec;
}

TeamSpec best_tile(const TeamSpec& spec, std::span<const Tile> tiles, const DeviceTraits& device) {
  for (const int wanted : {2, 1}) {
    for (const Tile& tile : tiles) {
      if (tile.tile_kv > spec.scale_tile) continue;
      const TeamSpec result = with_tile(spec, tile, device);
      if (result.ctas_per_sm >= wanted) return result;
    }
  }
  return with_tile(spec, tiles.back(), device);
}

constexpr std::array kStreamingTiles = {Tile{64, 64, 3}, Tile{64, 64, 2}, Tile{64, 32, 2}};
// 32 rows a warp: O takes head_dim_v registers of each thread, S tile_kv. Beside O of 64 there is room for S of 128
// keys, but not for a program as well.
constexpr int kLeastMajorOfSlimTiles = 9;  // for sm_80, ptxas spills
constexpr std::array kSlimTiles = {Tile{128, 128, 2}, Tile{128, 64, 2}};
constexpr std::array kNarrowTiles = {Tile{128, 64, 2}, Tile{128, 32, 2}};
// Beside O of 128 and S of 64, look-ups of pages and the generator of dropout would spill. Score programs may spill up
// to 160 bytes there, and are still 8 to 18 % faster than with half the keys (measured: softcap, ALiBi).
constexpr std::array kLeanTiles = {Tile{128, 32, 2}};
// 16 rows a warp, whose S of 128 keys is 64 registers: codes of P depend on the maximum of so many keys, or of half as
// many, whose tiles are behind.
constexpr std::array kWholeTiles = {Tile{128, 128, 2, 8}, Tile{64, 128, 2}, Tile{128, 64, 2, 8},
                                    Tile{64, 64, 2}};
constexpr std::array kWholeStreamingTiles = {Tile{64, 128, 2}, Tile{64, 64, 2}};

std::span<const Tile> whole_tiles(std::span<const Tile> tiles, const TeamSpec& spec) {
  const auto of_half =
      std::ranges::find_if(tiles, [&](const Tile& tile) { return tile.tile_kv < kQuantizedTile; });
  const auto num_whole = static_cast<std::size_t>(of_half - tiles.begin());
  return spec.scale_tile == kQuantizedTile ? tiles.first(num_whole) : tiles.subspan(num_whole);
}
// 16 rows a warp, for head_dim_v above 128. One stage, so that two CTAs fit an SM.
constexpr std::array kWideTiles = {Tile{64, 64, 1}, Tile{64, 32, 2}, Tile{64, 32, 1}};

// Few scores of a thread, each with the programs around it: of all that is unrolled, the least.
constexpr Tile kQuickTile{64, 16, 2};

// Turing has 64 KB of shared memory, and copies wait in registers. Heads up to 64 leave room for two CTAs.
// Of wider ones the rows of eight warps share each kv tile, few rows and the widest heads have what fits.
constexpr Tile kSlimTuringTile{64, 64, 1};
constexpr std::array kTuringTiles = {Tile{128, 32, 1, 8}, Tile{64, 32, 1}, Tile{64, 16, 1}};
constexpr std::array kTuringStreamingTiles = {Tile{64, 32, 1}, Tile{64, 16, 1}};

TeamSpec turing_tile(const TeamSpec& spec, std::span<const Tile> others,
                     const DeviceTraits& device) {
  const TeamSpec slim = with_tile(spec, kSlimTuringTile, device);
  if (slim.ctas_per_sm >= 2) return slim;
  for (const Tile& tile : others) {
    const TeamSpec result = with_tile(spec, tile, device);
    if (result.ctas_per_sm > 0) return result;
  }
  return with_tile(spec, others.back(), device);
}

/// What holds more than a few registers beside the sums: programs, the generator of dropout, look-ups of pages.
bool needs_registers(const ForwardProblem& f) {
  const Problem& p = f.problem;
  return !p.score.is_identity() || !p.mask.captures().tensors.empty() || p.dropout.p > 0 ||
         f.is_paged;
}

bool has_lookups(const ForwardProblem& f) { return f.is_paged || f.problem.dropout.p > 0; }

/// Registers of a thread that sums and scores of a tile take.
std::int32_t tile_registers(const TeamSpec& spec) {
  const std::int32_t rows = spec.tile_q / spec.num_warps;
  return rows * (spec.head_dim_v + spec.tile_kv) / 32;
}
constexpr std::int32_t kMostTileRegisters = 192;

}  // namespace

std::optional<Refusal> Sm80Forward::refuses(const ForwardProblem& f, const DeviceTraits& device) {
  if (auto refusal = refuses_tensor_cores(f, device)) return refusal;
  return refuses_margin(f);
}

TeamSpec Sm80Forward::choose(const ForwardProblem& f, const DeviceTraits& device) {
  TeamSpec spec{common_spec(f)};
  spec.instructions = device.instructions();
  return with_best_tile(spec, f, device);
}

TeamSpec Sm80Forward::with_best_tile(const TeamSpec& without_tile, const ForwardProblem& f,
                                     const DeviceTraits& device) {
  TeamSpec spec = without_tile;
  const bool is_turing = spec.instructions == Instructions::sm75;
  if (rounds_exponentials(spec.rounding)) {
    // A split would not know the maxima of those before it.
    const bool is_few = has_few_rows(f);
    const std::span<const Tile> tiles =
        is_few ? std::span<const Tile>(kWholeStreamingTiles) : kWholeTiles;
    spec = best_tile(spec, whole_tiles(tiles, spec), device);
    spec.heads_per_tile = packed_heads(f, spec.tile_q);
    return spec;
  }
  if (has_few_rows(f)) {
    spec.heads_per_tile = packed_heads(f, kFewRows);
    spec.is_split = !has_packed_tiles(f) && f.seqlen_kv > kFewestKeysPerSplit;
    return is_turing ? turing_tile(spec, kTuringStreamingTiles, device)
                     : best_tile(spec, kStreamingTiles, device);
  }
  if (is_turing) {
    spec = turing_tile(spec, kTuringTiles, device);
    spec.heads_per_tile = packed_heads(f, spec.tile_q);
    return spec;
  }
  if (spec.sums_codes) {
    spec = best_tile(spec, kLeanTiles, device);
    spec.heads_per_tile = packed_heads(f, spec.tile_q);
    return spec;
  }
  const bool is_slim = std::max(spec.head_dim_qk, spec.head_dim_v) <= 64;
  if (is_slim && !needs_registers(f) && device.major >= kLeastMajorOfSlimTiles) {
    spec = best_tile(spec, kSlimTiles, device);
  } else if (spec.head_dim_v <= 64 || (spec.head_dim_v <= 128 && !has_lookups(f))) {
    spec = best_tile(spec, kNarrowTiles, device);
  } else if (spec.head_dim_v <= 128) {
    spec = best_tile(spec, kLeanTiles, device);
  }
  // Wide queries may leave no room for 128 of them.
  if (spec.head_dim_v > 128 || spec.ctas_per_sm == 0) spec = best_tile(spec, kWideTiles, device);
  spec.heads_per_tile = packed_heads(f, spec.tile_q);
  return spec;
}

std::vector<TeamSpec> Sm80Forward::alternatives(const ForwardProblem& f,
                                                const DeviceTraits& device) {
  return with_other_tiles(choose(f, device), f, device);
}

std::vector<TeamSpec> Sm80Forward::with_other_tiles(const TeamSpec& chosen, const ForwardProblem& f,
                                                    const DeviceTraits& device) {
  std::vector<TeamSpec> specs;
  const auto add_tiles = [&](std::span<const Tile> tiles, bool is_split) {
    for (const Tile& tile : tiles) {
      if (tile.tile_kv > chosen.scale_tile) continue;
      TeamSpec spec = with_tile(chosen, tile, device);
      spec.is_split = is_split;
      spec.heads_per_tile = packed_heads(f, spec.tile_q);
      if (spec.ctas_per_sm > 0 && tile_registers(spec) <= kMostTileRegisters) specs.push_back(spec);
    }
  };
  if (chosen.instructions == Instructions::sm75) {
    add_tiles({&kSlimTuringTile, 1}, chosen.is_split);
    add_tiles(kTuringStreamingTiles, chosen.is_split);
    if (!chosen.is_split) add_tiles(kTuringTiles, false);
    return specs;
  }
  if (rounds_exponentials(chosen.rounding)) {
    add_tiles(whole_tiles(kWholeTiles, chosen), false);
    return specs;
  }
  add_tiles(kStreamingTiles, chosen.is_split);
  if (chosen.is_split) {
    add_tiles(kStreamingTiles, false);
  } else {
    add_tiles(kSlimTiles, false);
    add_tiles(kLeanTiles, false);
    add_tiles(kWideTiles, false);
  }
  return specs;
}

std::optional<TeamSpec> Sm80Forward::quickest(const ForwardProblem& f, const DeviceTraits& device) {
  if (refuses(f, device) || device.instructions() == Instructions::sm75) return std::nullopt;
  TeamSpec spec = with_tile(choose(f, device), kQuickTile, device);
  spec.is_split = false;
  spec.heads_per_tile = packed_heads(f, spec.tile_q);
  return spec.ctas_per_sm > 0 ? std::optional(spec) : std::nullopt;
}

std::size_t Sm80Forward::shared_bytes(const TeamSpec& spec) {
  return static_cast<std::size_t>(sm80_forward_layout(spec).bytes);
}

}  // namespace fovea::cuda
