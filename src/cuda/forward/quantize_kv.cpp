// Fill params, launch.
#include "cuda/forward/quantize_kv.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "cuda/forward/quantized_recipe.hpp"
#include "cuda/params/tensor_params.hpp"
#include "quant/hadamard.hpp"

namespace fovea::cuda {
namespace {

/// CTAs of an SM: the more, the more bytes of loads are under way. Rows by elements take registers of the third, and so
/// do rows that are rotated.
constexpr int kCtasPerSm = 3;
constexpr int kMoreCtasPerSm = 4;
constexpr int kFewerCtasPerSm = 2;

/// Rows and tiles of a head, and lists of tiles: packed sequences have one. Of the problem, bounds of those of a call.
/// Where there are none there is a row all the same: maps have no empty tensors.
struct Counts {
  std::int64_t rows, tiles, lists;

  Counts(bool is_packed, std::int64_t batch, std::int64_t seqlen, std::int64_t total)
      : rows(std::max<std::int64_t>(1, is_packed ? total : seqlen)),
        tiles(is_packed ? first_packed_tile(batch, rows) : ceil_div(rows, kQuantizedTile)),
        lists(is_packed ? 1 : std::max<std::int64_t>(1, batch)) {}
  static Counts of_queries(const ForwardProblem& f) {
    return {f.is_varlen, f.num_sequences, f.seqlen_q, f.total_q};
  }
  static Counts of_keys(const ForwardProblem& f) {
    return {f.is_varlen && !f.is_cached, f.num_sequences, f.seqlen_kv, f.problem.k.shape[0]};
  }
};

/// Where each part lies, in bytes from the first.
struct Parts {
  std::size_t k_codes, keys, mean, v_codes, v_scales, v_mean, q_codes, rows, bytes;
};

Parts parts_of(const QuantizeKvSpec& spec, const ForwardProblem& f) {
  const Counts keys = Counts::of_keys(f), queries = Counts::of_queries(f);
  const std::int64_t lists = keys.lists * f.num_heads_kv;
  const std::int64_t num_keys = lists * keys.rows;
  const std::int64_t tiles = spec.writes_numbers ? 0 : lists * keys.tiles;  // of codes
  const std::int64_t num_queries = spec.rounds_q ? queries.lists * f.num_heads_q * queries.rows : 0;
  const auto size = std::int64_t{spec.writes_numbers ? 2 : 1};
  const bool has_value_codes = spec.head_dim_v > 0 && !writes_values(spec);
  const std::int64_t v_bytes = writes_values(spec) ? num_keys * spec.head_dim_v * 2
                                                   : tiles * spec.head_dim_v * kQuantizedTile;
  const std::int64_t heads = f.num_sequences * f.num_heads_kv;
  const std::int64_t mean_bytes = heads *
                                  key_mean_floats(spec.head_dim_qk, spec.keeps_greatest_scale) *
                                  std::int64_t{sizeof(float)};
  const std::int64_t num_channels = heads * spec.head_dim_v;
  const std::int64_t num_scales = has_channel_scales(spec) ? num_channels
                                  : has_value_codes        ? tiles
                                                           : 0;
  const std::int64_t num_rows = spec.writes_numbers ? 0 : num_queries;
  Parts at{};
  at.keys = at.k_codes + part_bytes(num_keys * spec.head_dim_qk * size);
  const std::int64_t scales = tiles * (kQuantizedTile / spec.k_tile) * kScalesOfTile;
  at.mean = at.keys + part_bytes(scales * std::int64_t{sizeof(QuantizedKeys)});
  at.v_codes = at.mean + part_bytes(mean_bytes);
  at.v_scales = at.v_codes + part_bytes(v_bytes);
  at.v_mean = at.v_scales + part_bytes(num_scales * std::int64_t{sizeof(float)});
  at.q_codes =
      at.v_mean + part_bytes(spec.smooths_v ? num_channels * std::int64_t{sizeof(float)} : 0);
  at.rows = at.q_codes + part_bytes(num_queries * spec.head_dim_qk * size);
  at.bytes = at.rows + part_bytes(num_rows * std::int64_t{sizeof(QuantizedRow)});
  return at;
}

/// `num_ctas`: of an SM, that registers are left for.
jit::KernelText text_of(std::string_view entry, int num_ctas, const QuantizeKvSpec& spec) {
  return {fmt::format("#include \"common/quantize_kv.cuh\"\n"
                      "namespace fovea::cuda {{\n{}}}\n"
                      "extern \"C\" __global__ void __launch_bounds__({}, {}) {}("
                      "const __grid_constant__ fovea::cuda::{} p) {{\n"
                      "  fovea::cuda::{}<fovea::cuda::spec>(p);\n}}\n",
                      print_spec(spec), kQuantizeThreads, num_ctas, jit::kEntryName,
                      spec.is_cached ? "QuantizeCacheParams" : "QuantizeKvParams", entry),
          fmt::format("common/{} {} d{}", entry, name(spec.element), spec.head_dim_qk)};
}

/// Rows of 64 numbers spill nothing where there are four, plain ones of 128 a few bytes.
int ctas_per_sm(const QuantizeKvSpec& spec) {
  if (spec.reads_elements || spec.rotates) return kFewerCtasPerSm;
  if (spec.rounding != Rounding::rows || spec.is_cached || spec.rounds_q) return kCtasPerSm;
  const bool is_narrow = std::max(spec.head_dim_qk, spec.head_dim_v) <= 64;
  return is_narrow || !(spec.is_packed || spec.smooths_v) ? kMoreCtasPerSm : kCtasPerSm;
}

/// A map of rows of codes, so many of each of `lists` lists of each head.
struct RowsOfCodes {
  std::int64_t width, rows, heads, lists;
  std::int64_t rows_of_box;

