#include "cuda/forward/sm90.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "cuda/forward/sm90_few_rows.hpp"
#include "cuda/forward/sm90_selections.hpp"
#include "cuda/params/tensor_maps.hpp"
#include "cuda/params/tensor_params.hpp"
#include "expr/position_steps.hpp"

namespace fovea::cuda {
namespace {

constexpr std::int64_t kRowsOfGroup = 64;
constexpr std::size_t kCounterBytes = 256;

/// Partial states come first in the workspace, then the counter of row tiles.
std::size_t counter_at(const ForwardSpec& spec, const ForwardProblem& f) {
  return (partial_bytes(spec, f) + kCounterBytes - 1) / kCounterBytes * kCounterBytes;
}

/// Tables of pieces and no comparison of positions, say.
bool has_coarse_mask(const ForwardProblem& f) {
  const expr::PositionSteps steps = expr::mask_steps(f.problem.mask.expr().node());
  return has_mask(f) && steps.q % kCoarseRows == 0 && steps.kv % kCoarseKeys == 0;
}

/// Tiles that keep everything in registers and shared memory, with measured reasons:
/// docs/kernels/attention_forward_sm90.md.
struct Tile {
  std::int64_t widest;  // of both head dims
  std::int32_t num_groups, tile_kv, q_stages;
  // Up to so many keys, without a mask and with one, three groups have too little to share: two take tiles of 128 keys.
  std::int64_t short_full = 0, short_masked = 0;
};
constexpr Tile kTiles[] = {
    // Three groups hide each other's exponentials, the bound up to 96 columns.
    {.widest = 64, .num_groups = 3, .tile_kv = 128, .q_stages = 2, .short_masked = 1024},
    {96, 3, 96, 2, 1024, 4096},
    {128, 2, 128, 2},  // two fill the tensor cores
    {192, 2, 96, 1},   // shared memory has no room for a second Q
    {256, 2, 64, 1},
};
constexpr std::int32_t kKeysOfTwoGroups = 128;
/// Where neither head dim is more, those beyond 64 can be padded to this, not to 128: a quarter of the products less.
constexpr std::int32_t kNarrow = 96;
constexpr std::int64_t kNarrowPanel = 32;
/// Rows that do not fill their panels (head_dim 72, 80, 88) are bound by the number of boxes, which narrow panels have
/// more of: they want the row tiles of three groups, which load keys less often, and more keys than these.
constexpr std::int64_t kShortCut = 1024;
/// Or no mask, and as many queries as two row tiles of three groups hold, and no two of two groups: measured.
constexpr std::int64_t kRowsOfTwoTiles = 2 * 128, kRowsOfTwoWideTiles = 2 * 192;

/// Sections before the last one take so much of what the L2 cache has room for: measured,
/// docs/kernels/attention_forward_sm90.md.
constexpr std::int32_t kSectionShare = 8;

/// Rows of K and V tiles in shared memory, two of each.
constexpr std::int32_t kStages = 2;

/// Registers of a computing thread that sums, scores and, in half of their place, probabilities take.
std::int32_t tile_registers(const Sm90ForwardSpec& spec) {
  return spec.head_dim_v / 2 + spec.tile_kv / 2 + spec.tile_kv / 4;
}

/// Does that leave room for the rest, of 160 with three groups and at least 232 with two? (Beside sums of 128 columns
/// three groups spill whatever the tile: compiled.)
bool has_registers(const Sm90ForwardSpec& spec, std::int32_t num_groups) {
  if (num_groups == 2) return tile_registers(spec) <= 200;
  return tile_registers(spec) <= 128 && spec.head_dim_v <= kNarrow;
}

/// What the kernel takes from neither loader.
std::optional<Refusal> refuses_numbers(const ForwardProblem& f, const DeviceTraits& device) {
  if (auto refusal = refuses_tensor_cores(f, device)) return refusal;
  return refuses_hopper(f, device);
}

/// What cp.async cannot copy by 16 bytes: by elements mma.sync's kernel, whose warps all copy, is three times as fast
/// (measured).
std::optional<Refusal> refuses_unaligned_rows(const ForwardProblem& f) {
  const Problem& p = f.problem;
  bool is_read = has_aligned_rows(p.q) && has_aligned_rows(p.k) && has_aligned_rows(p.v);
  if (p.out.dtype != Dtype::f32) is_read = is_read && has_aligned_rows(p.out);
  if (f.is_cached) is_read = is_read && f.cache.has_aligned_rows;
  if (is_read) return std::nullopt;
  return Refusal{
      "rows of q, out, k or v do not lie at multiples of 16 bytes; by elements mma.sync is faster"};
}

/// Sums in f32 go from registers to memory.
bool stores_by_tma(const ForwardProblem& f) { return f.problem.out.dtype != Dtype::f32; }

bool fills_narrow_panels(const ForwardProblem& f) {
  return f.head_dim_qk % kNarrowPanel == 0 && f.head_dim_v % kNarrowPanel == 0;
}

bool fills_two_wide_tiles(const ForwardProblem& f) {
  return !has_mask(f) && !f.is_varlen && !f.is_cached && f.seqlen_q > kRowsOfTwoTiles &&
         f.seqlen_q <= kRowsOfTwoWideTiles;
}

bool has_narrow_panels(const Sm90ForwardSpec& spec, const ForwardProblem& f) {
  if (spec.loads_by_cp_async || std::max(f.head_dim_qk, f.head_dim_v) > kNarrow) return false;
  const bool wants_three_groups = f.seqlen_kv > kShortCut || fills_two_wide_tiles(f);
  return fills_narrow_panels(f) || (wants_three_groups && !spec.has_dropout);
}

/// The most keys that two groups take instead of three.
std::int64_t most_keys_of_two_groups(const Tile& tile, const ForwardProblem& f) {
  if (tile.widest == kNarrow && !fills_narrow_panels(f))
    return fills_two_wide_tiles(f) ? 0 : kShortCut;
  return has_mask(f) ? tile.short_masked : tile.short_full;
}

Sm90ForwardSpec choose_for_many_rows(Sm90ForwardSpec spec, const ForwardProblem& f) {
  if (has_narrow_panels(spec, f)) {
    spec.head_dim_qk = std::min(spec.head_dim_qk, kNarrow);
    spec.head_dim_v = std::min(spec.head_dim_v, kNarrow);
  }
  const std::int64_t widest = std::max(spec.head_dim_qk, spec.head_dim_v);
  Tile tile = *std::ranges::find_if(kTiles, [&](const Tile& t) { return t.widest >= widest; });
  const bool is_short = f.seqlen_kv <= most_keys_of_two_groups(tile, f);
  // The generator of dropout needs registers, and is the bound then; threads that copy need registers.
  if (tile.num_groups == 3 && (is_short || spec.has_dropout || spec.loads_by_cp_async)) {
    tile.num_groups = 2;
    tile.tile_kv = kKeysOfTwoGroups;
  }
  if (spec.head_dim_qk == 192 && spec.head_dim_v <= 128) tile.tile_kv = 128;
  spec.tile_q = static_cast<std::int32_t>(kRowsOfGroup) * tile.num_groups;
  spec.tile_kv = tile.tile_kv;
  spec.num_warps = sm90_num_warps(spec, tile.num_groups);
  spec.stages = kStages;
  spec.ctas_per_sm = 1;
  spec.q_stages = tile.q_stages;
  spec.is_dynamic = has_mask(f) || f.is_varlen || f.is_cached;  // row tiles of unequal length
  spec.has_coarse_mask = has_coarse_mask(f);
  return spec;
}

Sm90ForwardSpec hopper_spec(const ForwardProblem& f) {
  Sm90ForwardSpec spec{common_spec(f)};
  spec.has_padded_head_dim = false;  // whoever loads pads
  spec.head_dim_qk = static_cast<std::int32_t>(panels_of(f.head_dim_qk));
  spec.head_dim_v = static_cast<std::int32_t>(panels_of(f.head_dim_v));
  spec.is_cached = f.is_cached;
  return spec;
}

std::vector<Sm90ForwardSpec> alternatives_for_many_rows(const Sm90ForwardSpec& chosen,
                                                        const DeviceTraits& device) {
  std::vector<Sm90ForwardSpec> specs;
  for (const std::int32_t groups : {2, 3}) {
    if (groups == 3 && chosen.loads_by_cp_async) continue;
    for (const std::int32_t tile_kv : {64, 96, 128, 160, 192}) {  // a lane of a warp has as many
      for (const auto& [stages, q_stages] : {std::pair{2, 1}, {2, 2}, {3, 1}, {3, 2}}) {
        Sm90ForwardSpec spec = chosen;
        spec.tile_q = static_cast<std::int32_t>(kRowsOfGroup) * groups;
        spec.tile_kv = tile_kv;
        spec.num_warps = 4 * (groups + 1);
        spec.stages = stages;
        spec.q_stages = q_stages;
        const std::int32_t bytes = sm90_forward_layout(spec).bytes;
        if (has_registers(spec, groups) && bytes <= device.shared_bytes_per_cta)
          specs.push_back(spec);
      }
    }
  }
  return specs;
}

}  // namespace

std::optional<Refusal> refuses_hopper(const ForwardProblem& f, const DeviceTraits& device) {
  if (device.compute_capability() != 90) {
    return Refusal{
        fmt::format("compute capability is {}.{}; expected 9.0", device.major, device.minor)};
  }
  if (f.seqlen_kv >= std::int64_t{1} << 28) return Refusal{"more than 2^28 keys"};
  const std::int64_t packed_keys = f.is_cached ? 0 : f.problem.k.shape[0];
  if (f.is_varlen && std::max(f.total_q, packed_keys) > std::int64_t{0x7fffffff})
    return Refusal{"more than 2^31 packed rows"};
  return refuses_few_queries(f);
}

std::optional<Refusal> refuses_shared_tiles(const ForwardProblem& f) {
  if (!has_few_rows(f)) return std::nullopt;
  return Refusal{
      fmt::format("{} rows share a kv head; expected more than {}, fewer leave most "
                  "of a tile of one head empty",
                  f.group * f.seqlen_q, kFewRows)};
}

std::optional<Refusal> refuses_few_queries(const ForwardProblem& f) {
  if (!f.is_cached || has_few_rows(f) || f.seqlen_q >= kRowsOfGroup) return std::nullopt;
  return Refusal{
      fmt::format("seqlen_q is {}; expected at least {} beside a cache, fewer leave "
                  "most of a tile of one head empty",
                  f.seqlen_q, kRowsOfGroup)};
}

std::optional<Refusal> refuses_cache_tiles(const ForwardProblem& f) {
  const std::int64_t page_size = f.cache.page_size;
  if (f.is_paged && (page_size < kFewestRowsOfBox ||
                     !std::has_single_bit(static_cast<std::uint64_t>(page_size)))) {
    return Refusal{fmt::format("page_size is {}; expected a power of two from {} on", page_size,
                               kFewestRowsOfBox)};
  }
  return refuses_boxes(f, "tile");
}

std::optional<Refusal> Sm90Forward::refuses(const ForwardProblem& f, const DeviceTraits& device) {
  if (auto refusal = refuses_many_rows(f, device)) return refusal;
  return has_few_rows(f) ? refuses_few_rows(f) : std::nullopt;
}

std::optional<Refusal> Sm90Forward::refuses_many_rows(const ForwardProblem& f,
                                                      const DeviceTraits& device) {
  if (auto refusal = refuses_numbers(f, device)) return refusal;
  if (auto refusal = refuses_cache_tiles(f)) return refusal;
  const Problem& p = f.problem;
  std::string why = why_no_tensor_maps({{"q", &p.q}, {"k", &p.k}, {"v", &p.v}});
  if (why.empty() && stores_by_tma(f)) why = why_no_tensor_maps({{"out", &p.out}});
  if (!why.empty()) return Refusal{why};
  return std::nullopt;
}

Sm90ForwardSpec Sm90Forward::choose(const ForwardProblem& f, const DeviceTraits& device) {
  const Sm90ForwardSpec spec = hopper_spec(f);
  if (has_few_rows(f)) return with_few_rows(spec, f, device);
  const Sm90ForwardSpec usual = choose_for_many_rows(spec, f);
  return has_selections(f, usual) ? with_selections(usual, f) : usual;
}

Sm90ForwardSpec Sm90Forward::choose_many_rows(const ForwardProblem& f) {
  return choose_for_many_rows(hopper_spec(f), f);
}

std::vector<Sm90ForwardSpec> Sm90Forward::alternatives(const ForwardProblem& f,
                                                       const DeviceTraits& device) {
  if (has_few_rows(f)) return few_rows_alternatives(choose(f, device), device);
  const Sm90ForwardSpec usual = choose_for_many_rows(hopper_spec(f), f);
  if (!has_selections(f, usual)) return alternatives_for_many_rows(usual, device);
  std::vector<Sm90ForwardSpec> specs = selections_alternatives(choose(f, device), device);
  specs.push_back(usual);
  return specs;
}

bool Sm90Forward::reads(const AttentionForward& args, const GrownCache* cache) {
  const Operands tensors(args, cache);
  const bool stores = args.out.dtype() != Dtype::f32;
  return have_tensor_maps({&tensors.q, &tensors.k, &tensors.v}) &&
         (!stores || have_tensor_maps({&tensors.out}));
}

std::optional<Refusal> Sm90ForwardCpAsync::refuses(const ForwardProblem& f,
                                                   const DeviceTraits& device) {
  if (auto refusal = refuses_numbers(f, device)) return refusal;
  if (auto refusal = refuses_shared_tiles(f)) return refusal;
  if (std::max(f.head_dim_qk, f.head_dim_v) <= kPanelElements) {
    return Refusal{
        fmt::format("head dims are {} and {}; expected more than {}, else mma.sync is faster",
                    f.head_dim_qk, f.head_dim_v, kPanelElements)};
  }
  if (auto refusal = refuses_unaligned_rows(f)) return refusal;
  if (!Sm90Forward::refuses(f, device)) return Refusal{"TMA reads these tensors, which is faster"};
  return std::nullopt;
}

bool Sm90ForwardCpAsync::reads(const AttentionForward& args, const GrownCache* cache) {
  const Operands tensors(args, cache);
  const bool is_out_read = args.out.dtype() == Dtype::f32 || is_aligned(tensors.out);
  return is_aligned(tensors.q) && is_aligned(tensors.k) && is_aligned(tensors.v) && is_out_read;
}

Sm90ForwardSpec Sm90ForwardCpAsync::choose(const ForwardProblem& f, const DeviceTraits&) {
  Sm90ForwardSpec spec = hopper_spec(f);
  spec.loads_by_cp_async = true;
  return choose_for_many_rows(spec, f);
}

std::vector<Sm90ForwardSpec> Sm90ForwardCpAsync::alternatives(const ForwardProblem& f,
                                                              const DeviceTraits& device) {
  return alternatives_for_many_rows(choose(f, device), device);
}

std::size_t Sm90Forward::shared_bytes(const Sm90ForwardSpec& spec) {
  return static_cast<std::size_t>(sm90_forward_layout(spec).bytes);
}

std::size_t Sm90Forward::scratch_bytes(const Sm90ForwardSpec& spec, const ForwardProblem& f) {
  const std::int64_t tiles = num_row_tiles(spec, f, f.seqlen_q, f.total_q) * max_splits(spec, f);
  return counter_at(spec, f) + kCounterBytes +
         static_cast<std::size_t>(tiles) * sizeof(std::int32_t);
}

namespace {

/// What a dynamic schedule reads of sections.
struct Sections {
  std::int32_t heads, last;
};
Sections sections_of(const ForwardParams& p) {
  const std::int32_t cached = p.heads_per_section;  // heads that fit the L2 cache together
  const std::int32_t heads = std::max(1, cached / kSectionShare);
  const std::int32_t before = std::max(0, p.num_sequences * p.num_heads_q - cached);
  return {heads, before / heads * heads};
}

}  // namespace

Sm90Launch persistent_launch(const Sm90ForwardSpec& spec, const ForwardProblem& problem,
                             const ForwardPlan& plan, const AttentionForward& args,
                             const GrownCache* cache, void* workspace) {
  std::byte* const scratch = static_cast<std::byte*>(workspace) + counter_at(spec, problem);
  Sm90Launch launch;
  launch.common = forward_launch(problem, plan, args, workspace, cache);
  place_range_tables(plan, workspace, launch.common);
  if (launch.common.grid.x == 0) return launch;
  const std::uint32_t num_tiles =
      launch.common.grid.x * static_cast<std::uint32_t>(max_splits(spec, problem));
  launch.num_ctas = std::min(
      num_tiles, static_cast<std::uint32_t>(spec.ctas_per_sm * usable_sms(problem, plan.device)));
  launch.has_counter = spec.is_dynamic && num_tiles > launch.num_ctas;
  const Sections sections = sections_of(launch.common.params);
  const std::int32_t rows_per_box = rows_of_box(spec, launch.common.params.page_size);
  launch.params = {
      .q{},
      .k{},
      .v{},
      .out{},
      .common = launch.common.params,
      .num_tiles = static_cast<std::int32_t>(num_tiles),
      .next_tile = reinterpret_cast<std::int32_t*>(scratch),
      .heads_per_section = sections.heads,
      .last_section = sections.last,
      .next_redo = reinterpret_cast<std::int32_t*>(scratch + kCounterBytes),
      .zero = 0,
      .rows_per_box = rows_per_box,
      .claims_of_wave =
          launch.has_counter ? claims_of_wave(spec, problem, plan.device, launch.num_ctas) : 0,
      .quantized = {},
      .values = {},
      .k_scale = {},
      .v_scale = {},
      .notes = nullptr};
  launch.counter.counter = launch.params.next_tile;
  return launch;
}

void place_tensor_maps(const Sm90ForwardSpec& spec, std::int64_t group_rows,
                       const Operands& tensors, const TensorMapEncoder& encode,
                       Sm90ForwardParams& params) {
  const std::int32_t panel = sm90_panel_elements(spec);
  params.q = spec.heads_per_tile == 1
                 ? tensor_map(encode, tensors.q, group_rows, panel)
                 : tensor_map_of_heads(encode, tensors.q, spec.tile_q / spec.heads_per_tile,
                                       spec.heads_per_tile);
  params.k = tensor_map(encode, tensors.keys_or_queries(tensors.k), params.rows_per_box, panel);
  params.v = tensor_map(encode, tensors.keys_or_queries(tensors.v), params.rows_per_box, panel);
}

Sm90Launch Sm90Forward::prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                                const AttentionForward& args, const GrownCache* cache,
                                void* workspace, const TensorMapEncoder& encode) {
  const Operands tensors(args, cache);
  const auto& spec = plan.spec.as<Sm90ForwardSpec>();
  Sm90Launch launch = persistent_launch(spec, problem, plan, args, cache, workspace);
  if (launch.common.grid.x == 0) return launch;
  if (!spec.loads_by_cp_async) {
    place_tensor_maps(spec, kRowsOfGroup, tensors, encode, launch.params);
    if (stores_by_tma(problem)) {
      launch.params.out = tensor_map(encode, tensors.out, kRowsOfGroup, sm90_panel_elements(spec));
    }
  }
  return launch;
}

void Sm90Launch::add_before(KernelLaunches& all) const {
  common.add_tables(all);
  if (!has_counter) return;
  KernelLaunch clear = kernel_launch(KernelRole::clear_counter, counter);
  clear.num_threads = 1;
  all.add(clear);
}

KernelLaunches Sm90Launch::launches(const ForwardPlan& plan) const {
  KernelLaunches all;
  if (num_ctas == 0) return all;
  add_before(all);
  if (quantize.num_ctas > 0) quantize.add_to(all);
  if (numbers.num_ctas > 0) numbers.add_to(all);
  KernelLaunch main = common.main_launch(plan, params);
  main.grid = {.x = num_ctas};
  main.is_pdl = has_counter || quantize.num_ctas > 0;
  all.add(main);
  common.add_combine(plan, all);
  if (lost.num_ctas > 0) lost.add_to(all);
  return all;
}

}  // namespace fovea::cuda
