// Scores of a tile become codes of probabilities: the softmax of recipes that round p and v. What a code is,
// formats.hpp of src/quant says; what it is relative to, reference/quantized.hpp.
//
// Bound: as softmax_of of panel-inl.hpp, some 15 operations a score; codes of 8 bits cost 10 more for each four.

#if defined(FOVEA_CPU_KERNELS_ROUND_PROBABILITIES_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_KERNELS_ROUND_PROBABILITIES_INL_HPP_
#undef FOVEA_CPU_KERNELS_ROUND_PROBABILITIES_INL_HPP_
#else
#define FOVEA_CPU_KERNELS_ROUND_PROBABILITIES_INL_HPP_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/kernels/codes.hpp"
#include "hwy/highway.h"
#include "quant/formats.hpp"
#include "quant/groups.hpp"
// after highway.h: per-target headers
#include "cpu/kernels/dropout-inl.hpp"
#include "cpu/kernels/math-inl.hpp"
#include "cpu/kernels/round_rows-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// The greatest score of each row, in two halves of the keys: one chain of maxima a vector would wait for itself.
HWY_ATTR inline void find_greatest(const QuantizedTile& tile, float* HWY_RESTRICT greatest) {
  const FloatTag d;
  FloatVector even[kPanelVectors], odd[kPanelVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kPanelVectors; ++v)
    even[v] = odd[v] = hn::Set(d, -std::numeric_limits<float>::infinity());
  std::int64_t key = 0;
  for (; key + 2 <= tile.num_keys; key += 2) {
    const float* const at = tile.scores + key * kPanelLanes;
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
      even[v] = hn::Max(hn::Load(d, at + v * kVectorLanes), even[v]);
      odd[v] = hn::Max(hn::Load(d, at + kPanelLanes + v * kVectorLanes), odd[v]);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kPanelVectors; ++v) {
    if (key < tile.num_keys)
      even[v] = hn::Max(hn::Load(d, tile.scores + key * kPanelLanes + v * kVectorLanes), even[v]);
    hn::Store(hn::Max(even[v], odd[v]), d, greatest + v * kVectorLanes);
  }
}

/// The reference follows the maximum: at once, by multiples of p_step octaves, or, where codes are relative to the
/// maximum of their tile, once it has grown by more than kMaxGrowth, as in softmax_of. A maximum of +inf spoils the row
/// by inf - inf.
HWY_ATTR inline void raise_origins(const Quantization& quant, const QuantizedTile& tile,
                                   const float* greatest_of_rows, const QuantizedRows& rows,
                                   int lane, TileOrigins& to) {
  const FloatTag d;
  const FloatVector nothing = hn::Set(d, -std::numeric_limits<float>::infinity());
  const FloatVector octaves = hn::Load(d, tile.octaves + lane);
  const FloatVector lowest = hn::Div(hn::Set(d, kZeroPower), octaves);
  const FloatVector greatest = hn::Load(d, greatest_of_rows);
  const FloatVector before = hn::Load(d, rows.origin + lane);
  const FloatVector row_max = hn::Max(greatest, hn::Load(d, rows.row_max + lane));
  const bool is_of_tile = quant.pv == QuantFormat::int8;
  FloatVector after = hn::Max(row_max, before);
  if (is_of_tile) {
    const auto keeps = hn::Le(hn::Mul(hn::Sub(row_max, before), octaves), hn::Set(d, kMaxGrowth));
    after = hn::IfThenElse(keeps, before, row_max);
  } else if (quant.p_step > 0) {
    // What is before is a multiple already: it stays, whatever rounding would make of it. Beside a maximum that a step
    // is lost to there is no multiple: the maximum is the reference.
    const FloatVector step = hn::Div(hn::Set(d, quant.p_step), octaves);
    const FloatVector common = hn::Load(d, tile.common + lane);
    const FloatVector steps = hn::Round(hn::Div(hn::Sub(after, common), step));
    const FloatVector raised = hn::MulAdd(step, steps, common);
    const auto is_near = hn::Le(hn::Abs(hn::Sub(raised, after)), step);
    after = hn::IfThenElse(hn::And(hn::Gt(after, before), is_near), raised, after);
  }
  const FloatVector from = hn::IfThenZeroElse(hn::Eq(after, nothing), after);
  const FloatVector factor = exp2_nonpositive(d, hn::Sub(before, from), octaves, lowest);
  const FloatVector rescale = hn::IfThenElse(hn::Eq(before, after), hn::Set(d, 1.0F), factor);
  hn::Store(row_max, d, rows.row_max + lane);
  hn::Store(after, d, rows.origin + lane);
  hn::Store(rescale, d, rows.rescale + lane);
  for (float* sums : {rows.row_sum + lane, rows.kept_sum + lane})
    hn::Store(hn::Mul(hn::Load(d, sums), rescale), d, sums);
  if (is_of_tile) {
    hn::Store(hn::IfThenZeroElse(hn::Eq(greatest, nothing), greatest), d, to.origin);
    hn::Store(exp2_nonpositive(d, hn::Sub(greatest, from), octaves, lowest), d, to.weight);
  } else {
    hn::Store(from, d, to.origin);
    hn::Store(hn::Set(d, 1.0F), d, to.weight);
  }
}

