#include "cuda/forward/sm90_short.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "core/ceil_div.hpp"
#include "cuda/params/tensor_params.hpp"
#include "expr/kv_limits.hpp"
#include "expr/passes.hpp"

namespace fovea::cuda {
namespace {

/// A length in equal parts of at most `most`, each of whole steps.
struct Parts {
  std::int32_t count, each;
};
Parts parts_of(std::int64_t length, std::int64_t most, std::int64_t step) {
  const std::int64_t count = std::max<std::int64_t>(1, ceil_div(length, most));
  const std::int64_t steps = std::max<std::int64_t>(1, ceil_div(length, count * step));
  return {static_cast<std::int32_t>(count), static_cast<std::int32_t>(steps * step)};
}

/// The depth of products and the columns of a matrix that is stored.
constexpr std::int64_t kHeadDimStep = 16;
constexpr std::int64_t kKeyStep = 16;
constexpr std::int64_t kWidestHeadDim = 128;
/// Fewer leave most of 64 rows empty.
constexpr std::int64_t kFewestQueries = 17;

// Measured (docs/kernels/attention_short_sm90.md).
constexpr std::int64_t kFewKeys = 112;  // in one product
constexpr std::int64_t kKeysOfOneProduct = 208;
constexpr std::int64_t kNarrowHeadDim = 64, kWideHeadDim = 97;
/// Of these and narrower heads, two CTAs of a warp more than a group have registers for a product with all keys.
constexpr std::int64_t kWidestWithLastRows = 80;

std::int64_t widest(const ForwardProblem& f) { return std::max(f.head_dim_qk, f.head_dim_v); }
bool is_narrow(const ForwardProblem& f) { return widest(f) <= kNarrowHeadDim; }
bool is_wide(const ForwardProblem& f) { return widest(f) >= kWideHeadDim; }
bool is_a_little_wide(std::int64_t head_dim) {
  return head_dim > kNarrowHeadDim && head_dim <= kWidestWithLastRows;
}

/// Are rows left behind the last whole row tile, and a warp enough for them, beside a product with all keys? A group
/// takes as long for few rows as for 64. Of narrow heads the warp costs a CTA, of wider ones registers (measured).
/// Whatever the batch is, so that it does not tell which products a row has.
bool has_last_rows(const ForwardProblem& f) {
  const std::int64_t rows = f.seqlen_q % kShortRows;
  return !f.is_varlen && is_a_little_wide(widest(f)) && f.seqlen_kv > kFewKeys &&
         f.seqlen_q > kShortRows && rows > 0 && rows <= kShortLastRows;
}

/// Of an SM: 64 K registers.
constexpr int kRegisters = 65536, kMostRegisters = 255, kSchedulers = 4;
/// With fewer what stands around the products spills, and ptxas lets one product run at a time.
constexpr int kFewestRegisters = 88;

std::int32_t groups_of(const Sm90ShortSpec& spec) { return spec.num_warps / 4; }
/// Whole ones.
std::int32_t row_tiles_of(const Sm90ShortSpec& spec) { return spec.tile_q / kShortRows; }

/// Do a product of scores and one of sums make a tile?
bool is_one_step(const Sm90ShortSpec& spec) {
  return spec.stages == 1 && row_tiles_of(spec) == groups_of(spec);
}

/// Are row tiles one after the other to have no more registers than one? They need none where a product has all keys:
/// probabilities lie where its scores did; but of narrow heads, and from 96 on, more CTAs of more row tiles are behind
/// (measured).
bool spares_registers_of_probabilities(const Sm90ShortSpec& spec) {
  return spec.stages == 1 && is_a_little_wide(std::max(spec.head_dim_qk, spec.head_dim_v));
}

/// That a thread wants: scores and sums of two rows, and addresses; of all but the only product, the probabilities of
/// the one before; queries that are kept. As compiled: with less much spills. Up to 80 bytes do where a mask is walked
/// or a warp has the last rows, and 16 beside sums of 128 columns, where a CTA less was measured as slower.
int wanted_registers(const Sm90ShortSpec& spec) {
  const bool is_spared = is_one_step(spec) || spares_registers_of_probabilities(spec);
  const int probabilities = is_spared ? 0 : spec.tile_kv / 4;
  const int queries = spec.keeps_queries ? spec.head_dim_qk / 4 : 0;
  return std::max(kFewestRegisters,
                  spec.tile_kv / 2 + probabilities + queries + spec.head_dim_v / 2 + 24);
}

std::int32_t ctas_that_fit(const Sm90ShortSpec& spec, const DeviceTraits& device) {
  const int bytes = sm90_short_layout(spec).bytes + kReservedSharedBytes;
  int ctas = device.shared_bytes_per_sm / bytes;
  const auto registers_beside = [&] {
    const auto warps_of_scheduler = static_cast<int>(ceil_div(spec.num_warps * ctas, kSchedulers));
    return std::min(kMostRegisters, kRegisters / kSchedulers / (32 * warps_of_scheduler) / 8 * 8);
  };
  while (ctas > 0 && registers_beside() < wanted_registers(spec)) --ctas;
  return ctas;
}

/// Rows of a CTA, the groups that share them, and the most keys of a product.
struct Tile {
  std::int64_t row_tiles, groups, most_keys;
  std::int64_t kv_buffers = 0;  // that tiles of keys pass through; 0: each has its own
};

/// With as many buffers of Q, up to one for each of a group's row tiles, as cost no CTA.
Sm90ShortSpec with_queries(Sm90ShortSpec spec, const DeviceTraits& device) {
  const std::int64_t most = spec.keeps_queries ? 1 : ceil_div(row_tiles_of(spec), groups_of(spec));
  spec.q_stages = 1;
  spec.ctas_per_sm = ctas_that_fit(spec, device);
  for (Sm90ShortSpec more = spec; more.q_stages < most;) {
    ++more.q_stages;
    if (ctas_that_fit(more, device) < spec.ctas_per_sm) break;
    spec = more;
  }
  return spec;
}

/// CTAs that stay and share a head's keys drift apart and read them twice, which rows of wide heads cannot bear.
bool can_be_persistent(const Sm90ShortSpec& spec, const ForwardProblem& f) {
  const bool shares_keys = spec.tile_q < f.seqlen_q;
  return !f.is_varlen && f.seqlen_kv <= kFewKeys && is_one_step(spec) &&
         (!shares_keys || is_narrow(f));
}

/// Measured (docs/kernels/attention_short_sm90.md): of 384 rows it is 3 % slower.
constexpr std::int32_t kMostRowsLastFirst = 320;
/// A CTA with rows in all of its row tiles, several of a group, some of which see fewer keys.
bool can_take_last_first(const Sm90ShortSpec& spec, std::int32_t ctas_of_head,
                         const ForwardProblem& f) {
  return has_mask(f) && !f.is_varlen && ctas_of_head == 1 && spec.stages > 1 &&
         row_tiles_of(spec) > groups_of(spec) && spec.tile_q <= kMostRowsLastFirst;
}

/// Up to this head dim, and from kWideHeadDim on (measured, likewise).
constexpr std::int64_t kWidestKept = 72;
bool can_keep_queries(const ForwardProblem& f) {
  return has_mask(f) && !f.is_varlen && (widest(f) <= kWidestKept || is_wide(f));
}
/// Of more rows than begin with the last, where registers of two groups hold queries beside wide sums.
bool keeps_queries(const Sm90ShortSpec& spec, const ForwardProblem& f) {
  return can_keep_queries(f) && spec.kv_buffers == 0 && spec.tile_q > kMostRowsLastFirst &&
         spec.tile_kv <= kShortRows && (!is_wide(f) || groups_of(spec) <= 2);
}

/// Between those, tiles of keys pass through two buffers beside two row tiles, and two CTAs fit an SM: measured at
/// head_dim 80 under a mask; of 72 it is no gain.
constexpr std::int64_t kBuffersOfRing = 2;
bool can_have_ring(const ForwardProblem& f) {
  return has_mask(f) && !f.is_varlen && widest(f) > kWidestKept &&
         widest(f) <= kWidestWithLastRows && f.seqlen_q > kMostRowsLastFirst &&
         f.seqlen_kv > kMostRowsLastFirst;
}

Sm90ShortSpec with_tile(const ForwardProblem& f, const Tile& tile, const DeviceTraits& device) {
  const auto padded = [](std::int64_t head_dim) {
    return static_cast<std::int32_t>(ceil_div(head_dim, kHeadDimStep) * kHeadDimStep);
  };
  Sm90ShortSpec spec{common_spec(f)};
  spec.head_dim_qk = padded(f.head_dim_qk);
  spec.head_dim_v = padded(f.head_dim_v);
  spec.has_padded_head_dim = spec.head_dim_v != f.head_dim_v;  // whoever loads pads Q, K and V
  const Parts keys = parts_of(f.seqlen_kv, tile.most_keys, kKeyStep);
  const bool has_last = has_last_rows(f) && keys.count == 1 && tile.groups == 1;
  const std::int64_t whole = has_last ? f.seqlen_q / kShortRows * kShortRows : f.seqlen_q;
  const Parts rows = parts_of(whole, kShortRows * tile.row_tiles, kShortRows);
  spec.tile_q = rows.each + (has_last && rows.count == 1 ? kShortLastRows : 0);
  spec.num_warps =
      static_cast<std::int32_t>(4 * std::min<std::int64_t>(tile.groups, rows.each / kShortRows)) +
      (has_last ? 1 : 0);
  spec.tile_kv = keys.each;
  spec.stages = keys.count;
  spec.kv_buffers = static_cast<std::int32_t>(tile.kv_buffers);
  spec.is_persistent = can_be_persistent(spec, f);
  spec.takes_last_first = spec.kv_buffers > 0 || can_take_last_first(spec, rows.count, f);
  spec.keeps_queries = keeps_queries(spec, f);
  spec.runs_ahead = spec.keeps_queries && !is_wide(f);
  return with_queries(spec, device);
}

// Measured (docs/kernels/attention_short_sm90.md).
constexpr std::int64_t kNarrowestHeadDim = 32;
constexpr std::int64_t kMostRowTiles = 6;

/// A row tile a group up to some 100 keys, and of narrow heads a group a CTA, which lets more CTAs in.
Tile tile_of_few_keys(const ForwardProblem& f) {
  const std::int64_t groups = is_narrow(f) ? 1 : 2;
  return {.row_tiles = groups, .groups = groups, .most_keys = kFewKeys};
}

/// Of more keys, all row tiles, which choose() may divide.
Tile tile_of_many_keys(const ForwardProblem& f) {
  const bool has_four_row_tiles = f.seqlen_q <= 4 * kShortRows;
  Tile tile{.row_tiles = kMostRowTiles, .groups = 1, .most_keys = 256};
  // One product, but where a mask leaves out tiles of 64.
  if (f.seqlen_kv <= kKeysOfOneProduct && !is_wide(f) && !(is_narrow(f) && has_mask(f)))
    return tile;
  tile.most_keys = kFewKeys;
  if (widest(f) <= kNarrowestHeadDim && !has_mask(f)) return tile;
  // Of narrow heads two CTAs of two groups fit the SM; three groups have two row tiles each.
  tile.groups = is_narrow(f) || has_four_row_tiles ? 2 : 3;
  if (!is_wide(f) || !has_four_row_tiles || has_mask(f))
    tile.most_keys = 64;
  else if (f.seqlen_kv > 2 * kFewKeys)
    tile.most_keys = 128;
  return tile;
}

/// Of queries and keys. Beyond, and of head dims that leave half a panel earlier, the kernel for long sequences fills
/// its tiles as well; under a mask not where queries can be kept.
std::int64_t most_tokens(const ForwardProblem& f) {
  const bool leaves_half = !is_narrow(f) && !is_wide(f);
  if (!has_mask(f)) return leaves_half ? kKeysOfOneProduct : 320;
  return leaves_half && !can_keep_queries(f) && !can_have_ring(f) ? 320 : 384;
}

/// Time of the CTAs that share a head's row tiles, in halves of a row tile: as many waves as they take on the device,
/// each with its row tiles and what a CTA does beside them.
std::int64_t time_of(const Sm90ShortSpec& spec, const ForwardProblem& f,
                     const DeviceTraits& device) {
  const std::int64_t ctas = f.num_sequences * f.num_heads_q * ceil_div(f.seqlen_q, spec.tile_q);
  const std::int64_t at_once = std::int64_t{device.num_sms} * spec.ctas_per_sm;
  return ceil_div(ctas, at_once) * (2 * spec.tile_q / kShortRows + 1);
}

/// Are there heads for the second place of most SMs?
bool has_many_heads(const ForwardProblem& f, const DeviceTraits& device) {
  return 3 * f.num_sequences * f.num_heads_q > 4 * std::int64_t{device.num_sms};
}

/// Has a CTA, of one product, its next queries at hand, and hardly a CTA beside it that would fill its waits, not of
/// fewer rows either? Then all rows of a head in one are ahead of as many waves of fewer, but not under a mask.
bool goes_on_alone(const Sm90ShortSpec& spec, const ForwardProblem& f) {
  return spec.stages == 1 && spec.q_stages > 1 && !is_narrow(f) && !has_mask(f);
}

/// Is each row's share of the keys a range of them?
bool has_kv_limits(const ForwardProblem& f) {
  const MaskMod& mask = f.problem.mask;
  return mask.is_all_visible() || expr::kv_limits(expr::simplify(mask.expr().shared())).has_value();
}

std::optional<Refusal> refuses_features(const ForwardProblem& f) {
  const Problem& p = f.problem;
  if (f.is_cached) return Refusal{"keys lie in a cache; expected those of a call"};
  // All packed rows bound a sequence too, but then what lies beside it would choose its kernel, and its bits.
  if (f.is_varlen && !(p.seqlen_q && p.seqlen_kv)) {
    return Refusal{
        "sequences are packed; expected bounds of their lengths, seqlen_q and seqlen_kv"};
  }
  if (p.dropout.p > 0) return Refusal{"dropout is given; this kernel has none"};
  if (p.out.dtype == Dtype::f32) return Refusal{"out is f32; expected f16 or bf16"};
  if (common_spec(f).is_prescaled)
    return Refusal{
        "a score program is given, or the scale is below 1e-30; this kernel has neither"};
  if (!has_kv_limits(f))
    return Refusal{"the mask is no range of keys for each row, as causal and window are"};
  return std::nullopt;
}

std::optional<Refusal> refuses_lengths(const ForwardProblem& f) {
  const std::int64_t most = most_tokens(f);
  for (const auto& [label, length] :
       {std::pair{"seqlen_q", f.seqlen_q}, std::pair{"seqlen_kv", f.seqlen_kv}}) {
    if (length > most)
      return Refusal{fmt::format("{} is {}; expected at most {}", label, length, most)};
  }
  if (f.seqlen_q >= kFewestQueries) return std::nullopt;
  return Refusal{fmt::format("seqlen_q is {}; expected at least {}", f.seqlen_q, kFewestQueries)};
}

}  // namespace

std::optional<Refusal> Sm90ForwardShort::refuses(const ForwardProblem& f,
                                                 const DeviceTraits& device) {
  if (auto refusal = refuses_tensor_cores(f, device)) return refusal;
  if (auto refusal = refuses_margin(f)) return refusal;
  if (device.compute_capability() != 90) {
    return Refusal{
        fmt::format("compute capability is {}.{}; expected 9.0", device.major, device.minor)};
  }
  if (auto refusal = refuses_features(f)) return refusal;
  if (auto refusal = refuses_head_dims(f, kWidestHeadDim)) return refusal;
  if (auto refusal = refuses_lengths(f)) return refusal;
  const Problem& p = f.problem;
  const std::string why =
      why_no_tensor_maps({{"q", &p.q}, {"k", &p.k}, {"v", &p.v}, {"out", &p.out}});
  if (!why.empty()) return Refusal{why};
  return refuses_shared_bytes(shared_bytes(choose(f, device)), device);
}

Sm90ShortSpec Sm90ForwardShort::choose(const ForwardProblem& f, const DeviceTraits& device) {
  if (f.seqlen_kv <= kFewKeys) {
    Tile tile = tile_of_few_keys(f);
    const Sm90ShortSpec spec = with_tile(f, tile, device);
    if (spec.ctas_per_sm > 0) return spec;
    tile.row_tiles = 1;
    return with_tile(f, tile, device);
  }
  if (can_have_ring(f))
    return with_tile(
        f, {.row_tiles = 2, .groups = 2, .most_keys = kShortRows, .kv_buffers = kBuffersOfRing},
        device);
  Tile tile = tile_of_many_keys(f);
  Sm90ShortSpec best = with_tile(f, tile, device);
  while (best.ctas_per_sm == 0 && tile.groups > 1) {
    --tile.groups;
    best = with_tile(f, tile, device);
  }
  if (best.ctas_per_sm == 0) return best;
  // Rows of a CTA change no bits: keys are in the same tiles. Two measured exceptions to waves, of many heads.
  if (has_many_heads(f, device) && best.runs_ahead) return best;
  while (--tile.row_tiles >= tile.groups) {
    const Sm90ShortSpec spec = with_tile(f, tile, device);
    const std::int64_t gain = time_of(best, f, device) - time_of(spec, f, device);
    const std::int64_t least = has_many_heads(f, device) && goes_on_alone(best, f) ? 1 : 0;
    if (spec.ctas_per_sm > 0 && gain >= least) best = spec;
  }
  return best;
}

std::vector<Sm90ShortSpec> Sm90ForwardShort::alternatives(const ForwardProblem& f,
                                                          const DeviceTraits& device) {
  std::vector<Sm90ShortSpec> specs;
  constexpr Tile kTiles[] = {{1, 1, 64},  {1, 1, 112}, {1, 1, 128}, {1, 1, 192}, {1, 1, 256},
                             {2, 1, 128}, {2, 1, 256}, {4, 1, 256}, {2, 2, 64},  {2, 2, 80},
                             {2, 2, 128}, {4, 2, 64},  {4, 2, 128}, {6, 1, 112}, {6, 2, 64},
                             {6, 2, 128}, {3, 3, 64},  {6, 3, 64},  {6, 3, 96},  {3, 3, 128}};
  for (const Tile& tile : kTiles) {
    const Sm90ShortSpec spec = with_tile(f, tile, device);
    if (spec.ctas_per_sm > 0) specs.push_back(spec);
  }
  return specs;
}

bool Sm90ForwardShort::reads(const AttentionForward& args, const GrownCache* cache) {
  const Operands tensors(args, cache);
  return have_tensor_maps({&tensors.q, &tensors.k, &tensors.v, &tensors.out});
}

std::size_t Sm90ForwardShort::shared_bytes(const Sm90ShortSpec& spec) {
  return static_cast<std::size_t>(sm90_short_layout(spec).bytes);
}

std::size_t Sm90ForwardShort::scratch_bytes(const Sm90ShortSpec&, const ForwardProblem&) {
  return 0;
}

Sm90ShortLaunch Sm90ForwardShort::prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                                          const AttentionForward& args, const GrownCache* cache,
                                          void* workspace, const TensorMapEncoder& encode) {
  const Operands tensors(args, cache);
  const std::int64_t keys = plan.spec->tile_kv;
  Sm90ShortLaunch launch;
  launch.common = forward_launch(problem, plan, args, workspace, cache);
  place_range_tables(plan, workspace, launch.common);
  if (launch.common.grid.x == 0) return launch;
  const std::int64_t panel = sm90_short_panel_bytes(plan.spec.as<Sm90ShortSpec>()) / 2;
  if (plan.spec.as<Sm90ShortSpec>().is_persistent) {
    const std::int64_t at_once = std::int64_t{plan.device.num_sms} * plan.spec->ctas_per_sm;
    launch.common.grid.x =
        static_cast<std::uint32_t>(std::min<std::int64_t>(launch.common.grid.x, at_once));
  }
  launch.params = {.q = tensor_map(encode, tensors.q, kShortRows, panel),
                   .k = tensor_map(encode, tensors.keys_or_queries(tensors.k), keys, panel),
                   .v = tensor_map(encode, tensors.keys_or_queries(tensors.v), keys, panel),
                   .common = launch.common.params};
  return launch;
}

KernelLaunches Sm90ShortLaunch::launches(const ForwardPlan& plan) const {
  KernelLaunches all;
  if (common.grid.x == 0) return all;
  common.add_tables(all);
  all.add(common.main_launch(plan, params));
  return all;
}

}  // namespace fovea::cuda
