#include "cuda/decode_sm90.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "cuda/device/shared/split.h"

namespace fovea::cuda {
namespace {

/// Measured ahead of sm80/attention_forward (docs/kernels/decode_sm90.md); beyond, it is not.
constexpr std::int64_t kMostMeasuredRows = 16;
constexpr std::int64_t kWidestMeasuredHead = 128;
/// A team's warps have 16 rows each, and read its slices as often from shared memory as they are: four times its bytes, and writing
/// them, take 74 % of its rate while memory gives its own.
constexpr std::int64_t kMostRows = 64;

constexpr std::int32_t kRowsPerWarp = 16;
constexpr std::int32_t kMostWarps = 4;
constexpr std::int32_t kDepth = 16;  // keys of one product
constexpr std::int32_t kCtasPerSm = 2;
constexpr std::int32_t kStages = 3;  // of each team: two CTAs fill the SM's shared memory
/// Of a CTA, of an SM that holds two: what Hopper has.
constexpr std::int32_t kSharedBytes = 113 * 1024;

bool is_measured(const ForwardProblem& f) {
  return f.group * f.seqlen_q <= kMostMeasuredRows &&
         std::max(f.head_dim_qk, f.head_dim_v) <= kWidestMeasuredHead;
}

/// Those of the CTA, a warp each, padded to 1, 2 or 4.
std::int32_t row_tiles(const ForwardProblem& f) {
  return static_cast<std::int32_t>(
      std::bit_ceil(static_cast<std::uint64_t>((f.group * f.seqlen_q + 15) / kRowsPerWarp)));
}

std::optional<Refusal> refuses_streaming(const ForwardProblem& f, const DeviceTraits& device) {
  if (device.compute_capability() < 90) {
    return Refusal{fmt::format("compute capability is {}.{}; expected 9.0 or above", device.major,
                               device.minor)};
  }
  if (f.is_varlen)
    return Refusal{"sequences are packed; this kernel splits dense tensors and caches"};
  if (f.group * f.seqlen_q > kMostRows) {
    return Refusal{fmt::format("{} rows share a kv head; expected at most {}", f.group * f.seqlen_q,
                               kMostRows)};
  }
  if (f.seqlen_kv <= kFewestKeysPerSplit) {
    return Refusal{fmt::format("{} keys are one split; expected more than {}", f.seqlen_kv,
                               kFewestKeysPerSplit)};
  }
  const std::size_t bytes = decode_shared_bytes(choose_decode(f, device));
  if (bytes > static_cast<std::size_t>(device.shared_bytes_per_cta)) {
    return Refusal{fmt::format("a CTA takes {} bytes of shared memory; there are {}", bytes,
                               device.shared_bytes_per_cta)};
  }
  return std::nullopt;
}

/// Registers of a thread for sums, queries and the scores of a slice. What walks the keys needs the others.
std::int32_t tile_registers(const ForwardSpec& spec, std::int32_t keys) {
  const std::int32_t queries = spec.keeps_queries ? spec.head_dim_qk / 4 : 0;
  return spec.head_dim_v / 2 + queries + keys / 2;
}
constexpr std::int32_t kMostTileRegisters = 128;
constexpr std::int32_t kDropoutRegisters = 16;

/// The longest slices that registers hold, and of which shared memory holds kStages: 16 keys for each warp of the team at most.
std::int32_t keys_of_slice(ForwardSpec spec) {
  const std::int32_t registers = kMostTileRegisters - (spec.has_dropout ? kDropoutRegisters : 0);
  for (std::int32_t keys = spec.tile_q; keys > kDepth; keys /= 2) {
    spec.tile_kv = keys * sm90_decode_teams(spec);
    if (tile_registers(spec, keys) <= registers && decode_shared_bytes(spec) <= kSharedBytes)
      return keys;
  }
  return kDepth;
}

}  // namespace

std::optional<Refusal> refuses_decode(const ForwardProblem& f, const DeviceTraits& device) {
  if (auto refusal = refuses_streaming(f, device)) return refusal;
  if (f.group * f.seqlen_q > kMostMeasuredRows) {
    return Refusal{fmt::format("{} rows share a kv head; expected at most {}", f.group * f.seqlen_q,
                               kMostMeasuredRows)};
  }
  for (const auto& [label, head_dim] :
       {std::pair{"head_dim_qk", f.head_dim_qk}, std::pair{"head_dim_v", f.head_dim_v}}) {
    if (head_dim > kWidestMeasuredHead) {
      return Refusal{
          fmt::format("{} is {}; expected at most {}", label, head_dim, kWidestMeasuredHead)};
    }
  }
  return std::nullopt;
}

std::optional<Refusal> refuses_decode_wide(const ForwardProblem& f, const DeviceTraits& device) {
  if (auto refusal = refuses_streaming(f, device)) return refusal;
  if (is_measured(f)) {
    return Refusal{fmt::format("up to {} rows of head dims up to {} are {}'s", kMostMeasuredRows,
                               kWidestMeasuredHead, kSm90Decode)};
  }
  return std::nullopt;
}

ForwardSpec choose_decode(const ForwardProblem& f, const DeviceTraits&) {
  ForwardSpec spec = common_spec(f);
  const std::int32_t warps = row_tiles(f);
  const bool is_wide = std::max(spec.head_dim_qk, spec.head_dim_v) > kWidestMeasuredHead;
  spec.tile_q = kRowsPerWarp * warps;
  // Slices of wide heads are twice as long: half as many warps have as many bytes on their way.
  spec.num_warps = is_wide ? std::max(kMostWarps / 2, warps) : kMostWarps;
  spec.stages = kStages;
  spec.keeps_queries = !is_wide;  // else they are read again for every slice: registers
  spec.tile_kv = keys_of_slice(spec) * sm90_decode_teams(spec);
  spec.ctas_per_sm = kCtasPerSm;
  spec.heads_per_tile = packed_heads(f, spec.tile_q);
  spec.is_split = true;
  spec.is_chained = true;
  // A partial row is as many bytes as a key and its value: the more rows, the fewer and longer splits.
  spec.most_splits = kMostSplits / warps;
  return spec;
}

std::vector<ForwardSpec> decode_alternatives(const ForwardProblem& f, const DeviceTraits& device) {
  const ForwardSpec chosen = choose_decode(f, device);
  const std::int32_t slice = chosen.tile_kv / sm90_decode_teams(chosen);
  std::vector<ForwardSpec> specs;
  for (const auto& [warps, ctas] : {std::pair{4, 1}, {4, 2}, {4, 3}, {8, 1}}) {
    if (ctas > kCtasPerSm && !is_measured(f)) continue;  // registers
    for (const std::int32_t stages : {2, 3, 4, 6}) {
      ForwardSpec spec = chosen;
      spec.num_warps = warps;
      spec.tile_kv = sm90_decode_teams(spec) * slice;
      spec.stages = stages;
      spec.ctas_per_sm = ctas;
      const auto bytes = static_cast<int>(decode_shared_bytes(spec)) + kReservedSharedBytes;
      if (ctas * bytes <= device.shared_bytes_per_sm) specs.push_back(spec);
    }
  }
  return specs;
}

std::size_t decode_shared_bytes(const ForwardSpec& spec) {
  return static_cast<std::size_t>(sm90_decode_teams(spec) * sm90_decode_team_bytes(spec));
}

}  // namespace fovea::cuda