/// sums += weight · of the tile
HWY_ATTR HWY_INLINE void add_weighted(FloatVector weight, FloatVector of_tile, float* sums) {
  const FloatTag d;
  hn::Store(hn::MulAdd(weight, of_tile, hn::Load(d, sums)), d, sums);
}

/// quant::linear_code; NaN stays NaN.
HWY_ATTR HWY_INLINE FloatVector linear_codes(FloatVector exponent) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const FloatVector eighths =
      hn::Round(hn::Mul(hn::Set(d, 8.0F), hn::Add(exponent, hn::Set(d, 7.0F))));
  const FloatVector limited = hn::Min(hn::Max(eighths, hn::Zero(d)), hn::Set(d, 126.0F));
  const auto bits = hn::ConvertTo(di, limited);
  const auto rebased = hn::Add(hn::ShiftLeft<20>(bits), hn::Set(di, 120 << 23));
  const FloatVector denormal = hn::Mul(limited, hn::Set(d, 0x1p-9F));
  const auto is_denormal = hn::Lt(limited, hn::Set(d, 8.0F));
  const FloatVector code = hn::IfThenElse(is_denormal, denormal, hn::BitCast(d, rebased));
  return hn::IfThenElse(hn::Eq(exponent, exponent), code, exponent);
}

/// Of probabilities that are 2^(x · octaves).
HWY_ATTR HWY_INLINE FloatVector codes_of(const Quantization& quant, FloatVector probability,
                                         FloatVector exponent) {
  const FloatTag d;
  if (quant.p_codes == ProbabilityCodes::linear)
    return linear_codes(hn::Add(exponent, hn::Set(d, std::log2(quant.p_max))));
  const FloatVector p = hn::Mul(hn::Set(d, quant.p_max), probability);
  if (quant.pv == QuantFormat::int8) return hn::Round(p);
  return quant.pv == QuantFormat::e4m3 ? nearest_e4m3(p) : nearest_f16(p);
}

/// quant::group_scale of each lane, from the bits.
HWY_ATTR HWY_INLINE FloatVector group_scales(ScaleGranularity groups, FloatVector greatest) {
  const FloatTag d;
  if (groups == ScaleGranularity::group_16)
    return nearest_e4m3(hn::Mul(greatest, hn::Set(d, 1 / quant::kE2m1Max)));
  const hn::RebindToUnsigned<FloatTag> du;
  // 1.5 · 2^e becomes the last number below 2^(e + 1), what is greater 2^(e + 1); then two exponents less, of f32's
  // normal numbers.
  const auto up = hn::Add(hn::BitCast(du, greatest), hn::Set(du, 0x3fffff));
  const auto exponent = hn::And(up, hn::Set(du, 0x7f800000));
  const auto least = hn::Set(du, 3U << 23U);
  return hn::BitCast(d, hn::Sub(hn::Max(exponent, least), hn::Set(du, 2U << 23U)));
}

static_assert(kSubTileKeys % 32 == 0, "groups of e2m1 begin where what is seen of a tile does");

/// Of e2m1: numbers from 0 on become codes times the scale of their group of keys, in place, from this lane on.
HWY_ATTR inline void round_groups_of_keys(const Quantization& quant, const QuantizedTile& tile,
                                          int lane) {
  const FloatTag d;
  const std::int64_t size = quant::group_size(quant.v_scales);
  for (std::int64_t begin = 0; begin < tile.num_keys;) {
    const std::int64_t end = std::min(tile.num_keys, begin + size);
    FloatVector greatest = hn::Zero(d);
    for (std::int64_t key = begin; key < end; ++key)
      greatest = hn::Max(greatest, hn::Load(d, tile.scores + key * kPanelLanes + lane));
    const FloatVector scale = group_scales(quant.v_scales, greatest);
    const FloatVector reciprocal =
        hn::IfThenZeroElse(hn::Eq(scale, hn::Zero(d)), hn::Div(hn::Set(d, 1.0F), scale));
    for (; begin < end; ++begin) {
      float* const at = tile.scores + begin * kPanelLanes + lane;
      hn::Store(hn::Mul(nearest_e2m1(hn::Mul(hn::Load(d, at), reciprocal)), scale), d, at);
    }
  }
}

