// Rows of operands become codes: one read of the caller's numbers, one write of codes. The bit rules are those of
// quant/formats.hpp, each operation of f32 in the same order. Read round_probabilities-inl.hpp next.

#if defined(FOVEA_CPU_KERNELS_ROUND_ROWS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_KERNELS_ROUND_ROWS_INL_HPP_
#undef FOVEA_CPU_KERNELS_ROUND_ROWS_INL_HPP_
#else
#define FOVEA_CPU_KERNELS_ROUND_ROWS_INL_HPP_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/kernels/codes.hpp"
#include "hwy/highway.h"
#include "quant/formats.hpp"
// after highway.h: per-target headers
#include "cpu/kernels/panel_rows-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// |x| to the nearest number with kMantissa bits of mantissa, normal from 2^kLeast on; ties to even; no limit above.
template <int kMantissa, int kLeast>
HWY_ATTR HWY_INLINE FloatVector nearest_magnitude(FloatVector magnitude) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  constexpr int kDropped = 23 - kMantissa;
  const auto bits = hn::BitCast(du, magnitude);
  const auto odd = hn::And(hn::ShiftRight<kDropped>(bits), hn::Set(du, 1));
  const auto half = hn::Add(odd, hn::Set(du, (1U << (kDropped - 1)) - 1));
  const auto kept = hn::Set(du, ~((1U << kDropped) - 1));
  const FloatVector normal = hn::BitCast(d, hn::And(hn::Add(bits, half), kept));
  // Denormals are multiples of 2^(kLeast - kMantissa), the unit in the last place of this number:
  constexpr auto kShift = static_cast<std::uint32_t>(127 + 23 + kLeast - kMantissa);
  constexpr auto kNormal = static_cast<std::uint32_t>(127 + kLeast);
  const FloatVector shift = hn::Set(d, std::bit_cast<float>(kShift << 23U));
  const FloatVector denormal = hn::Sub(hn::Add(magnitude, shift), shift);
  const FloatVector least = hn::Set(d, std::bit_cast<float>(kNormal << 23U));
  return hn::IfThenElse(hn::Lt(magnitude, least), denormal, normal);
}

/// Numbers of e4m3 and f16, saturated; NaN stays NaN.
HWY_ATTR HWY_INLINE FloatVector nearest_e4m3(FloatVector x) {
  const FloatTag d;
  const FloatVector limited = hn::Min(hn::Abs(x), hn::Set(d, quant::kE4m3Max));
  return hn::IfThenElse(hn::Eq(x, x), hn::CopySign(nearest_magnitude<3, -6>(limited), x), x);
}
HWY_ATTR HWY_INLINE FloatVector nearest_f16(FloatVector x) {
  const FloatTag d;
  const FloatVector limited = hn::Min(hn::Abs(x), hn::Set(d, 65504.0F));
  return hn::IfThenElse(hn::Eq(x, x), hn::CopySign(nearest_magnitude<10, -14>(limited), x), x);
}
/// NaN stays NaN: a row that has one is lost anyway.
HWY_ATTR HWY_INLINE FloatVector nearest_e2m1(FloatVector x) {
  const FloatTag d;
  const FloatVector limited = hn::Min(hn::Abs(x), hn::Set(d, quant::kE2m1Max));
  return hn::IfThenElse(hn::Eq(x, x), hn::CopySign(nearest_magnitude<1, 0>(limited), x), x);
}

HWY_ATTR HWY_INLINE FloatVector nearest_int8(FloatVector x) {
  const FloatTag d;
  const FloatVector most = hn::Set(d, quant::kInt8Max);
  return hn::Max(hn::Min(hn::Round(x), most), hn::Neg(most));
}

HWY_ATTR inline void convert_row(const RowSource& source, float* HWY_RESTRICT row) {
  if (source.dtype == Dtype::e4m3)
    return convert_codes(source.data, source.dtype, source.col_stride, source.count, row);
  convert_row(source.data, source.dtype, source.col_stride, source.count, row);
}

HWY_ATTR inline RowFacts smooth_row(const RowSource& source, const float* mean,
                                    float* HWY_RESTRICT row) {
  const FloatTag d;
  convert_row(source, row);
  FloatVector zero = hn::Zero(d);  // NaN once an element is not finite
  FloatVector greatest = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + kVectorLanes <= source.count; i += kVectorLanes) {
    FloatVector x = hn::LoadU(d, row + i);
    zero = hn::MulAdd(x, hn::Zero(d), zero);
    if (mean != nullptr) x = hn::Sub(x, hn::LoadU(d, mean + i));
    greatest = hn::Max(greatest, hn::Abs(x));
    hn::StoreU(x, d, row + i);
  }
  RowFacts facts{.is_finite = hn::AllTrue(d, hn::Eq(zero, hn::Zero(d))),
                 .greatest = hn::GetLane(hn::MaxOfLanes(d, greatest))};
  for (; i < source.count; ++i) {
    facts.is_finite = facts.is_finite && std::isfinite(row[i]);
    if (mean != nullptr) row[i] -= mean[i];
    facts.greatest = std::max(facts.greatest, std::fabs(row[i]));
  }
  if (!facts.is_finite) std::fill_n(row, source.count, 0.0F);
  return facts;
}

