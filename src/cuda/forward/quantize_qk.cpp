// Fill params, launch.
#include "cuda/forward/quantize_qk.hpp"

#include <fmt/format.h>

#include "cuda/forward/quantized_counts.hpp"

namespace fovea::cuda {
namespace {

/// Where each part lies, in bytes from the first.
struct Parts {
  std::size_t q_codes, k_codes, rows, keys, mean, bytes;
};

/// Of the problem: bounds of those of a call.
struct Bounds {
  QuantizedCounts q, k;

  explicit Bounds(const ForwardProblem& f)
      : q(quantized_counts(f.is_varlen, f.num_sequences, f.seqlen_q, f.total_q)),
        k(quantized_counts(f.is_varlen, f.num_sequences, f.seqlen_kv, f.problem.k.shape[0])) {}
};

Parts parts_of(const QuantizeQkSpec& spec, const ForwardProblem& f) {
  const auto [q, k] = Bounds(f);
  const std::int64_t batch = f.num_sequences;
  const std::int64_t tiles = num_tile_lists(spec.is_packed, batch) * f.num_heads_kv * k.tiles;
  Parts at{};
  at.k_codes = at.q_codes + part_bytes(q.rows * f.num_heads_q * spec.head_dim);
  at.rows = at.k_codes + part_bytes(k.rows * f.num_heads_kv * spec.head_dim);
  at.keys = at.rows + part_bytes(q.rows * f.num_heads_q * std::int64_t{sizeof(QuantizedRow)});
  at.mean = at.keys + part_bytes(tiles * kScalesOfTile * std::int64_t{sizeof(QuantizedKeys)});
  at.bytes =
      at.mean + part_bytes(batch * f.num_heads_kv * spec.head_dim * std::int64_t{sizeof(float)});
  return at;
}

/// `ctas_per_sm`: that registers are left for.
jit::KernelText text_of(std::string_view entry, int ctas_per_sm, const QuantizeQkSpec& spec) {
  return {fmt::format("#include \"common/quantize_qk.cuh\"\n"
                      "namespace fovea::cuda {{\n{}}}\n"
                      "extern \"C\" __global__ void __launch_bounds__({}, {}) {}("
                      "const __grid_constant__ fovea::cuda::QuantizeQkParams p) {{\n"
                      "  fovea::cuda::{}<fovea::cuda::spec>(p);\n}}\n",
                      print_spec(spec), kQuantizeThreads, ctas_per_sm, jit::kEntryName, entry),
          fmt::format("common/{} {} d{}", entry, name(spec.element), spec.head_dim)};
}

}  // namespace

QuantizeQkSpec quantize_qk_spec(const ForwardSpec& attention) {
  return {.element = attention.element,
          .head_dim = attention.head_dim_qk,
          .is_packed = attention.is_varlen};
}

PlannedKernels quantize_qk_kernels(const QuantizeQkSpec& spec) {
  return {{KernelRole::key_mean, text_of("mean_of_keys", 1, spec)},
          {KernelRole::quantize, text_of("quantize_qk", kQuantizeCtasPerSm, spec)}};
}

std::int64_t num_quantizing_ctas(const ForwardProblem& f) {
  const auto [q, k] = Bounds(f);
  return num_tile_lists(f.is_varlen, f.num_sequences) *
         (f.num_heads_q * q.tiles + f.num_heads_kv * k.tiles);
}

std::size_t quantized_bytes(const QuantizeQkSpec& spec, const ForwardProblem& problem) {
  return parts_of(spec, problem).bytes;
}

QuantizeQkLaunch quantize_qk_launch(const QuantizeQkSpec& spec, const ForwardProblem& f,
                                    const ForwardParams& call, void* to) {
  const Parts at = parts_of(spec, f);
  auto* const base = static_cast<std::byte*>(to);
  QuantizeQkLaunch launch;
  QuantizeQkParams& p = launch.params;
  p.q = call.q;
  p.k = call.k;
  p.head_dim = call.head_dim_qk;
  p.num_heads_q = call.num_heads_q;
  p.num_heads_kv = call.num_heads_kv;
  p.group = call.group;
  p.seqlen_q = call.seqlen_q;
  p.seqlen_kv = call.seqlen_kv;
  p.cu_seqlens_q = call.cu_seqlens_q;
  p.cu_seqlens_kv = call.cu_seqlens_kv;
  p.num_sequences = call.num_sequences;
  const std::int64_t lists = num_tile_lists(spec.is_packed, p.num_sequences);
  const QuantizedCounts q =
      quantized_counts(spec.is_packed, p.num_sequences, p.seqlen_q, call.total_q);
  const QuantizedCounts k =
      quantized_counts(spec.is_packed, p.num_sequences, p.seqlen_kv, call.total_kv);
  p.total_q = q.rows;
  p.total_kv = k.rows;
  p.num_q_tiles = static_cast<std::int32_t>(q.tiles);
  p.num_kv_tiles = static_cast<std::int32_t>(k.tiles);
  p.num_tiles_of_q = static_cast<std::int32_t>(lists * p.num_heads_q * q.tiles);
  p.q_codes = reinterpret_cast<std::int8_t*>(base + at.q_codes);
  p.k_codes = reinterpret_cast<std::int8_t*>(base + at.k_codes);
  p.mean = reinterpret_cast<float*>(base + at.mean);
  p.beside = {.rows = reinterpret_cast<const QuantizedRow*>(base + at.rows),
              .keys = reinterpret_cast<const QuantizedKeys*>(base + at.keys),
              .rows_batch_stride = std::int64_t{p.num_heads_q} * p.seqlen_q,
              .rows_head_stride = spec.is_packed ? p.total_q : p.seqlen_q,
              .num_tiles = p.num_kv_tiles};
  const auto tiles_of_k = static_cast<std::int32_t>(lists * p.num_heads_kv * k.tiles);
  if (p.num_sequences > 0) launch.num_ctas = static_cast<unsigned>(p.num_tiles_of_q + tiles_of_k);
  return launch;
}

void QuantizeQkLaunch::add_mean_to(KernelLaunches& all) const {
  KernelLaunch mean = kernel_launch(KernelRole::key_mean, params);
  mean.grid = {.x = num_heads()};
  mean.num_threads = kQuantizeThreads;
  mean.shared_bytes = kMeanSharedBytes;
  all.add(mean);
}

void QuantizeQkLaunch::add_to(KernelLaunches& all) const {
  KernelLaunch quantize = kernel_launch(KernelRole::quantize, params);
  quantize.grid = {.x = num_ctas};
  quantize.num_threads = kQuantizeThreads;
  quantize.shared_bytes = kQuantizeSharedBytes;
  quantize.is_pdl = true;
  all.add(quantize);
}

TensorMapParam map_of_codes(const TensorMapEncoder& encode, const QuantizeQkSpec& spec,
                            const QuantizeQkParams& params, CodesOf operand, std::int64_t rows) {
  const bool are_keys = operand == CodesOf::keys && params.total_kv > 0;
  const auto width = static_cast<std::uint64_t>(spec.head_dim);
  const auto batch =
      static_cast<std::uint64_t>(num_tile_lists(spec.is_packed, params.num_sequences));
  const auto rows_of_all = static_cast<std::uint64_t>(are_keys ? params.total_kv : params.total_q);
  const std::uint64_t seqlen = rows_of_all / batch;
  const auto heads =
      static_cast<std::uint64_t>(are_keys ? params.num_heads_kv : params.num_heads_q);
  driver::TensorMapSpec map{.element = driver::TensorMapElement::u8, .rank = 4};
  map.shape = {width, seqlen, heads, batch};
  map.stride_bytes = {1, width, width * seqlen, width * seqlen * heads};
  map.box = {static_cast<std::uint32_t>(width), static_cast<std::uint32_t>(rows), 1, 1};
  if (width == 64) map.swizzle = driver::TensorMapSwizzle::bytes_64;
  return encode(map, are_keys ? params.k_codes : params.q_codes);
}

}  // namespace fovea::cuda