  [[nodiscard]] driver::TensorMapSpec map() const {
    const auto bytes = static_cast<std::uint64_t>(width);
    const auto of_head = bytes * static_cast<std::uint64_t>(rows);
    driver::TensorMapSpec spec{.element = driver::TensorMapElement::u8, .rank = 4};
    spec.shape = {bytes, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(heads),
                  static_cast<std::uint64_t>(lists)};
    spec.stride_bytes = {1, bytes, of_head, of_head * static_cast<std::uint64_t>(heads)};
    spec.box = {static_cast<std::uint32_t>(width), static_cast<std::uint32_t>(rows_of_box), 1, 1};
    return spec;
  }
};

RowsToRound rows_to_round(const BshdParam& x, std::int32_t head_dim, const ForwardParams& call,
                          std::int32_t num_tiles) {
  return {.x = x,
          .head_dim = head_dim,
          .is_aligned = call.is_q_aligned != 0 && call.is_kv_aligned != 0,
          .num_heads_kv = call.num_heads_kv,
          .seqlen_kv = call.seqlen_kv,
          .num_tiles = num_tiles,
          .cu_seqlens_kv = call.cu_seqlens_kv,
          .num_sequences = call.num_sequences,
          .total_kv = call.total_kv,
          .scales = {}};
}

/// Of rows of the problem.
RotationParams rotation_of(std::int32_t head_dim) {
  RotationParams rotation{};
  rotation.block = static_cast<std::int32_t>(quant::hadamard_block(head_dim));
  rotation.factor = 1 / std::sqrt(static_cast<float>(rotation.block));
  for (std::int32_t channel = 0; channel < head_dim; ++channel)
    if (quant::is_flipped(channel))
      rotation.flipped[channel / 8] |= static_cast<std::uint8_t>(1U << channel % 8);
  return rotation;
}

QuantizeQParams query_params(const ForwardParams& call, const Counts& counts, std::byte* codes,
                             std::byte* rows) {
  return {.q = call.q,
          .scales = {},
          .num_heads_q = call.num_heads_q,
          .group = call.group,
          .seqlen_q = call.seqlen_q,
          .num_tiles = static_cast<std::int32_t>(counts.tiles),
          .cu_seqlens_q = call.cu_seqlens_q,
          .total_q = call.total_q,
          .codes = reinterpret_cast<std::int8_t*>(codes),
          .numbers = reinterpret_cast<std::uint16_t*>(codes),
          .beside = {.rows = reinterpret_cast<const QuantizedRow*>(rows),
                     .batch_stride = std::int64_t{call.num_heads_q} * call.seqlen_q,
                     .head_stride = counts.rows}};
}

Counts counts_of(const QuantizeKvLaunch& launch) {
  const QuantizeKParams& k = launch.params.k;
  return {launch.spec.is_packed, k.num_sequences, k.seqlen_kv, k.total_kv};
}

}  // namespace

QuantizeKvSpec quantize_kv_spec(const Sm90ForwardSpec& attention) {
  const bool is_cached = attention.is_cached;
  return {.element = attention.element,
          .head_dim_qk = attention.head_dim_qk,
          .head_dim_v = attention.sums_codes || is_cached ? attention.head_dim_v : 0,
          .is_packed = attention.is_varlen && !is_cached,
          .rotates = attention.rotates,
          .smooths_v = attention.smooths_v,
          .is_cached = is_cached,
          .is_paged = attention.is_paged,
          .has_packed_q = attention.has_packed_q,
          .k_codes = attention.k_codes,
          .v_codes = attention.v_codes,
          .keeps_v = is_cached && !attention.sums_codes,
          .keeps_greatest_scale = reads_greatest_scale(attention)};
}

QuantizeKvSpec quantize_kv_spec(const TeamSpec& attention, const Quantization& quant) {
  const RowGroups rows = groups_of_q(quant);
  return {.element = attention.element,
          .head_dim_qk = 2 * attention.head_dim_qk,
          .head_dim_v = attention.sums_codes || attention.smooths_v ? attention.head_dim_v : 0,
          .is_packed = attention.is_varlen,
          .rounds_q = true,
          .reads_elements = true,
          .rounding = attention.rounding,
          .q_span = rows.span,
          .q_step = rows.step,
          .k_tile = attention.scale_tile,
          .has_k_lanes = quant.k_scales != ScaleGranularity::block,
          .key_mean = key_mean_of(quant),
          .rotates = quant.hadamard,
          .smooths_v = attention.smooths_v,
          .centers_v = attention.smooths_v && !attention.sums_codes,
          .takes_codes = attention.takes_codes,
          .keeps_greatest_scale = knows_lost_by_scale(attention)};
}

QuantizeKvSpec quantize_numbers_spec(const ForwardProblem& f) {
  const bool rounds_v = sums_codes(f.problem.quant);
  return {.element = element_of(f.problem.q.dtype),
          .head_dim_qk = static_cast<std::int32_t>(panels_of(f.head_dim_qk)),
          .head_dim_v = rounds_v ? static_cast<std::int32_t>(panels_of(f.head_dim_v)) : 0,
          .is_packed = f.is_varlen,
          .rounds_q = true,
          .reads_elements = true,
          .writes_numbers = true,
          .rotates = f.problem.quant.hadamard,
          .smooths_v = f.problem.quant.smooth_v != Smoothing::none};
}

PlannedKernels quantize_kv_kernels(const QuantizeKvSpec& spec) {
  PlannedKernels kernels;
  if (looks_at_sequences(spec))
    kernels.push_back({KernelRole::key_mean, text_of("mean_of_keys", 1, spec)});
  kernels.push_back({KernelRole::quantize, text_of("quantize_kv", ctas_per_sm(spec), spec)});
  return kernels;
}

std::int64_t num_quantizing_ctas(const ForwardProblem& f) {
  const Counts q = Counts::of_queries(f), k = Counts::of_keys(f);
  return k.lists * (f.num_heads_q * q.tiles + 2 * f.num_heads_kv * k.tiles);
}

std::size_t quantized_bytes(const QuantizeKvSpec& spec, const ForwardProblem& f) {
  return parts_of(spec, f).bytes;
}

QuantizeKvLaunch quantize_kv_launch(const QuantizeKvSpec& spec, const ForwardProblem& f,
                                    const ForwardParams& call, void* to) {
  const Counts counts(spec.is_packed, call.num_sequences, call.seqlen_kv, call.total_kv);
  const Parts at = parts_of(spec, f);
  auto* const base = static_cast<std::byte*>(to);
  const auto num_tiles = static_cast<std::int32_t>(counts.tiles);
  QuantizeKvLaunch launch{.spec = spec};
  QuantizeKParams& k = launch.params.k;
  static_cast<RowsToRound&>(k) = rows_to_round(call.k, call.head_dim_qk, call, num_tiles);
  k.codes = reinterpret_cast<std::int8_t*>(base + at.k_codes);
  k.numbers = reinterpret_cast<std::uint16_t*>(base + at.k_codes);
  k.beside = {.keys = reinterpret_cast<const QuantizedKeys*>(base + at.keys),
              .mean = reinterpret_cast<const float*>(base + at.mean),
              .num_tiles = num_tiles,
              .rotation = spec.rotates ? rotation_of(call.head_dim_qk) : RotationParams{}};
  QuantizeVParams& v = launch.params.v;
  static_cast<RowsToRound&>(v) = rows_to_round(call.v, call.head_dim_v, call, num_tiles);
  v.codes = reinterpret_cast<std::uint8_t*>(base + at.v_codes);
  v.numbers = reinterpret_cast<std::uint16_t*>(base + at.v_codes);
  v.beside = {.scales = reinterpret_cast<const float*>(base + at.v_scales),
              .mean = reinterpret_cast<const float*>(base + at.v_mean)};
  v.v_max = f.problem.quant.v_max;
  if (call.num_sequences == 0) return launch;
  const auto tiles = static_cast<unsigned>(counts.lists * call.num_heads_kv * counts.tiles);
  launch.params.num_tiles_of_v = spec.head_dim_v > 0 ? static_cast<std::int32_t>(tiles) : 0;
  launch.num_ctas = spec.head_dim_v > 0 ? 2 * tiles : tiles;
  if (spec.rounds_q) {
    const Counts queries(spec.is_packed, call.num_sequences, call.seqlen_q, call.total_q);
    launch.params.q = query_params(call, queries, base + at.q_codes, base + at.rows);
    launch.params.num_tiles_of_q =
        static_cast<std::int32_t>(queries.lists * call.num_heads_q * queries.tiles);
    launch.num_ctas += static_cast<unsigned>(launch.params.num_tiles_of_q);
  }
  return launch;
}

void QuantizeKvLaunch::take_scales(const AttentionForward& args) {
  if (spec.rounding != Rounding::given) return;
  const auto given = [](const TensorView& scale) -> GivenScales {
    return {static_cast<const float*>(scale.data()), scale.stride(0), scale.stride(1)};
  };
  params.q.scales = given(args.q_scale);
  params.k.scales = given(args.k_scale);
  params.v.scales = given(args.v_scale);
}

void QuantizeKvLaunch::take_cache(const ForwardParams& call, const KvCache& cache) {
  params.cache = call;
  params.k_scale = scale_param(cache.k_scale);
  params.v_scale = scale_param(cache.v_scale);
}

void QuantizeKvLaunch::add_to(KernelLaunches& all) const {
  if (looks_at_sequences(spec)) {
    KernelLaunch mean = kernel_launch(KernelRole::key_mean, params);
    mean.grid = {.x = num_looking_ctas()};
    mean.num_threads = kQuantizeThreads;
    mean.shared_bytes = kMeanSharedBytes;
    all.add(mean);
  }
  KernelLaunch quantize = kernel_launch(KernelRole::quantize, params);
  quantize.grid = {.x = num_ctas};
  quantize.num_threads = kQuantizeThreads;
  quantize.shared_bytes = static_cast<std::size_t>(quantize_shared_bytes(spec));
  quantize.is_pdl = overlaps && looks_at_sequences(spec);
  all.add(quantize);
}

TensorSpec rounded_spec(const TensorSpec& given, std::int64_t width) {
  TensorSpec spec = given;
  const auto row = static_cast<std::size_t>(given.rank) - 3;
  const std::int64_t rows = given.shape[row], heads = given.shape[row + 1];
  spec.strides[row] = width;
  spec.strides[row + 1] = rows * width;
  spec.strides[row + 2] = 1;
  if (row == 1) spec.strides[0] = heads * rows * width;
  return spec;
}

RoundedTensors rounded_tensors(const QuantizeKvLaunch& launch, const AttentionForward& args) {
  const auto rounded = [](std::uint16_t* numbers, const TensorView& given, std::int64_t width) {
    return TensorView(static_cast<void*>(numbers), rounded_spec(given.spec(), width));
  };
  const QuantizeKvSpec& spec = launch.spec;
  const QuantizeKvParams& p = launch.params;
  RoundedTensors tensors{.q = rounded(p.q.numbers, args.q, spec.head_dim_qk),
                         .k = rounded(p.k.numbers, args.k, spec.head_dim_qk),
                         .v = args.v};
  if (spec.head_dim_v > 0) tensors.v = rounded(p.v.numbers, args.v, spec.head_dim_v);
  return tensors;
}

TensorMapParam map_of_key_codes(const TensorMapEncoder& encode, const QuantizeKvLaunch& launch) {
  const QuantizeKParams& k = launch.params.k;
  const Counts counts = counts_of(launch);
  driver::TensorMapSpec map = RowsOfCodes{.width = launch.spec.head_dim_qk,
                                          .rows = counts.rows,
                                          .heads = k.num_heads_kv,
                                          .lists = counts.lists,
                                          .rows_of_box = kQuantizedTile}
                                  .map();
  if (launch.spec.head_dim_qk == 64) map.swizzle = driver::TensorMapSwizzle::bytes_64;
  return encode(map, k.codes);
}

TensorMapParam map_of_value_codes(const TensorMapEncoder& encode, const QuantizeKvLaunch& launch) {
  const QuantizeVParams& v = launch.params.v;
  const Counts counts = counts_of(launch);
  const RowsOfCodes rows{.width = kQuantizedTile,
                         .rows = counts.tiles * launch.spec.head_dim_v,
                         .heads = v.num_heads_kv,
                         .lists = counts.lists,
                         .rows_of_box = launch.spec.head_dim_v};
  return encode(rows.map(), v.codes);
}

TensorMapParam map_of_kept_values(const TensorMapEncoder& encode, const QuantizeKvLaunch& launch,
                                  std::int64_t rows, std::int64_t panel) {
  const QuantizeVParams& v = launch.params.v;
  const std::int64_t width = launch.spec.head_dim_v, heads = v.num_heads_kv;
  const Counts counts = counts_of(launch);
  const std::array shape{counts.lists, counts.rows, heads, width};
  const std::array strides{heads * counts.rows * width, width, counts.rows * width,
                           std::int64_t{1}};
  const Dtype dtype = launch.spec.element == Element::f16 ? Dtype::f16 : Dtype::bf16;
  const TensorView values(static_cast<const void*>(v.numbers), make_spec(dtype, shape, strides));
  return tensor_map(encode, values, rows, panel);
}

}  // namespace fovea::cuda