HWY_ATTR inline bool smooth_values(const RowSource& source, const float* HWY_RESTRICT mean,
                                   float* HWY_RESTRICT row) {
  const FloatTag d;
  convert_row(source, row);
  FloatVector zero = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + kVectorLanes <= source.count; i += kVectorLanes) {
    const FloatVector x = hn::LoadU(d, row + i);
    zero = hn::MulAdd(x, hn::Zero(d), zero);
    const auto is_number = hn::Eq(hn::Sub(x, x), hn::Zero(d));
    hn::StoreU(hn::IfThenElseZero(is_number, hn::Sub(x, hn::LoadU(d, mean + i))), d, row + i);
  }
  bool is_finite = hn::AllTrue(d, hn::Eq(zero, hn::Zero(d)));
  for (; i < source.count; ++i) {
    const bool is_number = std::isfinite(row[i]);
    row[i] = is_number ? row[i] - mean[i] : 0;
    is_finite = is_finite && is_number;
  }
  return is_finite;
}

HWY_ATTR inline void add_to_sums(const RowSource& source, bool by_element,
                                 float* HWY_RESTRICT scratch, double* HWY_RESTRICT sums) {
  convert_row(source, scratch);
  if (!zero_non_finite(scratch, source.count) && !by_element) return;
  for (std::int64_t i = 0; i < source.count; ++i) sums[i] += static_cast<double>(scratch[i]);
}

HWY_ATTR inline float greatest_of(const float* HWY_RESTRICT row, std::int64_t count) {
  const FloatTag d;
  FloatVector of_vector = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + kVectorLanes <= count; i += kVectorLanes)
    of_vector = hn::Max(of_vector, hn::Abs(hn::LoadU(d, row + i)));
  float greatest = hn::GetLane(hn::MaxOfLanes(d, of_vector));
  for (; i < count; ++i) greatest = std::max(greatest, std::fabs(row[i]));
  return greatest;
}

HWY_ATTR inline void raise_greatest(const float* HWY_RESTRICT row, std::int64_t count,
                                    float* HWY_RESTRICT greatest) {
  const FloatTag d;
  std::int64_t i = 0;
  for (; i + kVectorLanes <= count; i += kVectorLanes) {
    const FloatVector x = hn::Abs(hn::LoadU(d, row + i));
    hn::StoreU(hn::Max(hn::LoadU(d, greatest + i), x), d, greatest + i);
  }
  for (; i < count; ++i) greatest[i] = std::max(greatest[i], std::fabs(row[i]));
}

