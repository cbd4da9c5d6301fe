// Fill params, launch.
#include "cuda/forward/round_to_fp4.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/ceil_div.hpp"
#include "cuda/forward/quantize_kv.hpp"
#include "cuda/forward/quantized_recipe.hpp"

namespace fovea::cuda {
namespace {

constexpr std::int64_t kMostHeadDim = 128;

/// Tiles of a head, and lists of them: packed sequences have one. Of the problem, bounds of those of a call.
struct Counts {
  std::int64_t tiles, lists;

  Counts(bool is_packed, std::int64_t batch, std::int64_t seqlen, std::int64_t total)
      : tiles(is_packed ? first_packed_tile(batch, total) : ceil_div(seqlen, kQuantizedTile)),
        lists(is_packed ? 1 : batch) {}
  static Counts of_queries(const ForwardProblem& f) {
    return {f.is_varlen, f.num_sequences, f.seqlen_q, f.total_q};
  }
  static Counts of_keys(const ForwardProblem& f) {
    return {f.is_varlen, f.num_sequences, f.seqlen_kv, f.problem.k.shape[0]};
  }
};

std::int64_t tiles_of_longest(std::int64_t seqlen_kv) {
  return std::max<std::int64_t>(1, ceil_div(seqlen_kv, kQuantizedTile));
}

/// Where each part lies, in bytes from the first.
struct Parts {
  std::size_t key_sums, key_means, block_means, queries, keys, values, block_scores, bytes;
};

Parts parts_of(const Fp4RoundingSpec& spec, const ForwardProblem& f) {
  const Counts q = Counts::of_queries(f), k = Counts::of_keys(f);
  const std::int64_t query_tiles = q.lists * f.num_heads_q * q.tiles;
  const std::int64_t key_tiles = k.lists * f.num_heads_kv * k.tiles;
  const std::int64_t pairs = query_tiles * tiles_of_longest(f.seqlen_kv);
  const std::int64_t row_bytes = spec.head_dim_qk * std::int64_t{sizeof(float)};
  Parts at{};
  at.key_means = at.key_sums + part_bytes(key_tiles * 2 * row_bytes);
  at.block_means = at.key_means + part_bytes(f.num_sequences * f.num_heads_kv * row_bytes);
  at.queries = at.block_means + part_bytes(query_tiles * row_bytes);
  at.keys = at.queries + part_bytes(query_tiles * fp4_query_record_bytes(spec.head_dim_qk));
  at.values = at.keys + part_bytes(key_tiles * fp4_record_bytes(spec.head_dim_qk));
  at.block_scores = at.values + part_bytes(key_tiles * fp4_record_bytes(spec.head_dim_v));
  at.bytes = at.block_scores + part_bytes(pairs * kQuantizedTile * std::int64_t{sizeof(float)});
  return at;
}

jit::KernelText text_of(std::string_view entry, const Fp4RoundingSpec& spec) {
  return {fmt::format("#include \"sm120/round_to_fp4.cuh\"\n"
                      "namespace fovea::cuda {{\n{}}}\n"
                      "extern \"C\" __global__ void __launch_bounds__({}) {}("
                      "const __grid_constant__ fovea::cuda::Fp4RoundingParams p) {{\n"
                      "  fovea::cuda::sm120::{}<fovea::cuda::spec>(p);\n}}\n",
                      print_spec(spec), kFp4Threads, jit::kEntryName, entry),
          fmt::format("sm120/{} {} d{} groups of {}", entry, name(spec.element), spec.head_dim_qk,
                      spec.group)};
}

struct Given {
  const BshdParam& x;
  std::int32_t head_dim, is_aligned, num_heads;
  std::int64_t tiles;
};

RowsToRound keys_to_round(const Given& given, const ForwardParams& call) {
  return {.x = given.x,
          .head_dim = given.head_dim,
          .is_aligned = given.is_aligned,
          .num_heads_kv = given.num_heads,
          .seqlen_kv = call.seqlen_kv,
          .num_tiles = static_cast<std::int32_t>(given.tiles),
          .cu_seqlens_kv = call.cu_seqlens_kv,
          .num_sequences = call.num_sequences,
          .total_kv = call.total_kv,
          .scales = {}};
}

RowsToRound queries_to_round(const Given& given, const ForwardParams& call) {
  RowsToRound rows = keys_to_round(given, call);
  rows.seqlen_kv = call.seqlen_q;
  rows.cu_seqlens_kv = call.cu_seqlens_q;
  rows.total_kv = call.total_q;
  return rows;
}

void fill_operands(const Fp4RoundingSpec& spec, const ForwardParams& call, Fp4RoundingParams& p) {
  const Counts q(spec.is_packed, call.num_sequences, call.seqlen_q, call.total_q);
  const Counts k(spec.is_packed, call.num_sequences, call.seqlen_kv, call.total_kv);
  p.q = queries_to_round({call.q, call.head_dim_qk, call.is_q_aligned, call.num_heads_q, q.tiles},
                         call);
  p.k = keys_to_round({call.k, call.head_dim_qk, call.is_kv_aligned, call.num_heads_kv, k.tiles},
                      call);
  p.v = keys_to_round({call.v, call.head_dim_v, call.is_kv_aligned, call.num_heads_kv, k.tiles},
                      call);
  p.group = call.group;
  p.num_query_tiles = static_cast<std::int32_t>(q.lists * call.num_heads_q * q.tiles);
  p.num_key_tiles = static_cast<std::int32_t>(k.lists * call.num_heads_kv * k.tiles);
}

}  // namespace

std::optional<Refusal> refuses_four_bits(const ForwardProblem& f, const DeviceTraits& device) {
  if (f.is_cached) return Refusal{"keys lie in a cache; expected tensors"};
  if (auto refusal = refuses_tensor_cores(without_recipe(f), device)) return refusal;
  if (auto refusal = refuses_head_dims(f, kMostHeadDim)) return refusal;
  if (f.problem.dropout.p > 0)
    return Refusal{"dropout beside quant.pv e2m1, whose probabilities are multiplied in groups"};
  if (num_fp4_tiles(f) > std::int64_t{0x7fffffff}) return Refusal{"more than 2^31 tiles"};
  return std::nullopt;
}

std::int32_t fp4_head_dim(std::int64_t head_dim) {
  return static_cast<std::int32_t>(ceil_div(head_dim, std::int64_t{kFp4Depth})) * kFp4Depth;
}

std::int32_t fp4_group(const Quantization& quant) {
  return quant.v_scales == ScaleGranularity::group_16 ? 16 : 32;
}

Fp4RoundingSpec fp4_rounding_spec(const ForwardSpec& attention, std::int32_t group,
                                  bool is_for_tensor_memory) {
  return {.element = attention.element,
          .head_dim_qk = attention.head_dim_qk,
          .head_dim_v = attention.head_dim_v,
          .group = group,
          .is_packed = attention.is_varlen,
          .is_for_tensor_memory = is_for_tensor_memory};
}

PlannedKernels fp4_rounding_kernels(const Fp4RoundingSpec& spec) {
  return {{KernelRole::tile_sums, text_of("sum_tiles", spec)},
          {KernelRole::key_mean, text_of("mean_of_keys", spec)},
          {KernelRole::quantize, text_of("round_to_fp4", spec)},
          {KernelRole::block_scores, text_of("block_scores", spec)}};
}

std::size_t fp4_bytes(const Fp4RoundingSpec& spec, const ForwardProblem& f) {
  return parts_of(spec, f).bytes;
}

std::int64_t num_fp4_tiles(const ForwardProblem& f) {
  const Counts q = Counts::of_queries(f), k = Counts::of_keys(f);
  return q.lists * f.num_heads_q * q.tiles + 2 * k.lists * f.num_heads_kv * k.tiles;
}

Fp4RoundingLaunch fp4_rounding_launch(const Fp4RoundingSpec& spec, const ForwardProblem& f,
                                      const ForwardParams& call, void* to) {
  Fp4RoundingLaunch launch{.spec = spec};
  Fp4RoundingParams& p = launch.params;
  fill_operands(spec, call, p);
  const Parts at = parts_of(spec, f);
  const auto part = [&]<typename T>(std::size_t bytes, T*& pointer) {
    pointer = reinterpret_cast<T*>(static_cast<std::byte*>(to) + bytes);
  };
  part(at.key_sums, p.key_sums);
  part(at.key_means, p.key_means);
  part(at.block_means, p.block_means);
  part(at.queries, p.results.queries);
  part(at.keys, p.results.keys);
  part(at.values, p.results.values);
  part(at.block_scores, p.results.block_scores);
  p.results.query_tiles = p.q.num_tiles;
  p.results.key_tiles = p.k.num_tiles;
  p.results.tiles_of_longest = static_cast<std::int32_t>(tiles_of_longest(call.seqlen_kv));
  return launch;
}

void Fp4RoundingLaunch::add_to(KernelLaunches& all) const {
  const auto add = [&](KernelRole role, std::int32_t num_ctas, int shared_bytes,
                       int num_threads = kFp4Threads) {
    KernelLaunch launch = kernel_launch(role, params);
    launch.grid = {.x = static_cast<unsigned>(num_ctas)};
    launch.num_threads = static_cast<unsigned>(num_threads);
    launch.shared_bytes = static_cast<unsigned>(shared_bytes);
    all.add(launch);
  };
  add(KernelRole::tile_sums, params.num_key_tiles + params.num_query_tiles, kFp4SumsSharedBytes);
  add(KernelRole::key_mean, params.k.num_sequences * params.k.num_heads_kv, 0, spec.head_dim_qk);
  add(KernelRole::quantize, params.num_query_tiles + 2 * params.num_key_tiles,
      fp4_round_shared_bytes(spec));
  add(KernelRole::block_scores, params.num_key_tiles, fp4_block_scores_shared_bytes(spec));
}

}  // namespace fovea::cuda
