// What every f32 kernel starts from: the shape of a panel on this target, and rows of any dtype as fp32.

#if defined(FOVEA_CPU_KERNELS_PANEL_ROWS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_KERNELS_PANEL_ROWS_INL_HPP_
#undef FOVEA_CPU_KERNELS_PANEL_ROWS_INL_HPP_
#else
#define FOVEA_CPU_KERNELS_PANEL_ROWS_INL_HPP_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "fovea/dtype.hpp"

#include "core/scalar_io.hpp"
#include "cpu/kernels/panel.hpp"
#include "hwy/highway.h"
#include "quant/row_codes.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVector = hn::Vec<FloatTag>;

// Register blocks: 32 vector registers take 8 x 3 (+ 3 operands + 1 broadcast), 16 take 6 x 2, and 4 x 3 where
// a vector is a scalar.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
inline constexpr int kBlockRows = 8;
inline constexpr int kPanelVectors = 3;
#elif HWY_TARGET == HWY_SCALAR
inline constexpr int kBlockRows = 4;
inline constexpr int kPanelVectors = 3;
#else
inline constexpr int kBlockRows = 6;
inline constexpr int kPanelVectors = 2;
#endif
#if HWY_TARGET == HWY_SCALAR
inline constexpr int kVectorLanes = 1;  // Highway counts 16 bytes for it
#else
inline constexpr int kVectorLanes = static_cast<int>(HWY_MAX_BYTES / sizeof(float));
#endif
inline constexpr int kPanelLanes = kPanelVectors * kVectorLanes;

/// In powers of two: how far a row's maximum may rise above its origin.
inline constexpr float kMaxGrowth = 8.0F;

HWY_ATTR HWY_INLINE FloatVector load_int8(const std::int8_t* from) {
  const FloatTag d;
  const hn::Rebind<std::int8_t, FloatTag> d8;
  const hn::RebindToSigned<FloatTag> d32;
  return hn::ConvertTo(d, hn::PromoteTo(d32, hn::LoadU(d8, from)));
}

/// Exponents are rebased; multiples of 2^-9, which have none, are converted as integers.
HWY_ATTR HWY_INLINE FloatVector load_e4m3(const std::uint8_t* from) {
  const FloatTag d;
  const hn::Rebind<std::uint8_t, FloatTag> d8;
  const hn::RebindToUnsigned<FloatTag> du;
  const hn::RebindToSigned<FloatTag> di;
  const auto bits = hn::PromoteTo(du, hn::LoadU(d8, from));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7f));
  const auto rebased = hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(du, 120U << 23U));
  const FloatVector small =
      hn::Mul(hn::ConvertTo(d, hn::BitCast(di, magnitude)), hn::Set(d, 0x1p-9F));
  const auto is_nan = hn::RebindMask(d, hn::Eq(magnitude, hn::Set(du, 0x7f)));
  const auto is_small = hn::RebindMask(d, hn::Lt(hn::BitCast(di, magnitude), hn::Set(di, 8)));
  const FloatVector positive = hn::IfThenElse(is_small, small, hn::BitCast(d, rebased));
  const FloatVector number =
      hn::IfThenElse(is_nan, hn::Set(d, std::numeric_limits<float>::quiet_NaN()), positive);
  const auto sign = hn::ShiftLeft<24>(hn::And(bits, hn::Set(du, 0x80)));
  return hn::Or(number, hn::BitCast(d, sign));
}

/// `count` codes of a row as fp32, not scaled.
HWY_ATTR inline void convert_codes(const std::byte* row, Dtype dtype, std::int64_t col_stride,
                                   std::int64_t count, float* HWY_RESTRICT out) {
  const FloatTag d;
  std::int64_t i = 0;
  if (col_stride == 1) {
    for (; i + kVectorLanes <= count; i += kVectorLanes) {
      const FloatVector codes = dtype == Dtype::i8
                                    ? load_int8(reinterpret_cast<const std::int8_t*>(row) + i)
                                    : load_e4m3(reinterpret_cast<const std::uint8_t*>(row) + i);
      hn::StoreU(codes, d, out + i);
    }
  }
  for (; i < count; ++i)
    out[i] = quant::code_value(std::to_integer<std::uint8_t>(row[i * col_stride]), dtype);
}