/// a · b, in eight sums of f64: products of f32 are exact in it.
HWY_ATTR inline double dot(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b,
                           std::int64_t count) {
  HWY_ALIGN double sums[8] = {};
  std::int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, hn::ScalableTag<double>> half;
  constexpr int kWidth = kVectorLanes / 2;
  hn::Vec<hn::ScalableTag<double>> sum[8 / kWidth];
  for (auto& each : sum) each = hn::Zero(d);
  for (; i + 8 <= count; i += 8) {
    for (int k = 0; k < 8 / kWidth; ++k) {
      const auto x = hn::PromoteTo(d, hn::LoadU(half, a + i + k * kWidth));
      sum[k] = hn::MulAdd(x, hn::PromoteTo(d, hn::LoadU(half, b + i + k * kWidth)), sum[k]);
    }
  }
  for (int k = 0; k < 8 / kWidth; ++k) hn::Store(sum[k], d, sums + k * kWidth);
#else
  for (; i + 8 <= count; i += 8) {
    for (int k = 0; k < 8; ++k)
      sums[k] += static_cast<double>(a[i + k]) * static_cast<double>(b[i + k]);
  }
#endif
  for (; i < count; ++i) sums[0] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/// The codes of four rows side by side in a word each.
HWY_ATTR inline void join_rows(const std::uint8_t* const* rows, std::int64_t width,
                               std::uint32_t* HWY_RESTRICT words) {
  for (std::int64_t d = 0; d < width; ++d) {
    words[d] = static_cast<std::uint32_t>(rows[0][d]) |
               static_cast<std::uint32_t>(rows[1][d]) << 8U |
               static_cast<std::uint32_t>(rows[2][d]) << 16U |
               static_cast<std::uint32_t>(rows[3][d]) << 24U;
  }
}

/// Sixteen rows at a time: four words a column.
HWY_ATTR inline void transpose_codes(const std::uint8_t* rows, std::int64_t count,
                                     std::int64_t width, std::int64_t pitch,
                                     std::uint8_t* columns) {
  static constexpr std::uint8_t kZeros[kMaxHeadDim] = {};
  HWY_ALIGN std::uint32_t words[4][kMaxHeadDim];
  for (std::int64_t n = 0; n < pitch; n += 16) {
    for (std::int64_t k = 0; k < 4; ++k) {
      const std::uint8_t* four[4];
      for (std::int64_t i = 0; i < 4; ++i) {
        const std::int64_t row = n + 4 * k + i;
        four[i] = row < count ? rows + row * width : kZeros;
      }
      join_rows(four, width, words[k]);
    }
    std::int64_t d = 0;
#if HWY_TARGET != HWY_SCALAR
    const QuadTag quad;
    const hn::RebindToUnsigned<QuadTag> of_words;
    for (; d + 4 <= width; d += 4) {
      hn::Vec<QuadTag> block[4];
      for (int k = 0; k < 4; ++k) block[k] = hn::BitCast(quad, hn::LoadU(of_words, words[k] + d));
      transpose(block);
      for (int k = 0; k < 4; ++k)
        hn::StoreU(hn::BitCast(hn::Repartition<std::uint8_t, QuadTag>(), block[k]),
                   hn::Repartition<std::uint8_t, QuadTag>(), columns + (d + k) * pitch + n);
    }
#endif
    for (; d < width; ++d) {
      for (int k = 0; k < 4; ++k)
        std::memcpy(columns + d * pitch + n + 4 * k, &words[k][d], sizeof(std::uint32_t));
    }
  }
}

HWY_ATTR HWY_INLINE FloatVector scaled(const float* row, const float* reciprocals, bool is_of_row,
                                       std::int64_t i) {
  const FloatTag d;
  const FloatVector r = is_of_row ? hn::Set(d, *reciprocals) : hn::LoadU(d, reciprocals + i);
  return hn::Mul(hn::LoadU(d, row + i), r);
}
inline float scaled_element(const float* row, const float* reciprocals, bool is_of_row,
                            std::int64_t i) {
  return row[i] * reciprocals[is_of_row ? 0 : i];
}

HWY_ATTR inline void int8_codes(const float* HWY_RESTRICT row,
                                const float* HWY_RESTRICT reciprocals, bool is_of_row,
                                std::int64_t count, std::uint8_t offset,
                                std::uint8_t* HWY_RESTRICT codes) {
  std::int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const hn::Rebind<std::uint8_t, FloatTag> d8;
  for (; i + kVectorLanes <= count; i += kVectorLanes) {
    const auto code = hn::ConvertTo(di, nearest_int8(scaled(row, reciprocals, is_of_row, i)));
    const auto bits = hn::And(hn::Add(code, hn::Set(di, offset)), hn::Set(di, 0xff));
    hn::StoreU(hn::DemoteTo(d8, bits), d8, codes + i);
  }
#endif
  for (; i < count; ++i) {
    const float code = quant::int8_code(scaled_element(row, reciprocals, is_of_row, i));
    codes[i] = static_cast<std::uint8_t>(static_cast<int>(code) + offset);
  }
}

/// Of bf16's formats.
HWY_ATTR HWY_INLINE FloatVector nearest_of(QuantFormat format, FloatVector x) {
  if (format == QuantFormat::int8) return nearest_int8(x);
  return format == QuantFormat::e4m3 ? nearest_e4m3(x) : nearest_e2m1(x);
}
inline float nearest_element(QuantFormat format, float x) {
  if (format == QuantFormat::int8) return quant::int8_code(x);
  return format == QuantFormat::e4m3 ? quant::e4m3_code(x) : quant::e2m1_code(x);
}

HWY_ATTR inline void wide_codes(const float* HWY_RESTRICT row, const CodeScales& scales,
                                std::int64_t count, QuantFormat format,
                                std::uint16_t* HWY_RESTRICT codes) {
  const bool is_of_row = scales.is_of_row;
  std::int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const hn::RebindToSigned<FloatTag> di;
  const hn::Rebind<std::uint16_t, FloatTag> d16;
  for (; format != QuantFormat::f16 && i + kVectorLanes <= count; i += kVectorLanes) {
    FloatVector code = nearest_of(format, scaled(row, scales.reciprocals, is_of_row, i));
    if (scales.groups != nullptr) {
      code =
          hn::Mul(code, is_of_row ? hn::Set(d, *scales.groups) : hn::LoadU(d, scales.groups + i));
    }
    const auto high = hn::ShiftRight<16>(hn::BitCast(du, code));  // all that these codes have
    hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, high)), d16, codes + i);
  }
#endif
  for (; i < count; ++i) {
    const float x = scaled_element(row, scales.reciprocals, is_of_row, i);
    if (format == QuantFormat::f16) {
      codes[i] = float16(quant::f16_code(x)).bits;
    } else {
      const float group = scales.groups == nullptr ? 1 : scales.groups[is_of_row ? 0 : i];
      codes[i] = bfloat16(nearest_element(format, x) * group).bits;
    }
  }
}

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
