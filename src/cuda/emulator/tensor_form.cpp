#include "cuda/emulator/tensor_form.hpp"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "cuda/emulator/formats.hpp"

namespace fovea::cuda::emulator {
namespace {

std::uint32_t field(std::uint64_t bits, int first, int count) {
  return static_cast<std::uint32_t>(bits >> first) & ((1U << count) - 1);
}

bool has_scales(TensorKind kind) { return kind >= TensorKind::mxf8f6f4_block32; }

std::optional<TensorElement> small_float(std::uint32_t code) {
  switch (code) {
    case 0:
      return TensorElement::e4m3;
    case 1:
      return TensorElement::e5m2;
    case 3:
      return TensorElement::e2m3;
    case 4:
      return TensorElement::e3m2;
    case 5:
      return TensorElement::e2m1;
    default:
      return std::nullopt;
  }
}

std::optional<TensorElement> element_of(TensorKind kind, std::uint32_t code) {
  const bool is_first = code == 0, is_second = code == 1;
  switch (kind) {
    case TensorKind::f16:
      if (!is_first && !is_second) return std::nullopt;
      return is_first ? TensorElement::f16 : TensorElement::bf16;
    case TensorKind::tf32:
      return code == 2 ? std::optional(TensorElement::tf32) : std::nullopt;
    case TensorKind::i8:
      if (!is_first && !is_second) return std::nullopt;
      return is_first ? TensorElement::u8 : TensorElement::s8;
    case TensorKind::f8f6f4:
    case TensorKind::mxf8f6f4_block32:
      return small_float(code);
    case TensorKind::mxf4_block32:
    case TensorKind::mxf4nvf4_block32:
    case TensorKind::mxf4nvf4_block16:
      return is_second ? std::optional(TensorElement::e2m1) : std::nullopt;
  }
  return std::nullopt;
}

/// Nothing, or why such a sum does not go with the kind.
std::string complaint_of_sum(TensorKind kind, TensorElement a, std::uint32_t code) {
  const bool is_f16 = code == 0, is_f32 = code == 1, is_s32 = code == 2;
  if (kind == TensorKind::i8) return is_s32 ? "" : "sums of integers are s32";
  if (is_f32) return "";
  const bool may_be_f16 = kind == TensorKind::f8f6f4 || a == TensorElement::f16;
  if (is_f16 && may_be_f16) return "";
  return "sums are f32, of f16 and f8f6f4 also f16";
}

std::string complaint_of_shape(TensorKind kind, int cta_group, const TensorForm& form) {
  const auto group = static_cast<std::uint32_t>(cta_group);
  const std::uint32_t rows = form.m / group;
  const bool is_whole = rows * group == form.m;
  const bool is_m = has_scales(kind) ? form.m == 128 || (cta_group == 2 && form.m == 256)
                                     : is_whole && (rows == 64 || rows == 128);
  if (!is_m)
    return fmt::format("m is {}; expected {}", form.m,
                       cta_group == 2     ? "128 or 256 for a pair"
                       : has_scales(kind) ? "128"
                                          : "64 or 128");
  std::uint32_t step = 8 * group;
  if (kind == TensorKind::i8 && (cta_group == 2 || form.n > 32)) step *= 2;
  const bool is_eight_bit_transposed = form.b_is_mn_major && element_bits(form.b) <= 8;
  if (is_eight_bit_transposed) step = std::max(step, 16 * group);
  if (form.n >= step && form.n <= 256 && form.n % step == 0) return "";
  return fmt::format("n is {}; expected a multiple of {} up to 256", form.n, step);
}

std::string complaint_of_zeros(TensorKind kind, std::uint32_t bits) {
  if (field(bits, 0, 3) != 0) return "sparse products are not modelled (bits 0-2)";
  if (field(bits, 3, 1) != 0) return "saturation is not modelled (bit 3)";
  const bool is_scaled = has_scales(kind);
  if (field(bits, 6, 1) != 0) return "bit 6 is not zero";
  if (is_scaled && field(bits, 24, 3) != 0) return "bits 24-26 are not zero";
  if (is_scaled && field(bits, 31, 1) != 0) return "a depth of 96 is not modelled (bit 31)";
  if (!is_scaled && (field(bits, 23, 1) != 0 || field(bits, 29, 3) != 0))
    return "bits 23 and 29-31 are not zero";
  return "";
}

std::uint32_t scales_of(TensorKind kind) {
  switch (kind) {
    case TensorKind::mxf8f6f4_block32:
      return 1;
    case TensorKind::mxf4_block32:
    case TensorKind::mxf4nvf4_block32:
      return 2;
    case TensorKind::mxf4nvf4_block16:
      return 4;
    default:
      return 0;
  }
}

std::string decode_scales(TensorKind kind, std::uint32_t bits, TensorForm& form) {
  form.scales = scales_of(kind);
  form.has_ue8m0_scales = field(bits, 23, 1) != 0;
  form.b_scale_byte = field(bits, 4, 2);
  form.a_scale_byte = field(bits, 29, 2);
  if (form.a_scale_byte % form.scales != 0 || form.b_scale_byte % form.scales != 0)
    return fmt::format("scales begin at bytes {} and {}; {} of them begin at a multiple",
                       form.a_scale_byte, form.b_scale_byte, form.scales);
  if (!form.has_ue8m0_scales && kind != TensorKind::mxf4nvf4_block16)
    return "scales of blocks of 32 are ue8m0 (bit 23)";
  return "";
}

std::string decode_majors(TensorKind kind, std::uint32_t bits, TensorForm& form) {
  form.negates_a = field(bits, 13, 1) != 0;
  form.negates_b = field(bits, 14, 1) != 0;
  form.a_is_mn_major = field(bits, 15, 1) != 0;
  form.b_is_mn_major = field(bits, 16, 1) != 0;
  const bool is_mn_major = form.a_is_mn_major || form.b_is_mn_major;
  if (kind == TensorKind::i8 && (form.negates_a || form.negates_b))
    return "integers are not negated";
  if (form.is_packed && is_mn_major) return "packed elements of 4 bits are K-major";
  if (kind == TensorKind::tf32 && is_mn_major)
    return "tf32 that is MN-major (32-byte atoms) is not modelled";
  return "";
}

}  // namespace

DecodedForm decode_instruction(TensorKind kind, int cta_group, std::uint32_t bits) {
  DecodedForm result;
  TensorForm& form = result.form;
  result.complaint = complaint_of_zeros(kind, bits);
  if (!result.complaint.empty()) return result;
  // Of packed elements bit 9 of the field is not there.
  const auto a = element_of(kind, field(bits, 7, 3)), b = element_of(kind, field(bits, 10, 3));
  if (!a || !b || (kind == TensorKind::f16 && a != b)) {
    result.complaint = fmt::format("types {} and {} do not go with this kind", field(bits, 7, 3),
                                   field(bits, 10, 3));
    return result;
  }
  form.a = *a;
  form.b = *b;
  form.is_packed = has_scales(kind) && kind != TensorKind::mxf8f6f4_block32;
  form.n = 8 * field(bits, 17, 6);
  form.m = has_scales(kind) ? 128 * field(bits, 27, 2) : 16 * field(bits, 24, 5);
  form.k = 2 * elements_of_chunk(form.a, form.is_packed);
  form.sum = kind == TensorKind::i8                       ? TensorSum::s32
             : has_scales(kind) || field(bits, 4, 2) == 1 ? TensorSum::f32
                                                          : TensorSum::f16;
  result.complaint = decode_majors(kind, bits, form);
  if (result.complaint.empty()) result.complaint = complaint_of_shape(kind, cta_group, form);
  if (!result.complaint.empty()) return result;
  result.complaint = has_scales(kind) ? decode_scales(kind, bits, form)
                                      : complaint_of_sum(kind, form.a, field(bits, 4, 2));
  return result;
}

std::string complaint_of_descriptor(std::uint64_t descriptor) {
  if (field(descriptor, 46, 3) != 1) {
    return "bits 46-48 are not 1: it is a descriptor of wgmma, or none (smem_descriptor makes one)";
  }
  if (field(descriptor, 14, 2) != 0 || field(descriptor, 30, 2) != 0 ||
      field(descriptor, 53, 8) != 0)
    return "bits 14-15, 30-31 and 53-60 are not zero";
  if (field(descriptor, 49, 3) != 0) {
    return "a base offset (bits 49-51) is not modelled: let tiles begin where the swizzle's "
           "pattern "
           "begins";
  }
  if (field(descriptor, 52, 1) != 0) return "an absolute leading offset (bit 52) is not modelled";
  const std::uint32_t swizzle = field(descriptor, 61, 3);
  if (swizzle == 1) return "a swizzle of 32-byte atoms is not modelled";
  if (swizzle % 2 != 0) return fmt::format("swizzle {} (bits 61-63) does not exist", swizzle);
  return "";
}

std::uint32_t element_bits(TensorElement element) {
  switch (element) {
    case TensorElement::f16:
    case TensorElement::bf16:
      return 16;
    case TensorElement::tf32:
      return 32;
    case TensorElement::e2m3:
    case TensorElement::e3m2:
      return 6;
    case TensorElement::e2m1:
      return 4;
    default:
      return 8;
  }
}

std::uint32_t elements_of_chunk(TensorElement element, bool is_packed) {
  if (is_packed) return 32;
  return element_bits(element) < 8 ? 16 : 128 / element_bits(element);
}

double decode(TensorElement element, std::uint32_t bits) {
  // Small floats without NaN and infinity, by the values of one more bit of exponent.
  const auto finite = [&](int exponent_bits, int mantissa_bits) {
    const std::uint32_t magnitude = bits & ((1U << (exponent_bits + mantissa_bits)) - 1);
    const std::uint32_t exponent = magnitude >> mantissa_bits;
    const std::uint32_t mantissa = magnitude & ((1U << mantissa_bits) - 1);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const double value = exponent == 0
                             ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                             : std::ldexp(mantissa + (1U << mantissa_bits),
                                          static_cast<int>(exponent) - bias - mantissa_bits);
    return (bits >> (exponent_bits + mantissa_bits) & 1U) != 0 ? -value : value;
  };
  switch (element) {
    case TensorElement::f16:
      return double{decode_f16(bits)};
    case TensorElement::bf16:
      return double{decode_bf16(bits)};
    case TensorElement::tf32:
      return double{decode_tf32(bits)};
    case TensorElement::e4m3:
      return double{decode(Format::e4m3, bits)};
    case TensorElement::e5m2:
      return double{decode(Format::e5m2, bits)};
    case TensorElement::e2m3:
      return finite(2, 3);
    case TensorElement::e3m2:
      return finite(3, 2);
    case TensorElement::e2m1:
      return finite(2, 1);
    case TensorElement::u8:
      return bits;
    case TensorElement::s8:
      return static_cast<std::int8_t>(bits);
  }
  return 0;
}

double element_at(TensorElement element, const std::byte* bytes, std::uint32_t i) {
  const std::uint32_t bits = element_bits(element), first = i * bits;
  std::uint32_t word = 0;
  std::memcpy(&word, bytes + first / 8, bits > 16 ? 4 : first % 8 + bits > 8 ? 2 : 1);
  return decode(element, word >> first % 8 & (bits == 32 ? ~0U : (1U << bits) - 1));
}

double decode_scale(std::uint32_t bits, bool is_ue8m0) {
  if (!is_ue8m0) return double{decode(Format::e4m3, bits)};
  return bits == 0xff ? NAN : std::ldexp(1.0, static_cast<int>(bits) - 127);
}

}  // namespace fovea::cuda::emulator