/// Of one vector of rows, in a tile: of all keys, and of those that dropout keeps.
struct TileSums {
  FloatVector sum, kept;
};

/// Scores become codes; what the quantisation's row sums count is summed.
HWY_ATTR inline TileSums round_single_keys(const Quantization& quant, const QuantizedTile& tile,
                                           const PanelDropout& dropout, const float* origins,
                                           int vector) {
  const FloatTag d;
  const int lane = vector * kVectorLanes;
  const FloatVector octaves = hn::Load(d, tile.octaves + lane);
  const FloatVector lowest = hn::Div(hn::Set(d, kZeroPower), octaves);
  const FloatVector origin = hn::Load(d, origins);
  const bool counts_codes = quant.row_sums == RowSums::codes;
  const bool drops = dropout.threshold > 0;
  DropoutColumn column(dropout, vector);
  FloatVector sum = hn::Zero(d), kept = hn::Zero(d);
  for (std::int64_t key = 0; key < tile.num_keys; ++key) {
    float* const at = tile.scores + key * kPanelLanes + lane;
    const FloatVector x = hn::Sub(hn::Load(d, at), origin);
    const FloatVector p = exp2_nonpositive(d, x, octaves, lowest);
    FloatVector code = codes_of(quant, p, hn::Mul(x, octaves));
    const FloatVector counted = counts_codes ? code : p;
    sum = hn::Add(sum, counted);
    if (drops) {
      const auto keeps = column.keeps(key);
      kept = hn::Add(kept, hn::IfThenElseZero(keeps, counted));
      code = hn::IfThenElseZero(keeps, code);
    }
    hn::Store(code, d, at);
  }
  return {sum, kept};
}

/// What stands in the place of scores.
HWY_ATTR inline TileSums sums_of(const QuantizedTile& tile, const PanelDropout& dropout,
                                 int vector) {
  const FloatTag d;
  const float* const first = tile.scores + vector * kVectorLanes;
  DropoutColumn column(dropout, vector);
  TileSums sums{hn::Zero(d), hn::Zero(d)};
  for (std::int64_t key = 0; key < tile.num_keys; ++key) {
    const FloatVector x = hn::Load(d, first + key * kPanelLanes);
    sums.sum = hn::Add(sums.sum, x);
    if (dropout.threshold > 0)
      sums.kept = hn::Add(sums.kept, hn::IfThenElseZero(column.keeps(key), x));
  }
  return sums;
}

HWY_ATTR inline void drop(const QuantizedTile& tile, const PanelDropout& dropout, int vector) {
  const FloatTag d;
  DropoutColumn column(dropout, vector);
  for (std::int64_t key = 0; key < tile.num_keys; ++key) {
    float* const at = tile.scores + key * kPanelLanes + vector * kVectorLanes;
    hn::Store(hn::IfThenElseZero(column.keeps(key), hn::Load(d, at)), d, at);
  }
}

/// The same of e2m1: a code wants the greatest of its group, dropped or not. Sums are in the unit of codes.
HWY_ATTR inline TileSums round_grouped_keys(const Quantization& quant, const QuantizedTile& tile,
                                            const PanelDropout& dropout, const float* origins,
                                            int vector) {
  const FloatTag d;
  const int lane = vector * kVectorLanes;
  const FloatVector octaves = hn::Load(d, tile.octaves + lane);
  const FloatVector lowest = hn::Div(hn::Set(d, kZeroPower), octaves);
  const FloatVector origin = hn::Load(d, origins);
  const FloatVector p_max = hn::Set(d, quant.p_max);
  for (std::int64_t key = 0; key < tile.num_keys; ++key) {
    float* const at = tile.scores + key * kPanelLanes + lane;
    const FloatVector x = hn::Sub(hn::Load(d, at), origin);
    hn::Store(hn::Mul(p_max, exp2_nonpositive(d, x, octaves, lowest)), d, at);
  }
  const bool counts_codes = quant.row_sums == RowSums::codes;
  TileSums sums{hn::Zero(d), hn::Zero(d)};
  if (!counts_codes) sums = sums_of(tile, dropout, vector);
  round_groups_of_keys(quant, tile, lane);
  if (counts_codes) sums = sums_of(tile, dropout, vector);
  if (dropout.threshold > 0) drop(tile, dropout, vector);
  return sums;
}

