// Attention in eight or four bits as data: what q, k, probabilities and v are rounded to, by which scales, and what is
// taken out of them before. A field of the Problem; named recipes are rows of one table. docs/guides/quantization.md is
// the guide, src/reference/quantized.cpp the meaning of every field as code.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "fovea/export.hpp"

namespace fovea {

/// What the operands of a product are rounded to. int8: -127 to 127, probabilities 0 to 255. e4m3: 4 bits of exponent,
/// 3 of mantissa, at most 448. f16: without a scale. e2m1: four bits (0, .5, 1, 1.5, 2, 3, 4, 6 and negatives), scaled
/// by groups. none: the product is that of the problem without a recipe.
enum class QuantFormat : std::uint8_t { none, int8, e4m3, f16, e2m1 };

/// Which elements share a scale. Rows are counted from the start of their sequence, so nothing depends on packing.
enum class ScaleGranularity : std::uint8_t {
  tensor,  // all of one sequence and head
  block,   // block_q or block_kv rows
  warp,    // warp_q rows; of q
  thread,  // rows that one thread of a GPU holds: n mod 8 of warp_q rows, or (n mod 8) / 2 of block_kv keys
  token,         // a row
  channel,       // a column of v
  tile_channel,  // a column of block_kv rows of v
  // Of e2m1, along what a product sums over: channels of a row of q or k, keys of a column of v and of a row of
  // probabilities. A scale belongs to its group alone: bits of e4m3 in nvfp4, of ue8m0 (powers of two) in mxfp4.
  group_16,  // 16 numbers, scale in e4m3
  group_32,  // 32 numbers, scale in ue8m0
};

/// What is subtracted before rounding. The mean of k moves all scores of a row alike: it is added back to them,
/// exactly, so lse, programs and sinks know no difference. Means are of one sequence and head.
enum class Smoothing : std::uint8_t {
  none,
  sample,  // the mean of 64 rows spread evenly (of all where there are fewer), rounded to the dtype of k; of k
  sequence,  // the mean of all rows; rounded to the dtype of k where it is k's
  block,     // the mean of block_q rows; of q
};

/// Scales are measured, the greatest magnitude over the format's greatest number, or given by the call: q_scale,
/// k_scale and v_scale.
enum class ScaleSource : std::uint8_t { measured, given };

/// How a probability becomes a code. linear: the bits of e4m3 are a linear function of the exponent, so no exp2 is
/// taken; between powers of two the value is the chord of the curve, 4 % too large on average, in numerator and
/// denominator.
enum class ProbabilityCodes : std::uint8_t { exp2, linear };

/// What the denominator sums: probabilities before they are rounded, or their codes.
enum class RowSums : std::uint8_t { exact, codes };

/// two_level: the product of each tile of block_kv keys is added to f32 sums by itself. one_level: the accumulator of
/// the product holds the whole row. Equal in exact arithmetic.
enum class Accumulation : std::uint8_t { one_level, two_level };

struct Quantization {
  QuantFormat qk = QuantFormat::none;  // of q and k: none, int8, e4m3, e2m1
  QuantFormat pv = QuantFormat::none;  // of probabilities and v: any

  ScaleGranularity q_scales =
      ScaleGranularity::token;  // tensor, block, warp, thread, token; of e2m1 group_*
  ScaleGranularity k_scales =
      ScaleGranularity::token;  // tensor, block, thread, token; those of q in e2m1
  ScaleGranularity v_scales =
      ScaleGranularity::channel;  // tensor, block, channel, tile_channel; of e2m1 group_*
  ScaleSource scales = ScaleSource::measured;  // given: all are of tensors

  Smoothing smooth_q = Smoothing::none;  // block
  Smoothing smooth_k = Smoothing::none;  // sample, sequence
  Smoothing smooth_v = Smoothing::none;  // sequence
  bool hadamard = false;                 // q and k are rotated, after smoothing

  ProbabilityCodes p_codes = ProbabilityCodes::exp2;
  RowSums row_sums = RowSums::exact;
  Accumulation accumulation = Accumulation::two_level;

  int block_q = 128;
  int warp_q = 32;
  int block_kv =
      128;  // a tile of keys: of the scales above, and of the references of probabilities
  float p_max =
      448;  // the code of the reference of a row. int8: 255, and the reference is the row's maximum in the tile.
            // e2m1: code times scale of the group; 2688 = 6 * 448 uses all of e4m3 for scales
  float v_max = 448;  // the code of v's greatest magnitude, in e4m3
  // e4m3, f16: the reference of a row is its greatest score so far. Or, where this is above 0, the nearest multiple of
  // so many octaves: with whole octaves codes do not depend on where it was raised, but for the smallest.
  float p_step = 0;

  // Above 0, and nothing else is set: the error of out that is allowed, ‖got - exact‖ / ‖exact‖. A forward plan takes
  // the first of quantizations(), largest error first, whose error is within it and that is faster than no recipe where
  // the call runs; else none, as every operation without a quantised path. explain says which, and why.
  float accuracy = 0;

  bool operator==(const Quantization&) const = default;
  [[nodiscard]] bool is_none() const { return qk == QuantFormat::none && pv == QuantFormat::none; }
};

/// A recipe with a name.
struct NamedQuantization {
  std::string_view name;
  std::string_view summary;  // a line
  Quantization quant;
  // Of out on normal numbers, head dims 64 and 128, 2,048 keys (tests/unit/cpu/quantized/error_test.cpp). 0: no plan
  // chooses it. Outliers cost more: `fovea calibrate` measures them.
  float error = 0;
};
/// "none" first.
[[nodiscard]] FOVEA_EXPORT std::span<const NamedQuantization> quantizations();

/// The recipe that a text names: "accurate", "accurate,hadamard=yes", "qk=int8,k_scales=thread": a name, by default
/// none, then fields. Throws InvalidArgument.
[[nodiscard]] FOVEA_EXPORT Quantization parse_quantization(std::string_view text);
/// The shortest such text.
[[nodiscard]] FOVEA_EXPORT std::string print(const Quantization& quant);
/// A sentence for people: what is rounded to what, by which scales.
[[nodiscard]] FOVEA_EXPORT std::string describe(const Quantization& quant);

}  // namespace fovea
