#include "cuda/forward/quantized_recipe.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>
#include <string_view>

#include "cuda/device/shared/quantize_k.h"
#include "problem/input_codes.hpp"
#include "quant/fields.hpp"

namespace fovea::cuda {
namespace {

/// What kernels compute where P and V stay as they are. Other fields say how they are rounded, or are of no effect
/// then.
constexpr Quantization kComputed{.qk = QuantFormat::int8,
                                 .q_scales = ScaleGranularity::token,
                                 .k_scales = ScaleGranularity::thread,
                                 .smooth_k = Smoothing::sample,
                                 .block_kv = kQuantizedTile};
constexpr std::string_view kFieldsThatMatter[] = {"qk",     "pv",       "q_scales", "k_scales",
                                                  "scales", "smooth_q", "smooth_k", "block_kv"};

/// And where they are codes of e4m3.
constexpr Quantization kComputedSums = [] {
  Quantization quant = kComputed;
  quant.pv = QuantFormat::e4m3;
  quant.v_scales = ScaleGranularity::block;
  quant.p_codes = ProbabilityCodes::linear;
  quant.row_sums = RowSums::codes;
  quant.p_max = 128;
  quant.p_step = 1;
  return quant;
}();
constexpr std::string_view kFieldsThatMatterToSums[] = {
    "v_scales", "p_codes", "row_sums", "accumulation", "p_max", "v_max", "p_step"};

/// Where codes of probabilities are exponentials, rounded; p_max and, of measured scales, v_max are parameters.
constexpr Quantization kComputedByLanes{
    .qk = QuantFormat::int8, .pv = QuantFormat::e4m3, .v_scales = ScaleGranularity::channel};
constexpr Quantization kComputedByGivenScales{.qk = QuantFormat::e4m3,
                                              .pv = QuantFormat::e4m3,
                                              .q_scales = ScaleGranularity::tensor,
                                              .k_scales = ScaleGranularity::tensor,
                                              .v_scales = ScaleGranularity::tensor,
                                              .scales = ScaleSource::given};
/// P and V in f16, which is that of the inputs.
constexpr Quantization kComputedInHalf{.qk = QuantFormat::int8, .pv = QuantFormat::f16, .p_max = 1};
constexpr std::string_view kFieldsThatMatterInHalf[] = {"qk",       "pv",    "scales",
                                                        "smooth_q", "p_max", "p_step"};
/// Fields of q and k alone: what their scales are of is a parameter too.
constexpr std::string_view kFieldsThatMatterToScores[] = {"qk", "scales", "smooth_q"};
/// Sums are of two levels, whatever the recipe says: nothing stays in an accumulator for more than a tile.
constexpr std::string_view kFieldsThatMatterToExponentials[] = {
    "qk", "pv", "v_scales", "scales", "smooth_q", "p_codes", "row_sums", "p_step"};
constexpr std::string_view kFieldsThatMatterToGivenScales[] = {"q_scales", "k_scales", "smooth_k",
                                                               "smooth_v", "block_kv"};

/// All but those of eight bits, and how products are summed.
constexpr std::string_view kFieldsThatMatterToFourBits[] = {
    "qk",       "pv",       "q_scales", "k_scales", "v_scales", "scales", "smooth_q", "smooth_k",
    "smooth_v", "hadamard", "row_sums", "block_q",  "block_kv", "p_max",  "p_step"};

/// The first of these fields that is another than the kernels'.
std::optional<Refusal> refuses_field(const Quantization& quant, const Quantization& computed,
                                     std::span<const std::string_view> that_matter) {
  for (const quant::Field& field : quant::fields()) {
    if (std::ranges::find(that_matter, field.name) == that_matter.end()) continue;
    const std::string got = field.print(quant);
    const std::string expected = field.print(computed);
    if (got != expected)
      return Refusal{fmt::format("quant.{} is {}; expected {}", field.name, got, expected)};
  }
  return std::nullopt;
}

/// Rows and keys that share scales, within tiles of kQuantizedTile.
std::optional<Refusal> refuses_groups(const Quantization& quant) {
  const auto refuse = [](std::string_view field, std::string_view got, std::string_view expected) {
    return Refusal{fmt::format("quant.{} is {}; expected {}", field, got, expected)};
  };
  if (quant.q_scales == ScaleGranularity::tensor)
    return refuse("q_scales", quant::name(quant.q_scales), "block, warp, thread or token");
  if (quant.k_scales != ScaleGranularity::thread && quant.k_scales != ScaleGranularity::block)
    return refuse("k_scales", quant::name(quant.k_scales), "block or thread");
  if (quant.block_kv != kQuantizedTile && quant.block_kv != kQuantizedTile / 2)
    return refuse("block_kv", fmt::to_string(quant.block_kv), "64 or 128");
  const RowGroups rows = groups_of_q(quant);
  if (kQuantizedTile % rows.span != 0) {
    const bool is_block = quant.q_scales == ScaleGranularity::block;
    return refuse(is_block ? "block_q" : "warp_q", fmt::to_string(rows.span),
                  "a divisor of 128, rows of a tile");
  }
  return std::nullopt;
}

}  // namespace

bool sums_codes(const Quantization& quant) { return quant.pv == QuantFormat::e4m3; }

std::optional<Refusal> refuses_recipe(const Quantization& quant) {
  if (quant.is_none()) return Refusal{"quant is none; this kernel multiplies codes of eight bits"};
  if (quant.pv != QuantFormat::none && !sums_codes(quant))
    return Refusal{fmt::format("quant.pv is {}; expected none or e4m3", quant::name(quant.pv))};
  const Quantization& computed = sums_codes(quant) ? kComputedSums : kComputed;
  if (auto refusal = refuses_field(quant, computed, kFieldsThatMatter)) return refusal;
  if (!sums_codes(quant)) return std::nullopt;
  return refuses_field(quant, computed, kFieldsThatMatterToSums);
}

Rounding rounding_of(const Quantization& quant) {
  if (!sums_codes(quant) || quant.p_codes == ProbabilityCodes::linear) return Rounding::rows;
  return quant.scales == ScaleSource::given ? Rounding::given : Rounding::lanes;
}

RowGroups groups_of_q(const Quantization& quant) {
  switch (quant.q_scales) {
    case ScaleGranularity::thread:
      return {quant.warp_q, 8};
    case ScaleGranularity::warp:
      return {quant.warp_q, 1};
    case ScaleGranularity::block:
      return {quant.block_q, 1};
    default:
      return {};
  }
}

std::int32_t scale_tile_of(const Quantization& quant) {
  const bool is_given = quant.scales == ScaleSource::given;
  return is_given ? kQuantizedTile : std::min(quant.block_kv, kQuantizedTile);
}

KeyMean key_mean_of(const Quantization& quant) {
  if (quant.smooth_k == Smoothing::none) return KeyMean::none;
  return quant.smooth_k == Smoothing::sample ? KeyMean::sample : KeyMean::all;
}

std::optional<Refusal> refuses_recipe_of_team(const Quantization& quant) {
  switch (rounding_of(quant)) {
    case Rounding::lanes:
      if (auto refusal = refuses_field(quant, kComputedByLanes, kFieldsThatMatterToExponentials))
        return refusal;
      return refuses_groups(quant);
    case Rounding::given:
      if (auto refusal =
              refuses_field(quant, kComputedByGivenScales, kFieldsThatMatterToExponentials))
        return refusal;
      return refuses_field(quant, kComputedByGivenScales, kFieldsThatMatterToGivenScales);
    case Rounding::rows:
      break;
  }
  if (quant.pv == QuantFormat::int8) {
    return Refusal{
        "quant.pv is int8, which is for CPUs; expected none, f16 or e4m3: accurate has the same "
        "error on GPUs"};
  }
  const bool is_half = quant.pv == QuantFormat::f16;
  if (!is_half && (quant.is_none() || quant.pv != QuantFormat::none)) return refuses_recipe(quant);
  if (auto refusal = is_half ? refuses_field(quant, kComputedInHalf, kFieldsThatMatterInHalf)
                             : refuses_field(quant, kComputed, kFieldsThatMatterToScores))
    return refusal;
  return refuses_groups(quant);
}

std::optional<Refusal> refuses_recipe_of_four_bits(const Quantization& quant) {
  if (quant.is_none()) return Refusal{"quant is none; this kernel multiplies codes of four bits"};
  const bool is_mx = quant.v_scales == ScaleGranularity::group_32;
  const Quantization computed = parse_quantization(is_mx ? "mxfp4" : "nvfp4");
  return refuses_field(quant, computed, kFieldsThatMatterToFourBits);
}

ForwardProblem without_recipe(ForwardProblem f) {
  f.problem.quant = {};
  for (TensorSpec* spec : {&f.problem.q, &f.problem.k, &f.problem.v})
    spec->dtype = default_out_dtype(spec->dtype);
  return f;
}

}  // namespace fovea::cuda
