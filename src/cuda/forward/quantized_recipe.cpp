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
constexpr std::string_view kFieldsThatMatter[] = {
    "qk", "pv", "q_scales", "k_scales", "scales", "smooth_q", "smooth_k", "hadamard", "block_kv"};

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
    "v_scales", "smooth_v", "p_codes", "row_sums", "accumulation", "p_max", "v_max", "p_step"};

/// Where codes of probabilities are exponentials, rounded: what both have in common; p_max is a parameter.
constexpr Quantization exponentials(Quantization quant) {
  quant.pv = QuantFormat::e4m3;
  return quant;
}
constexpr Quantization kComputedByLanes = [] {
  Quantization quant = exponentials(kComputed);
  quant.q_scales = ScaleGranularity::thread;
  quant.v_scales = ScaleGranularity::channel;
  quant.smooth_k = Smoothing::sequence;
  quant.warp_q = 16;
  return quant;
}();
constexpr Quantization kComputedByGivenScales = exponentials({.qk = QuantFormat::e4m3,
                                                              .q_scales = ScaleGranularity::tensor,
                                                              .k_scales = ScaleGranularity::tensor,
                                                              .v_scales = ScaleGranularity::tensor,
                                                              .scales = ScaleSource::given});
constexpr std::string_view kFieldsThatMatterToExponentials[] = {
    "qk",       "pv",           "q_scales", "k_scales", "v_scales", "scales",
    "smooth_q", "smooth_k",     "smooth_v", "hadamard", "block_kv", "p_codes",
    "row_sums", "accumulation", "v_max",    "p_step"};

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

std::optional<Refusal> refuses_recipe_of_team(const Quantization& quant) {
  const Rounding rounding = rounding_of(quant);
  if (rounding == Rounding::rows) return refuses_recipe(quant);
  const bool is_given = rounding == Rounding::given;
  if (auto refusal = refuses_field(quant, is_given ? kComputedByGivenScales : kComputedByLanes,
                                   kFieldsThatMatterToExponentials))
    return refusal;
  if (is_given) return std::nullopt;
  constexpr std::string_view kWarp[] = {"warp_q"};
  return refuses_field(quant, kComputedByLanes, kWarp);
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
