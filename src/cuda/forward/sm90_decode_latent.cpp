#include "cuda/forward/sm90_decode_latent.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/device/shared/split.h"

namespace fovea::cuda {
namespace {

constexpr std::int64_t kKeyWidth = 576, kValueWidth = 512;
constexpr std::int64_t kRows = 64;  // of a CTA, an m of wgmma
constexpr std::int32_t kKeysOfTile = 64;
constexpr std::int32_t kBuffers = 2;
constexpr std::int32_t kWarps = 12;  // two groups of four compute, one warp of the third loads
/// Units are counted in 32 bits.
constexpr std::int64_t kMostUnits = std::int64_t{1} << 30;

/// The most heads of a group that share a tile and divide it: those of one query, so that masks of positions cut a tile
/// seldom.
std::int32_t heads_per_tile(std::int64_t group) {
  std::int64_t heads = std::min(group, kRows);
  while (group % heads != 0) --heads;
  return static_cast<std::int32_t>(heads);
}

/// A partial state of a row is 2 KB. Splits as long as cost for 16 rows 512 keys, of more 2,048, a tenth of their time
/// in partial states at most.
std::int32_t most_splits(std::int64_t rows) {
  if (rows <= 16) return kMostSplits / 2;
  return rows <= 32 ? kMostSplits / 4 : kMostSplits / 8;
}

/// Of tensors without addresses: v may be the view of k's first columns.
bool may_share_memory(const Problem& p) {
  for (std::size_t dim = 0; dim + 1 < static_cast<std::size_t>(p.k.rank); ++dim) {
    if (p.k.shape[dim] > 1 && p.k.strides[dim] != p.v.strides[dim]) return false;
  }
  return p.v.strides[static_cast<std::size_t>(p.v.rank) - 1] == 1;
}

std::optional<Refusal> refuses_layout(const ForwardProblem& f) {
  const bool is_shared = f.is_cached ? f.cache.has_latent_values : may_share_memory(f.problem);
  if (!is_shared) {
    return Refusal{fmt::format(
        "v has a memory of its own; expected the view of k's first {} columns", kValueWidth)};
  }
  return refuses_boxes(f, "tile");
}

}  // namespace

std::optional<Refusal> Sm90DecodeLatent::refuses(const ForwardProblem& f,
                                                 const DeviceTraits& device) {
  if (f.head_dim_qk != kKeyWidth || f.head_dim_v != kValueWidth) {
    return Refusal{fmt::format("head dims are {} and {}; expected {} and {}", f.head_dim_qk,
                               f.head_dim_v, kKeyWidth, kValueWidth)};
  }
  if (auto refusal = refuses_16_bit(f, device)) return refusal;
  if (device.compute_capability() != 90) {
    return Refusal{
        fmt::format("compute capability is {}.{}; expected 9.0", device.major, device.minor)};
  }
  if (f.is_varlen)
    return Refusal{"sequences are packed; this kernel splits dense tensors and caches"};
  if (f.problem.dropout.p > 0) return Refusal{"dropout is given; this kernel has none"};
  if (auto refusal = refuses_layout(f)) return refusal;
  if (f.seqlen_kv >= std::int64_t{1} << 28) return Refusal{"more than 2^28 keys"};
  if (f.num_sequences * f.num_heads_q * std::max<std::int64_t>(1, f.seqlen_q) * kMostSplits >=
      kMostUnits)
    return Refusal{"2^30 splits of all sequences, heads and queries, or more"};
  const Problem& p = f.problem;
  if (const std::string why = why_no_tensor_maps({{"q", &p.q}, {"k", &p.k}}); !why.empty())
    return Refusal{why};
  const int bytes = sm90_latent_layout(choose(f, device)).bytes;
  if (bytes > device.shared_bytes_per_cta) {
    return Refusal{fmt::format("a CTA takes {} bytes of shared memory; there are {}", bytes,
                               device.shared_bytes_per_cta)};
  }
  return std::nullopt;
}

Sm90LatentSpec Sm90DecodeLatent::choose(const ForwardProblem& f, const DeviceTraits&) {
  Sm90LatentSpec spec{common_spec(f)};
  spec.tile_q = static_cast<std::int32_t>(kRows);
  spec.tile_kv = kKeysOfTile;
  spec.num_warps = kWarps;
  spec.stages = kBuffers;
  spec.ctas_per_sm = 1;
  spec.heads_per_tile = heads_per_tile(f.group);
  spec.is_split = true;
  spec.most_splits = most_splits(f.group * f.seqlen_q);
  return spec;
}

std::vector<Sm90LatentSpec> Sm90DecodeLatent::alternatives(const ForwardProblem&,
                                                           const DeviceTraits&) {
  return {};
}

bool Sm90DecodeLatent::reads(const AttentionForward& args, const GrownCache* cache) {
  const Operands tensors(args, cache);
  return have_tensor_maps({&tensors.q, &tensors.k}) && are_first_columns(tensors.v, tensors.k);
}

std::size_t Sm90DecodeLatent::shared_bytes(const Sm90LatentSpec& spec) {
  return static_cast<std::size_t>(sm90_latent_layout(spec).bytes);
}

std::size_t Sm90DecodeLatent::scratch_bytes(const Sm90LatentSpec& spec, const ForwardProblem& f) {
  return partial_bytes(spec, f);
}

LatentLaunch Sm90DecodeLatent::prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                                       const AttentionForward& args, const GrownCache* cache,
                                       void* workspace, const TensorMapEncoder& encode) {
  const Operands tensors(args, cache);
  const auto& spec = plan.spec.as<Sm90LatentSpec>();
  LatentLaunch launch;
  launch.common = forward_launch(problem, plan, args, workspace, cache);
  place_range_tables(plan, workspace, launch.common);
  launch.params.rows_per_box = rows_of_box(spec, launch.common.params.page_size);
  launch.params.q =
      tensor_map_of_heads(encode, tensors.q, kRows / spec.heads_per_tile, spec.heads_per_tile);
  launch.params.k = tensor_map_of_rows(encode, tensors.keys_or_queries(tensors.k),
                                       {.rows = launch.params.rows_per_box,
                                        .by_panels = launch.params.rows_per_box < spec.tile_kv,
                                        .most_panels = kLatentPanelsOfBox});
  launch.params.common = launch.common.params;
  const std::int64_t units = std::int64_t{launch.common.grid.x} * max_splits(spec, problem);
  launch.num_ctas =
      static_cast<std::uint32_t>(std::min<std::int64_t>(units, usable_sms(problem, plan.device)));
  return launch;
}

KernelLaunches LatentLaunch::launches(const ForwardPlan& plan) const {
  KernelLaunches all;
  common.add_tables(all);
  // The kernel waits for no grid ahead: not for those of range tables, nor for the one that appends keys.
  KernelLaunch main = common.main_launch(plan, params);
  main.grid = {.x = num_ctas};
  all.add(main);
  common.add_combine(plan, all);
  return all;
}

}  // namespace fovea::cuda