/// `count` elements of a row as fp32.
HWY_ATTR inline void convert_row(const std::byte* row, Dtype dtype, std::int64_t col_stride,
                                 std::int64_t count, float* HWY_RESTRICT out) {
  const FloatTag d;
  const hn::Rebind<std::uint16_t, FloatTag> d16;
  const hn::Rebind<std::uint32_t, FloatTag> d32;
  const auto n = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  if (dtype == Dtype::f32) {
    const auto* from = reinterpret_cast<const float*>(row);
    if (col_stride == 1) {
      std::memcpy(out, from, static_cast<std::size_t>(count) * sizeof(float));
      return;
    }
    for (; i < count; ++i) out[i] = from[i * col_stride];
    return;
  }
  const auto* from = reinterpret_cast<const std::uint16_t*>(row);
  if (dtype == Dtype::bf16) {
    if (col_stride == 1) {
      for (; i + n <= count; i += n) {
        const auto wide = hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from + i)));
        hn::StoreU(hn::BitCast(d, wide), d, out + i);
      }
    }
    for (; i < count; ++i) out[i] = static_cast<float>(bfloat16::from_bits(from[i * col_stride]));
    return;
  }
  // Note: Highway's scalar conversion of f16 takes Inf and NaN for numbers.
  if (col_stride == 1 && HWY_TARGET != HWY_SCALAR) {
    const hn::Rebind<hwy::float16_t, FloatTag> d_half;
    for (; i + n <= count; i += n) {
      const auto half = hn::BitCast(d_half, hn::LoadU(d16, from + i));
      hn::StoreU(hn::PromoteTo(d, half), d, out + i);
    }
  }
  for (; i < count; ++i) out[i] = static_cast<float>(float16::from_bits(from[i * col_stride]));
}

HWY_ATTR inline void multiply_row(float factor, std::int64_t count, float* HWY_RESTRICT row) {
  const FloatTag d;
  std::int64_t i = 0;
  for (; i + kVectorLanes <= count; i += kVectorLanes)
    hn::StoreU(hn::Mul(hn::LoadU(d, row + i), hn::Set(d, factor)), d, row + i);
  for (; i < count; ++i) row[i] *= factor;
}

/// A row of a tile as fp32: codes times their scale.
HWY_ATTR inline void convert_row_of(const TileSource& source, const std::byte* row,
                                    std::int64_t index, float* HWY_RESTRICT out) {
  if (source.scales == nullptr)
    return convert_row(row, source.dtype, source.col_stride, source.num_cols, out);
  convert_codes(row, source.dtype, source.col_stride, source.num_cols, out);
  multiply_row(source.scales[index], source.num_cols, out);
}

HWY_ATTR inline TileSource numbers(const TileSource& codes, float* buffer) {
  for (std::int64_t i = 0; i < codes.num_rows; ++i)
    convert_row_of(codes, codes.row(i), i, buffer + i * codes.num_cols);
  return {.data = reinterpret_cast<const std::byte*>(buffer),
          .dtype = Dtype::f32,
          .row_stride = codes.num_cols,
          .num_rows = codes.num_rows,
          .num_cols = codes.num_cols};
}

/// Elements that are not finite become 0. Were there none?
HWY_ATTR inline bool zero_non_finite(float* HWY_RESTRICT row, std::int64_t count) {
  const FloatTag d;
  auto all = hn::Eq(hn::Zero(d), hn::Zero(d));
  std::int64_t i = 0;
  for (; i + kVectorLanes <= count; i += kVectorLanes) {
    const FloatVector x = hn::LoadU(d, row + i);
    const auto is_number = hn::Eq(hn::Sub(x, x), hn::Zero(d));
    hn::StoreU(hn::IfThenElseZero(is_number, x), d, row + i);
    all = hn::And(all, is_number);
  }
  bool is_finite = hn::AllTrue(d, all);
  for (; i < count; ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, row + i, sizeof(bits));
    if ((bits & 0x7f800000U) != 0x7f800000U) continue;
    row[i] = 0;
    is_finite = false;
  }
  return is_finite;
}

