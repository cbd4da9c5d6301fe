#include "cuda/forward/cdna.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "cuda/device/shared/split.h"
#include "cuda/params/tensor_params.hpp"

namespace fovea::cuda {
namespace {

// Head dims of tiles; the last of queries and keys alone.
constexpr std::int64_t kNarrow = 64, kWide = 128, kWidest = 256;
constexpr std::int64_t kChunk = 8;  // elements of 16 bytes
constexpr std::int32_t kMostKeys = 128;
constexpr std::int32_t kWaves = 4, kWorkgroupsOfCu = 2;
/// Elements from a row of keys to the next: a tile of them is one buffer, of less than 2^31 bytes.
constexpr std::int64_t kLongestRowStride = (std::int64_t{1} << 31) / (2 * kMostKeys) - kWide;

std::int32_t of_tile(std::int64_t head_dim) {
  if (head_dim > kWide) return static_cast<std::int32_t>(kWidest);
  return static_cast<std::int32_t>(head_dim <= kNarrow ? kNarrow : kWide);
}

/// What holds registers beside the sums: programs, the generator of dropout, look-ups of pages.
bool needs_registers(const ForwardProblem& f) {
  return !f.problem.score.is_identity() || f.problem.dropout.p > 0 || f.is_paged;
}

/// Values of the next tile wait in registers; else they are copied to LDS.
bool holds_values(std::int32_t gfx) { return !cdna_traits(gfx).reads_transposed; }

std::optional<Refusal> refuses_other_head_dims(const ForwardProblem& f, std::int32_t gfx) {
  for (const auto& [label, head_dim, most] : {std::tuple{"head_dim_qk", f.head_dim_qk, kWidest},
                                              std::tuple{"head_dim_v", f.head_dim_v, kWide}}) {
    if (head_dim % kChunk != 0 || head_dim > most) {
      return Refusal{fmt::format("{} is {}; expected a multiple of {} of at most {}", label,
                                 head_dim, kChunk, most)};
    }
    if (f.is_paged && head_dim != of_tile(head_dim)) {
      return Refusal{fmt::format("{} is {} and keys lie in pages; expected {}", label, head_dim,
                                 of_tile(head_dim))};
    }
  }
  if (f.head_dim_qk > kWide && holds_values(gfx) && needs_registers(f)) {
    return Refusal{
        fmt::format("head_dim_qk is {} beside a score program, dropout or pages; expected at most "
                    "{} on gfx{:x}",
                    f.head_dim_qk, kWide, gfx)};
  }
  return std::nullopt;
}

/// Keys of a tile. Of a wave that has 32 rows, O takes half as many registers of a lane as it has columns, scores half
/// as many as there are keys, Q a quarter of its columns; two waves of a SIMD have 256 each. Where values are copied to
/// LDS, there is room for all else.
std::int32_t keys_of_tile(const ForwardProblem& f, const CdnaForwardSpec& spec) {
  if (spec.head_dim_qk == kWidest) return 32;
  if (holds_values(spec.gfx) && needs_registers(f)) return spec.head_dim_v == kWide ? 32 : 64;
  return widest_head_dim(spec) == kWide ? 64 : kMostKeys;
}

bool has_short_rows(const BshdParam& t) {
  return t.row_stride >= 0 && t.row_stride <= kLongestRowStride;
}

}  // namespace

std::optional<Refusal> CdnaForward::refuses(const ForwardProblem& f, const DeviceTraits& device) {
  if (auto refusal = refuses_16_bit(f, device, Machines::amd)) return refusal;
  if (!is_cdna(device.gfx))
    return Refusal{fmt::format("this is gfx{:x}; expected gfx942 or gfx950", device.gfx)};
  if (auto refusal = refuses_margin(f)) return refusal;
  return refuses_other_head_dims(f, device.gfx);
}

CdnaForwardSpec CdnaForward::choose(const ForwardProblem& f, const DeviceTraits& device) {
  CdnaForwardSpec spec{common_spec(f)};
  spec.gfx = device.gfx;
  spec.head_dim_qk = of_tile(f.head_dim_qk);
  spec.head_dim_v = of_tile(f.head_dim_v);
  spec.has_padded_head_dim = spec.head_dim_qk != f.head_dim_qk || spec.head_dim_v != f.head_dim_v;
  spec.num_warps = kWaves;
  spec.tile_q = kCdnaWaveRows * kWaves;
  spec.tile_kv = keys_of_tile(f, spec);
  spec.stages = cdna_traits(device.gfx).reads_transposed ? 2 : 1;
  spec.ctas_per_sm = kWorkgroupsOfCu;
  spec.heads_per_tile = packed_heads(f, spec.tile_q);
  spec.is_split = has_few_rows(f) && !has_packed_tiles(f) && f.seqlen_kv > kFewestKeysPerSplit;
  return spec;
}

std::vector<CdnaForwardSpec> CdnaForward::alternatives(const ForwardProblem& f,
                                                       const DeviceTraits& device) {
  CdnaForwardSpec spec = choose(f, device);
  std::vector<CdnaForwardSpec> specs{spec};
  if (spec.tile_kv == kMostKeys) {
    spec.tile_kv /= 2;
    specs.push_back(spec);
  }
  return specs;
}

bool CdnaForward::reads(const AttentionForward& args, const GrownCache* cache) {
  const Operands tensors(args, cache);
  for (const TensorView* tensor : {&tensors.q, &tensors.k, &tensors.v, &tensors.out})
    if (!is_aligned(*tensor)) return false;
  return has_short_rows(bshd(tensors.k)) && has_short_rows(bshd(tensors.v));
}

std::size_t CdnaForward::shared_bytes(const CdnaForwardSpec& spec) {
  return static_cast<std::size_t>(cdna_forward_layout(spec).bytes);
}

}  // namespace fovea::cuda
