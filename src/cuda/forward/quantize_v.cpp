// Fill params, launch.
#include "cuda/forward/quantize_v.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/forward/quantized_counts.hpp"

namespace fovea::cuda {
namespace {

/// Tiles of all sequences and heads. Where there are no keys there is one all the same: maps have no empty tensors.
std::int64_t num_tiles(const QuantizeVSpec& spec, std::int64_t batch, std::int64_t heads,
                       std::int64_t tiles) {
  return num_tile_lists(spec.is_packed, std::max<std::int64_t>(1, batch)) * heads *
         std::max<std::int64_t>(1, tiles);
}

std::size_t code_bytes(const QuantizeVSpec& spec, std::int64_t tiles) {
  return part_bytes(tiles * spec.head_dim * kQuantizedTile);
}

}  // namespace

QuantizeVSpec quantize_v_spec(const ForwardSpec& attention) {
  return {.element = attention.element,
          .head_dim = attention.head_dim_v,
          .is_packed = attention.is_varlen};
}

PlannedKernel quantize_v_kernel(const QuantizeVSpec& spec) {
  return {KernelRole::quantize_v,
          {fmt::format("#include \"common/quantize_v.cuh\"\n"
                       "namespace fovea::cuda {{\n{}}}\n"
                       "extern \"C\" __global__ void __launch_bounds__({}, {}) {}("
                       "const __grid_constant__ fovea::cuda::QuantizeVParams p) {{\n"
                       "  fovea::cuda::quantize_v<fovea::cuda::spec>(p);\n}}\n",
                       print_spec(spec), kQuantizeThreads, kQuantizeCtasPerSm, jit::kEntryName),
           fmt::format("common/quantize_v {} d{}", name(spec.element), spec.head_dim)}};
}

std::size_t quantized_v_bytes(const QuantizeVSpec& spec, const ForwardProblem& f) {
  const QuantizedCounts k =
      quantized_counts(f.is_varlen, f.num_sequences, f.seqlen_kv, f.problem.k.shape[0]);
  const std::int64_t tiles = num_tiles(spec, f.num_sequences, f.num_heads_kv, k.tiles);
  return code_bytes(spec, tiles) + part_bytes(tiles * std::int64_t{sizeof(float)});
}

QuantizeVLaunch quantize_v_launch(const QuantizeVSpec& spec, const ForwardProblem& f,
                                  const ForwardParams& call, void* to) {
  const QuantizedCounts k =
      quantized_counts(spec.is_packed, call.num_sequences, call.seqlen_kv, call.total_kv);
  const std::int64_t tiles = num_tiles(spec, call.num_sequences, f.num_heads_kv, k.tiles);
  auto* const base = static_cast<std::byte*>(to);
  QuantizeVLaunch launch{.spec = spec};
  launch.params = {
      .v = call.v,
      .head_dim = call.head_dim_v,
      .num_heads_kv = call.num_heads_kv,
      .seqlen_kv = call.seqlen_kv,
      .num_tiles = static_cast<std::int32_t>(std::max<std::int64_t>(1, k.tiles)),
      .cu_seqlens_kv = call.cu_seqlens_kv,
      .num_sequences = call.num_sequences,
      .total_kv = k.rows,
      .codes = reinterpret_cast<std::uint8_t*>(base),
      .beside = {.scales = reinterpret_cast<const float*>(base + code_bytes(spec, tiles))}};
  if (k.rows > 0) launch.num_ctas = static_cast<unsigned>(tiles);
  return launch;
}

void QuantizeVLaunch::add_to(KernelLaunches& all) const {
  KernelLaunch launch = kernel_launch(KernelRole::quantize_v, params);
  launch.grid = {.x = num_ctas};
  launch.num_threads = kQuantizeThreads;
  launch.shared_bytes = static_cast<std::size_t>(quantize_v_shared_bytes(spec));
  launch.is_pdl = true;
  all.add(launch);
}

TensorMapParam map_of_value_codes(const TensorMapEncoder& encode, const QuantizeVLaunch& launch) {
  const QuantizeVParams& p = launch.params;
  const auto rows =
      static_cast<std::uint64_t>(p.num_tiles) * static_cast<std::uint64_t>(launch.spec.head_dim);
  const auto heads = static_cast<std::uint64_t>(p.num_heads_kv);
  const auto lists = static_cast<std::uint64_t>(
      num_tile_lists(launch.spec.is_packed, std::max(1, p.num_sequences)));
  constexpr std::uint64_t kWidth = kQuantizedTile;
  driver::TensorMapSpec map{.element = driver::TensorMapElement::u8, .rank = 4};
  map.shape = {kWidth, rows, heads, lists};
  map.stride_bytes = {1, kWidth, kWidth * rows, kWidth * rows * heads};
  map.box = {kQuantizedTile, static_cast<std::uint32_t>(launch.spec.head_dim), 1, 1};
  return encode(map, p.codes);
}

}  // namespace fovea::cuda