/// In place, of one vector of rows.
HWY_ATTR inline void round_vector(const Quantization& quant, const QuantizedTile& tile,
                                  const PanelDropout& dropout, const float* greatest,
                                  const QuantizedRows& rows, int vector) {
  const FloatTag d;
  const int lane = vector * kVectorLanes;
  TileOrigins of_tile;
  raise_origins(quant, tile, greatest + lane, rows, lane, of_tile);
  const bool has_groups = quant.pv == QuantFormat::e2m1;
  const TileSums sums = has_groups
                            ? round_grouped_keys(quant, tile, dropout, of_tile.origin, vector)
                            : round_single_keys(quant, tile, dropout, of_tile.origin, vector);
  const float code_unit = 1 / (quant.p_max * (quant.p_codes == ProbabilityCodes::linear
                                                  ? static_cast<float>(quant::kLinearMean)
                                                  : 1.0F));
  const bool drops = dropout.threshold > 0;
  // What is kept is scaled by the weight: times it, a code would be none, and no number of bf16.
  const FloatVector keep_scale = hn::Set(d, drops ? dropout.keep_scale : 1.0F);
  const FloatVector weight = hn::Load(d, of_tile.weight);
  const FloatVector of_code = hn::Mul(hn::Set(d, code_unit), weight);
  hn::Store(hn::Mul(of_code, keep_scale), d, rows.weight + lane);
  const FloatVector of_sum = has_groups || quant.row_sums == RowSums::codes ? of_code : weight;
  add_weighted(of_sum, sums.sum, rows.row_sum + lane);
  if (drops) add_weighted(hn::Mul(of_sum, keep_scale), sums.kept, rows.kept_sum + lane);
}

HWY_ATTR inline void round_probabilities(const Quantization& quant, const QuantizedTile& tile,
                                         const PanelDropout& dropout, const QuantizedRows& rows) {
  HWY_ALIGN float greatest[kPanelLanes];
  find_greatest(tile, greatest);
  for (int vector = 0; vector < kPanelVectors; ++vector)
    round_vector(quant, tile, dropout, greatest, rows, vector);
}

HWY_ATTR inline void dequantize(float* HWY_RESTRICT scores, std::int64_t num_keys,
                                const float* HWY_RESTRICT key_scale,
                                const float* HWY_RESTRICT scale, const float* HWY_RESTRICT shift) {
  const FloatTag d;
  for (std::int64_t key = 0; key < num_keys; ++key) {
    const FloatVector of_key = hn::Set(d, key_scale[key]);
    for (int lane = 0; lane < kPanelLanes; lane += kVectorLanes) {
      float* const at = scores + key * kPanelLanes + lane;
      const FloatVector both = hn::Mul(of_key, hn::Load(d, scale + lane));
      hn::Store(hn::MulAdd(hn::Load(d, at), both, hn::Load(d, shift + lane)), d, at);
    }
  }
}

HWY_ATTR inline void add_scaled(const float* HWY_RESTRICT sums, const float* HWY_RESTRICT scale,
                                std::int64_t head_dim, const QuantizedRows& rows,
                                float* HWY_RESTRICT out) {
  const FloatTag d;
  for (std::int64_t c = 0; c < head_dim; ++c) {
    for (int lane = 0; lane < kPanelLanes; lane += kVectorLanes) {
      float* const at = out + c * kPanelLanes + lane;
      const FloatVector factor = hn::Mul(hn::Load(d, rows.weight + lane), hn::Set(d, scale[c]));
      const FloatVector before = hn::Mul(hn::Load(d, at), hn::Load(d, rows.rescale + lane));
      hn::Store(hn::MulAdd(factor, hn::Load(d, sums + c * kPanelLanes + lane), before), d, at);
    }
  }
}

inline const RoundingSteps& rounding_steps() {
  static constexpr RoundingSteps kSteps{.smooth_row = smooth_row,
                                        .smooth_values = smooth_values,
                                        .add_to_sums = add_to_sums,
                                        .greatest_of = greatest_of,
                                        .raise_greatest = raise_greatest,
                                        .dot = dot,
                                        .int8_codes = int8_codes,
                                        .transpose_codes = transpose_codes,
                                        .wide_codes = wide_codes,
                                        .dequantize = dequantize,
                                        .round_probabilities = round_probabilities,
                                        .add_scaled = add_scaled};
  return kSteps;
}

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
