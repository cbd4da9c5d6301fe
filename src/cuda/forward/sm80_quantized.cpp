#include "cuda/forward/sm80_quantized.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstdint>

#include "cuda/forward/quantized_recipe.hpp"
#include "cuda/params/tensor_params.hpp"
#include "problem/input_codes.hpp"

namespace fovea::cuda {
namespace {

/// The widest rows that kernels round.
constexpr std::int64_t kMostHeadDim = 128;

/// From there on tensor cores multiply e4m3.
constexpr int kFirstThatSumsCodes = 89;

/// Are values written anew before attention, as codes or without their mean?
bool rounds_values(const Quantization& quant) {
  return sums_codes(quant) || quant.smooth_v != Smoothing::none;
}

TeamSpec without_tile(const ForwardProblem& f) {
  TeamSpec spec{common_spec(f)};
  spec.multiplies_codes = true;
  spec.sums_codes = sums_codes(f.problem.quant);
  spec.rounding = rounding_of(f.problem.quant);
  spec.scale_tile = scale_tile_of(f.problem.quant);
  spec.takes_codes = are_codes(f.problem.q.dtype);
  spec.head_dim_qk = static_cast<std::int32_t>(panels_of(f.head_dim_qk) / 2);
  spec.smooths_v = f.problem.quant.smooth_v != Smoothing::none;
  if (rounds_values(f.problem.quant))
    spec.head_dim_v = static_cast<std::int32_t>(panels_of(f.head_dim_v));
  spec.has_padded_head_dim = spec.head_dim_v != f.head_dim_v;  // codes are padded in memory
  return spec;
}

std::optional<Refusal> refuses_sums(const DeviceTraits& device) {
  if (device.compute_capability() < kFirstThatSumsCodes) {
    return Refusal{fmt::format(
        "quant.pv is e4m3 and compute capability {}.{}; expected 8.9 or above, whose tensor cores "
        "multiply e4m3",
        device.major, device.minor)};
  }
  return std::nullopt;
}

std::optional<Refusal> refuses_values(const ForwardProblem& f) {
  const Quantization& quant = f.problem.quant;
  if (!rounds_values(quant)) return std::nullopt;
  const std::string_view what =
      sums_codes(quant) ? "quant.pv e4m3" : "quant.smooth_v, which writes them anew";
  if (f.head_dim_v > kMostHeadDim)
    return Refusal{fmt::format("head_dim_v is {} beside {}; expected at most {}", f.head_dim_v,
                               what, kMostHeadDim)};
  if (quant.smooth_v != Smoothing::none && f.problem.dropout.p > 0)
    return Refusal{
        "dropout beside quant.smooth_v, whose mean comes back times a sum of which nothing is "
        "dropped"};
  return std::nullopt;
}

std::size_t codes_at(const TeamSpec& spec, const ForwardProblem& f) {
  return part_bytes(static_cast<std::int64_t>(Sm80Forward::scratch_bytes(spec, f)));
}

std::size_t notes_at(const TeamSpec& spec, const ForwardProblem& f) {
  return codes_at(spec, f) + quantized_bytes(quantize_kv_spec(spec, f.problem.quant), f);
}

/// Rows of elements: [batch, heads, rows, width] in memory, packed [heads, rows, width].
BshdParam rows_of_heads(const void* data, std::int64_t width, std::int64_t num_heads,
                        std::int64_t rows, bool is_packed) {
  return {.data = data,
          .batch_stride = is_packed ? 0 : num_heads * rows * width,
          .row_stride = width,
          .head_stride = rows * width,
          .col_stride = 1};
}

/// Codes, two in each element.
BshdParam pairs_of_codes(const std::int8_t* codes, const TeamSpec& spec, std::int64_t num_heads,
                         std::int64_t rows) {
  return rows_of_heads(codes, spec.head_dim_qk, num_heads, rows, spec.is_varlen);
}

}  // namespace

std::optional<Refusal> Sm80ForwardQuantized::refuses(const ForwardProblem& f,
                                                     const DeviceTraits& device) {
  if (auto refusal = refuses_recipe_of_team(f.problem.quant)) return refusal;
  if (f.problem.quant.pv == QuantFormat::f16 && f.problem.v.dtype != Dtype::f16) {
    return Refusal{
        fmt::format("quant.pv is f16 and v is {}; expected v of f16, which is multiplied as it is",
                    name(f.problem.v.dtype))};
  }
  if (f.is_cached) return Refusal{"keys lie in a cache; expected tensors"};
  if (auto refusal = refuses_before(kFirstOfSm80, device)) return refusal;
  if (auto refusal = Sm80Forward::refuses(without_recipe(f), device)) return refusal;
  if (f.head_dim_qk > kMostHeadDim) {
    return Refusal{
        fmt::format("head_dim_qk is {}; expected at most {}", f.head_dim_qk, kMostHeadDim)};
  }
  if (sums_codes(f.problem.quant)) {
    if (auto refusal = refuses_sums(device)) return refusal;
  }
  if (auto refusal = refuses_values(f)) return refusal;
  if (num_quantizing_ctas(f) > std::int64_t{0x7fffffff}) return Refusal{"more than 2^31 tiles"};
  return std::nullopt;
}

TeamSpec Sm80ForwardQuantized::choose(const ForwardProblem& f, const DeviceTraits& device) {
  return with_best_tile(without_tile(f), f, device);
}

std::vector<TeamSpec> Sm80ForwardQuantized::alternatives(const ForwardProblem& f,
                                                         const DeviceTraits& device) {
  return with_other_tiles(choose(f, device), f, device);
}

std::size_t Sm80ForwardQuantized::scratch_bytes(const TeamSpec& spec, const ForwardProblem& f) {
  return notes_at(spec, f) + note_bytes(spec, f);
}

Sm80QuantizedLaunch Sm80ForwardQuantized::prepare(const ForwardProblem& f, const ForwardPlan& plan,
                                                  const AttentionForward& args,
                                                  const GrownCache* cache, void* workspace,
                                                  const TensorMapEncoder& encode) {
  const auto& spec = plan.spec.as<TeamSpec>();
  Sm80QuantizedLaunch launch;
  launch.common = Sm80Forward::prepare(f, plan, args, cache, workspace, encode);
  const ForwardParams& given = launch.common.params;
  launch.quantize = quantize_kv_launch(quantize_kv_spec(spec, f.problem.quant), f, given,
                                       static_cast<std::byte*>(workspace) + codes_at(spec, f));
  launch.quantize.overlaps = plan.device.compute_capability() >= kFirstThatOverlaps;
  launch.quantize.take_scales(args);
  place_notes(spec, given, static_cast<std::byte*>(workspace) + notes_at(spec, f), launch.quantize);
  launch.lost = lost_rows_launch(plan, given, launch.quantize);
  const QuantizeKvParams& codes = launch.quantize.params;
  launch.params.rounded = {.q = given.q,
                           .k = given.k,
                           .head_dim = given.head_dim_qk,
                           .rows = codes.q.beside,
                           .keys = codes.k.beside,
                           .value_codes = codes.v.codes,
                           .values = codes.v.beside,
                           .log2_p_max = std::log2(f.problem.quant.p_max),
                           .reciprocal_of_p_max = 1 / f.problem.quant.p_max,
                           .notes = codes.notes};
  ForwardParams& p = launch.params.common = given;
  const bool is_packed = spec.is_varlen;
  p.q = pairs_of_codes(codes.q.codes, spec, p.num_heads_q, is_packed ? p.total_q : p.seqlen_q);
  p.k = pairs_of_codes(codes.k.codes, spec, p.num_heads_kv, is_packed ? p.total_kv : p.seqlen_kv);
  p.head_dim_qk = spec.head_dim_qk;
  p.is_q_aligned = 1;
  p.is_kv_aligned = rounds_values(f.problem.quant) || is_aligned(args.v);
  if (launch.quantize.spec.centers_v)
    p.v = rows_of_heads(codes.v.numbers, spec.head_dim_v, p.num_heads_kv,
                        is_packed ? p.total_kv : p.seqlen_kv, is_packed);
  return launch;
}

KernelLaunches Sm80QuantizedLaunch::launches(const ForwardPlan& plan) const {
  KernelLaunches all;
  common.add_tables(all);
  const bool has_codes = quantize.num_ctas > 0;
  if (has_codes) quantize.add_to(all);
  KernelLaunch main = common.main_launch(plan, params);
  main.grid = {.x = common.grid.x, .y = common.grid.y};
  main.is_pdl = has_codes && quantize.overlaps;
  all.add(main);
  common.add_combine(plan, all);
  if (lost.num_ctas > 0) lost.add_to(all);
  return all;
}

}  // namespace fovea::cuda
