#include "cuda/forward/sm80_wide.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/device/shared/split.h"
#include "cuda/params/tensor_params.hpp"
#include "problem/head_dim.hpp"

namespace fovea::cuda {
namespace {

/// Sums of a thread's 16 rows: half of its registers.
constexpr std::int64_t kColumnsOfPart = 256;

/// 16 rows a warp. The first that fits: keys and queries of 576 and a part of 256 take 180 KB, 127 KB and 90 KB, as
/// GPUs of 9.0, 8.0 and 8.6 have them.
struct Tile {
  std::int32_t num_warps, tile_kv, stages;
};
constexpr std::array kTiles = {Tile{4, 32, 2}, Tile{4, 32, 1}, Tile{2, 32, 1}};

/// Rows of a kv head whose keys are split among CTAs: as many as multi-head latent attention has heads.
constexpr std::int64_t kMostSplitRows = 128;

std::int64_t num_parts(const ForwardProblem& f) {
  return (f.head_dim_v + kColumnsOfPart - 1) / kColumnsOfPart;
}

/// Columns of all parts but the last, which may have fewer; whole panels.
std::int32_t part_width(const ForwardProblem& f) {
  const std::int64_t width = (f.head_dim_v + num_parts(f) - 1) / num_parts(f);
  return static_cast<std::int32_t>((width + 31) / 32 * 32);
}

bool fits(const TeamSpec& spec, const DeviceTraits& device) {
  return sm80_forward_layout(spec).bytes <= device.shared_bytes_per_cta;
}

TeamSpec with_tile(TeamSpec spec, const ForwardProblem& f, const Tile& tile) {
  spec.num_warps = tile.num_warps;
  spec.tile_q = 16 * tile.num_warps;
  spec.tile_kv = tile.tile_kv;
  spec.stages = tile.stages;
  spec.ctas_per_sm = 1;
  spec.heads_per_tile = packed_heads(f, spec.tile_q);
  return spec;
}

TeamSpec without_tile(const ForwardProblem& f) {
  TeamSpec spec{common_spec(f)};
  spec.head_dim_v = part_width(f);
  spec.has_padded_head_dim =
      spec.head_dim_qk != f.head_dim_qk || spec.head_dim_v * num_parts(f) != f.head_dim_v;
  spec.is_split = !has_packed_tiles(f) && f.group * f.seqlen_q <= kMostSplitRows &&
                  f.seqlen_kv > kFewestKeysPerSplit;
  return spec;
}

/// Columns [begin, begin + width) of v and of out.
void take_columns(ForwardLaunch& launch, const TeamSpec& spec, std::int32_t begin,
                  Element out_element) {
  const auto moved = [&](BshdParam& t, Element element) {
    t.data = static_cast<const std::byte*>(t.data) +
             begin * t.col_stride * std::int64_t{element_bytes(element)};
  };
  ForwardParams& p = launch.params;
  p.head_dim_v = std::min(spec.head_dim_v, p.head_dim_v - begin);
  moved(p.v, spec.element);
  moved(p.out, out_element);
  launch.combine_params.out = p.out;
  launch.combine_params.head_dim_v = p.head_dim_v;
}

}  // namespace

std::optional<Refusal> Sm80ForwardWide::refuses(const ForwardProblem& f,
                                                const DeviceTraits& device) {
  if (auto refusal = refuses_before(kFirstOfSm80, device)) return refusal;
  if (auto refusal = refuses_16_bit(f, device)) return refusal;
  if (auto refusal = refuses_margin(f)) return refusal;
  if (auto refusal = refuses_head_dims(f, kMaxHeadDim)) return refusal;
  if (std::max(f.head_dim_qk, f.head_dim_v) <= kMaxTensorCoreHeadDim) {
    return Refusal{fmt::format("head dims are {} and {}; expected more than {}", f.head_dim_qk,
                               f.head_dim_v, kMaxTensorCoreHeadDim)};
  }
  const std::int32_t bytes = sm80_forward_layout(choose(f, device)).bytes;
  return refuses_shared_bytes(static_cast<std::size_t>(bytes), device);
}

TeamSpec Sm80ForwardWide::choose(const ForwardProblem& f, const DeviceTraits& device) {
  TeamSpec spec = without_tile(f);
  for (const Tile& tile : kTiles) {
    spec = with_tile(spec, f, tile);
    if (fits(spec, device)) break;
  }
  return spec;
}

std::vector<TeamSpec> Sm80ForwardWide::alternatives(const ForwardProblem& f,
                                                    const DeviceTraits& device) {
  std::vector<TeamSpec> specs;
  for (const Tile& tile : {kTiles[0], kTiles[1], kTiles[2], Tile{4, 64, 1}}) {
    const TeamSpec spec = with_tile(without_tile(f), f, tile);
    if (fits(spec, device)) specs.push_back(spec);
  }
  return specs;
}

WideLaunch Sm80ForwardWide::prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                                    const AttentionForward& args, const GrownCache* cache,
                                    void* workspace, const TensorMapEncoder& encode) {
  const ForwardLaunch whole = Sm80Forward::prepare(problem, plan, args, cache, workspace, encode);
  const auto& spec = plan.spec.as<TeamSpec>();
  WideLaunch launch{.num_parts = static_cast<int>(num_parts(problem))};
  for (int i = 0; i < launch.num_parts; ++i) {
    ForwardLaunch& part = launch.parts[static_cast<std::size_t>(i)];
    part = whole;
    take_columns(part, spec, i * spec.head_dim_v, element_of(problem.problem.out.dtype));
    part.clears_rows = whole.clears_rows && i == 0;  // all columns at once
  }
  return launch;
}

KernelLaunches WideLaunch::launches(const ForwardPlan& plan) const {
  KernelLaunches all;
  parts[0].add_tables(all);
  for (int i = 0; i < num_parts; ++i) {
    const ForwardLaunch& part = parts[static_cast<std::size_t>(i)];
    all.add(part.main_launch(plan, part.params));
    part.add_combine(plan, all);
  }
  return all;
}

}  // namespace fovea::cuda
