#include "cuda/candidates.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/check.hpp"
#include "cuda/attention_forward.hpp"
#include "cuda/decode_sm90.hpp"
#include "cuda/device/shared/split.h"
#include "cuda/forward_launch.hpp"
#include "cuda/forward_sm90.hpp"
#include "cuda/tensor_params.hpp"

namespace fovea::cuda {
namespace {

constexpr std::int64_t kMaxTensorCoreHeadDim = 256;
constexpr std::int64_t kMaxHeadDim = 512;
/// Below, 1 / scale and score * scale leave f32.
constexpr float kSmallestFoldedScale = 1e-30F;

/// Rows of shared memory are swizzled in units of 32 elements.
std::int32_t padded(std::int64_t head_dim) {
  return static_cast<std::int32_t>((head_dim + 31) / 32 * 32);
}

/// Few rows over keys of more than one split.
bool is_split_among_ctas(const ForwardProblem& f) {
  return !f.is_varlen && has_few_rows(f) && f.seqlen_kv > kFewestKeysPerSplit;
}

std::optional<Refusal> refuses_any(const ForwardProblem& f, const DeviceTraits& device) {
  if (device.compute_capability() < 80) {
    return Refusal{fmt::format("compute capability is {}.{}; expected 8.0 or above", device.major,
                               device.minor)};
  }
  const Problem& p = f.problem;
  for (const auto& [label, spec] : {std::pair{"k", &p.k}, std::pair{"v", &p.v}}) {
    if (spec->dtype != p.q.dtype) {
      return Refusal{fmt::format("{} is {} and q is {}; expected one dtype", label,
                                 name(spec->dtype), name(p.q.dtype))};
    }
  }
  for (const auto& [label, length] :
       {std::pair{"seqlen_q", f.seqlen_q}, std::pair{"seqlen_kv", f.seqlen_kv}}) {
    if (length > kMostOfSequence)
      return Refusal{fmt::format("{} is {}; expected at most {}", label, length, kMostOfSequence)};
  }
  const std::int64_t rows = f.is_varlen ? f.total_q : f.num_sequences * f.seqlen_q;
  if ((rows / 16 + f.num_sequences + 1) * f.num_heads_q > std::int64_t{0x7fffffff})
    return Refusal{"more than 2^31 tiles of rows"};
  // Of each split of a row there is a partial state; who joins them, and Hopper's kernel, number them in 32 bits.
  if (is_split_among_ctas(f) && f.num_heads_q * rows > std::int64_t{0x7fffffff} / kMostSplits) {
    return Refusal{
        fmt::format("{} rows of all heads over more than {} keys; expected at most 2^31 / {}",
                    f.num_heads_q * rows, kFewestKeysPerSplit, kMostSplits)};
  }
  return std::nullopt;
}

std::optional<Refusal> refuses_tensor_cores(const ForwardProblem& f, const DeviceTraits& device) {
  if (auto refusal = refuses_any(f, device)) return refusal;
  const Problem& p = f.problem;
  if (p.q.dtype == Dtype::f32) return Refusal{"inputs are f32; expected f16 or bf16"};
  if (p.compute_dtype == ComputeDtype::f32)
    return Refusal{"compute_dtype is f32; this kernel multiplies inputs of 16 bits"};
  if (p.compute_dtype == ComputeDtype::bf16 && p.q.dtype != Dtype::bf16)
    return Refusal{"compute_dtype is bf16 and inputs are f16; expected one of both"};
  for (const auto& [label, head_dim] :
       {std::pair{"head_dim_qk", f.head_dim_qk}, std::pair{"head_dim_v", f.head_dim_v}}) {
    if (head_dim > kMaxTensorCoreHeadDim) {
      return Refusal{
          fmt::format("{} is {}; expected at most {}", label, head_dim, kMaxTensorCoreHeadDim)};
    }
  }
  return std::nullopt;
}

ForwardSpec choose_plain(const ForwardProblem& f, const DeviceTraits&) {
  ForwardSpec spec = common_spec(f);
  spec.tile_q = 32;
  spec.tile_kv = 32;
  spec.num_warps = 4;
  spec.stages = 1;
  spec.ctas_per_sm = 1;
  spec.heads_per_tile = packed_heads(f, spec.tile_q);
  spec.is_split =
      !f.is_varlen && f.group * f.seqlen_q <= spec.tile_q && f.seqlen_kv > kFewestKeysPerSplit;
  return spec;
}

std::size_t plain_shared_bytes(const ForwardSpec& spec) {
  return static_cast<std::size_t>(sm80_plain_shared_bytes(spec));
}

/// Of f32 inputs, which have no other kernel: those of 16 bits come here for head dims that leave no room for more.
std::vector<ForwardSpec> plain_alternatives(const ForwardProblem& f, const DeviceTraits& device) {
  const ForwardSpec chosen = choose_plain(f, device);
  std::vector<ForwardSpec> specs;
  for (const auto& [tile_q, tile_kv] : {std::pair{32, 64}, {64, 32}, {64, 64}}) {
    ForwardSpec spec = chosen;
    spec.tile_q = tile_q;
    spec.tile_kv = tile_kv;
    spec.num_warps = tile_q / 8;  // four threads to a row
    spec.heads_per_tile = packed_heads(f, tile_q);
    if (plain_shared_bytes(spec) <= static_cast<std::size_t>(device.shared_bytes_per_cta))
      specs.push_back(spec);
  }
  return specs;
}

/// For kernels on tensor cores that refuse more than that.
template <Candidate::Refuses refuses_more>
std::optional<Refusal> refuses_tensor_cores_or(const ForwardProblem& f,
                                               const DeviceTraits& device) {
  if (auto refusal = refuses_tensor_cores(f, device)) return refusal;
  return refuses_more(f, device);
}

std::optional<Refusal> refuses_plain(const ForwardProblem& f, const DeviceTraits& device) {
  if (auto refusal = refuses_any(f, device)) return refusal;
  if (f.problem.compute_dtype == ComputeDtype::bf16)
    return Refusal{"compute_dtype is bf16; this kernel multiplies f32"};
  for (const auto& [label, head_dim] :
       {std::pair{"head_dim_qk", f.head_dim_qk}, std::pair{"head_dim_v", f.head_dim_v}}) {
    if (head_dim > kMaxHeadDim)
      return Refusal{fmt::format("{} is {}; expected at most {}", label, head_dim, kMaxHeadDim)};
  }
  const std::size_t bytes = plain_shared_bytes(choose_plain(f, device));
  if (bytes > static_cast<std::size_t>(device.shared_bytes_per_cta)) {
    return Refusal{
        fmt::format("tiles of these head dims take {} bytes of shared memory; there are {}", bytes,
                    device.shared_bytes_per_cta)};
  }
  return std::nullopt;
}

std::size_t tensor_core_shared_bytes(const ForwardSpec& spec) {
  return static_cast<std::size_t>(sm80_forward_shared_bytes(spec));
}

int ctas_that_fit(const ForwardSpec& spec, const DeviceTraits& device) {
  const int bytes = sm80_forward_shared_bytes(spec);
  if (bytes > device.shared_bytes_per_cta) return 0;
  return device.shared_bytes_per_sm / (bytes + kReservedSharedBytes);
}

/// Enumerated in order of preference; the first that leaves room for two CTAs, else for one, is taken. Two CTAs keep
/// the tensor cores busy while one is in its softmax or waits at a barrier.
struct Tile {
  std::int32_t tile_q, tile_kv, stages;
};

ForwardSpec with_tile(ForwardSpec spec, const Tile& tile, const DeviceTraits& device) {
  spec.tile_q = tile.tile_q;
  spec.tile_kv = tile.tile_kv;
  spec.stages = tile.stages;
  spec.num_warps = 4;
  // O and S of wide heads leave no registers for Q.
  spec.keeps_queries = tile.tile_q == 16 * spec.num_warps && spec.head_dim_v <= 128;
  spec.ctas_per_sm = std::min(2, ctas_that_fit(spec, device));
  return spec;
}

ForwardSpec best_tile(const ForwardSpec& spec, std::span<const Tile> tiles,
                      const DeviceTraits& device) {
  for (const int wanted : {2, 1}) {
    for (const Tile& tile : tiles) {
      const ForwardSpec result = with_tile(spec, tile, device);
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
// 16 rows a warp, for head_dim_v above 128. One stage, so that two CTAs fit an SM.
constexpr std::array kWideTiles = {Tile{64, 64, 1}, Tile{64, 32, 2}, Tile{64, 32, 1}};

/// What holds more than a few registers beside the sums: programs, the generator of dropout, look-ups of pages.
bool needs_registers(const ForwardProblem& f) {
  const Problem& p = f.problem;
  return !p.score.is_identity() || !p.mask.captures().tensors.empty() || p.dropout.p > 0 ||
         f.is_paged;
}

bool has_lookups(const ForwardProblem& f) { return f.is_paged || f.problem.dropout.p > 0; }

ForwardSpec choose_tensor_cores(const ForwardProblem& f, const DeviceTraits& device) {
  ForwardSpec spec = common_spec(f);
  if (has_few_rows(f)) {
    spec.heads_per_tile = packed_heads(f, kFewRows);
    spec.is_split = !f.is_varlen && f.seqlen_kv > kFewestKeysPerSplit;
    return best_tile(spec, kStreamingTiles, device);
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

/// Registers of a thread that sums and scores of a tile take.
std::int32_t tile_registers(const ForwardSpec& spec) {
  const std::int32_t rows = spec.tile_q / spec.num_warps;
  return rows * (spec.head_dim_v + spec.tile_kv) / 32;
}
constexpr std::int32_t kMostTileRegisters = 192;

std::vector<ForwardSpec> tensor_core_alternatives(const ForwardProblem& f,
                                                  const DeviceTraits& device) {
  const ForwardSpec chosen = choose_tensor_cores(f, device);
  std::vector<ForwardSpec> specs;
  const auto add_tiles = [&](std::span<const Tile> tiles, bool is_split) {
    for (const Tile& tile : tiles) {
      ForwardSpec spec = with_tile(chosen, tile, device);
      spec.is_split = is_split;
      spec.heads_per_tile = packed_heads(f, spec.tile_q);
      if (spec.ctas_per_sm > 0 && tile_registers(spec) <= kMostTileRegisters) specs.push_back(spec);
    }
  };
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

constexpr std::array kCandidates = {
    Candidate{.name = kSm90Decode,
              .header = "sm90/decode.cuh",
              .entry = "sm90::decode",
              .params = "Sm90DecodeParams",
              .multiplies_by_wgmma = false,
              .refuses = refuses_tensor_cores_or<refuses_decode>,
              .choose = choose_decode,
              .alternatives = decode_alternatives,
              .reads = decode_reads,
              .shared_bytes = decode_shared_bytes,
              .scratch_bytes = partial_bytes,
              .launch = launch_decode},
    Candidate{.name = kSm90Forward,
              .header = "sm90/attention_forward.cuh",
              .entry = "sm90::attention_forward",
              .params = "Sm90ForwardParams",
              .multiplies_by_wgmma = true,
              .refuses = refuses_tensor_cores_or<refuses_sm90>,
              .choose = choose_sm90,
              .alternatives = sm90_alternatives,
              .reads = sm90_reads,
              .shared_bytes = sm90_shared_bytes,
              .scratch_bytes = sm90_scratch_bytes,
              .launch = launch_sm90},
    Candidate{.name = kSm80Forward,
              .header = "sm80/attention_forward.cuh",
              .entry = "sm80::attention_forward",
              .params = "ForwardParams",
              .multiplies_by_wgmma = false,
              .refuses = refuses_tensor_cores,
              .choose = choose_tensor_cores,
              .alternatives = tensor_core_alternatives,
              .reads = nullptr,
              .shared_bytes = tensor_core_shared_bytes,
              .scratch_bytes = partial_bytes,
              .launch = launch_sm80},
    Candidate{.name = "cuda/sm80/attention_forward_f32",
              .header = "sm80/attention_forward_f32.cuh",
              .entry = "sm80::attention_forward_f32",
              .params = "ForwardParams",
              .multiplies_by_wgmma = false,
              .refuses = refuses_plain,
              .choose = choose_plain,
              .alternatives = plain_alternatives,
              .reads = nullptr,
              .shared_bytes = plain_shared_bytes,
              .scratch_bytes = partial_bytes,
              .launch = launch_sm80},
};

}  // namespace

bool has_few_rows(const ForwardProblem& f) { return f.group * f.seqlen_q <= kFewRows; }

std::int32_t packed_heads(const ForwardProblem& f, std::int64_t rows) {
  const std::int64_t seqlen_q = std::max<std::int64_t>(1, f.seqlen_q);
  for (std::int64_t heads = std::min(f.group, rows / seqlen_q); heads > 1; --heads) {
    if (f.group % heads == 0) return static_cast<std::int32_t>(heads);
  }
  return 1;
}

ForwardSpec common_spec(const ForwardProblem& f) {
  const Problem& p = f.problem;
  ForwardSpec spec;
  spec.element = element_of(p.q.dtype);
  spec.out_element = element_of(p.out.dtype);
  spec.head_dim_qk = padded(f.head_dim_qk);
  spec.head_dim_v = padded(f.head_dim_v);
  spec.is_varlen = f.is_varlen;
  spec.is_paged = f.is_paged;
  spec.has_padded_head_dim = spec.head_dim_qk != f.head_dim_qk || spec.head_dim_v != f.head_dim_v;
  spec.is_prescaled = !p.score.is_identity() || f.softmax_scale < kSmallestFoldedScale;
  spec.has_dropout = p.dropout.p > 0;
  spec.wants_row_max = p.wants_row_max;
  return spec;
}

DeviceTraits typical_device(int major, int minor) {
  const int capability = major * 10 + minor;
  DeviceTraits device{.major = major, .minor = minor};
  const bool is_consumer =
      capability == 86 || capability == 89 || (capability >= 110 && capability < 130);
  device.shared_bytes_per_cta = is_consumer ? 99 * 1024 : capability < 90 ? 163 * 1024 : 227 * 1024;
  device.shared_bytes_per_sm = device.shared_bytes_per_cta + kReservedSharedBytes;
  device.num_sms = is_consumer ? 84 : capability < 90 ? 108 : 132;
  device.memory_bytes_per_clock = is_consumer ? 400 : capability < 90 ? 1100 : 2400;
  device.l2_bytes = (is_consumer ? 6 : capability < 90 ? 40 : 50) * std::int64_t{1 << 20};
  return device;
}

std::span<const Candidate> forward_candidates() { return kCandidates; }

const Candidate& candidate_named(std::string_view name) {
  const auto* candidate = std::ranges::find(kCandidates, name, &Candidate::name);
  FOVEA_ASSERT(candidate != kCandidates.end());
  return *candidate;
}

int max_splits(const ForwardSpec& spec, const ForwardProblem& f) {
  if (!spec.is_split) return 1;
  const std::int64_t fewest = fewest_keys_per_split(spec.most_splits);
  const std::int64_t most = (f.seqlen_kv + fewest - 1) / fewest;
  return static_cast<int>(std::clamp<std::int64_t>(most, 1, spec.most_splits));
}

std::size_t partial_bytes(const ForwardSpec& spec, const ForwardProblem& f) {
  if (!spec.is_split) return 0;
  const std::int64_t rows = f.num_sequences * f.seqlen_q * f.num_heads_q * max_splits(spec, f);
  return static_cast<std::size_t>(rows * (spec.head_dim_v + 2)) * sizeof(float);
}

}  // namespace fovea::cuda