#if HWY_TARGET != HWY_SCALAR
using QuadTag = hn::FixedTag<float, 4>;

/// Four vectors of four: rows become columns. (No struct: its constructor would not be compiled for the target.)
HWY_ATTR HWY_INLINE void transpose(hn::Vec<QuadTag> (&row)[4]) {
  const QuadTag d;
  const auto low01 = hn::InterleaveLower(d, row[0], row[1]);
  const auto low23 = hn::InterleaveLower(d, row[2], row[3]);
  const auto high01 = hn::InterleaveUpper(d, row[0], row[1]);
  const auto high23 = hn::InterleaveUpper(d, row[2], row[3]);
  row[0] = hn::ConcatLowerLower(d, low23, low01);
  row[1] = hn::ConcatUpperUpper(d, low23, low01);
  row[2] = hn::ConcatLowerLower(d, high23, high01);
  row[3] = hn::ConcatUpperUpper(d, high23, high01);
}
#endif

/// Lanes that pack_lanes takes at once.
inline constexpr int kPackedLanes = kPanelLanes % 4 == 0 ? 4 : 1;

/// out[i][lane] = rows[lane][i] for kPackedLanes neighbouring lanes; rows of out are kPanelLanes apart.
HWY_ATTR inline void pack_lanes(const float* const* rows, std::int64_t count,
                                float* HWY_RESTRICT out) {
  std::int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const QuadTag d;
  for (; i + 4 <= count; i += 4) {
    hn::Vec<QuadTag> quads[4];
    for (int k = 0; k < 4; ++k) quads[k] = hn::LoadU(d, rows[k] + i);
    transpose(quads);
    for (int k = 0; k < 4; ++k) hn::StoreU(quads[k], d, out + (i + k) * kPanelLanes);
  }
#endif
  for (; i < count; ++i) {
    for (int k = 0; k < kPackedLanes; ++k) out[i * kPanelLanes + k] = rows[k][i];
  }
}

/// fp32 to bf16, to nearest even; NaN stays NaN.
template <class D, class D16>
HWY_ATTR HWY_INLINE void store_bf16(D /*d*/, D16 d16, hn::Vec<D> x, std::uint16_t* to) {
  const hn::RebindToSigned<D> di;
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fff)));
  const auto quiet = hn::Or(bits, hn::Set(du, 0x400000));
  const auto is_number = hn::RebindMask(du, hn::Eq(x, x));
  const auto high = hn::ShiftRight<16>(hn::IfThenElse(is_number, rounded, quiet));
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, high)), d16, to);
}

/// to = row * factor, in any dtype and stride.
HWY_ATTR inline void store_row(const float* HWY_RESTRICT row, float factor, std::int64_t count,
                               Dtype dtype, std::int64_t col_stride, std::byte* HWY_RESTRICT to) {
  const FloatTag d;
  const FloatVector f = hn::Set(d, factor);
  std::int64_t i = 0;
  if (col_stride == 1 && dtype == Dtype::f32) {
    for (; i + kVectorLanes <= count; i += kVectorLanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, row + i), f), d, reinterpret_cast<float*>(to) + i);
    }
  }
#if HWY_TARGET != HWY_SCALAR
  const hn::Rebind<std::uint16_t, FloatTag> d16;
  if (col_stride == 1 && dtype == Dtype::bf16) {
    for (; i + kVectorLanes <= count; i += kVectorLanes) {
      store_bf16(d, d16, hn::Mul(hn::LoadU(d, row + i), f),
                 reinterpret_cast<std::uint16_t*>(to) + i);
    }
  }
  if (col_stride == 1 && dtype == Dtype::f16) {
    const hn::Rebind<hwy::float16_t, FloatTag> d_half;
    for (; i + kVectorLanes <= count; i += kVectorLanes) {
      const auto half = hn::DemoteTo(d_half, hn::Mul(hn::LoadU(d, row + i), f));
      hn::StoreU(hn::BitCast(d16, half), d16, reinterpret_cast<std::uint16_t*>(to) + i);
    }
  }
#endif
  for (; i < count; ++i) store_scalar(to, dtype, i * col_stride, row[i] * factor);
}

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
