// The emulated twin of src/cuda/device/ptx/math.cuh. Approximations are rounded from exact ones; an operand that a
// wgmma in flight still owns is reported.
#pragma once

#include <cmath>

#include "cuda/emulator/formats.hpp"
#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

/// AMD's.
FOVEA_DEVICE std::uint32_t byte_perm(std::uint32_t lo, std::uint32_t hi, std::uint32_t selector) {
  const std::uint64_t both = std::uint64_t{hi} << 32U | lo;
  std::uint32_t result = 0;
  for (std::uint32_t i = 0; i < 32; i += 8)
    result |= static_cast<std::uint32_t>(both >> 8 * (selector >> i & 7U) & 0xffU) << i;
  return result;
}

FOVEA_DEVICE float ftz(float x) { return std::fabs(x) < 0x1p-126F ? std::copysign(0.0F, x) : x; }

FOVEA_DEVICE void check_operands(const char* name, Site site, float a, float b = 0.0F,
                                 float c = 0.0F) {
  const float operands[] = {a, b, c};
  emulator::check_registers(operands, sizeof operands, {name, site});
}

// ---- approximations ----------------------------------------------------------------------------

FOVEA_DEVICE float ex2_approx_ftz(float x, Site site = Site::here()) {
  check_operands("ex2.approx", site, x);
  return ftz(std::exp2(ftz(x)));
}

FOVEA_DEVICE float lg2_approx_ftz(float x, Site site = Site::here()) {
  check_operands("lg2.approx", site, x);
  return ftz(std::log2(ftz(x)));
}

FOVEA_DEVICE float rcp_approx_ftz(float x, Site site = Site::here()) {
  check_operands("rcp.approx", site, x);
  return ftz(1.0F / ftz(x));
}

FOVEA_DEVICE float tanh_approx(float x, Site site = Site::here()) {
  check_operands("tanh.approx", site, x);
  // As far off as the ISA allows: 11 significant bits.
  constexpr float kSpread = 0x1p+13F + 1;
  const float y = std::tanh(x);
  return y * kSpread - (y * kSpread - y);
}

// ---- rounded once ------------------------------------------------------------------------------

/// The one NaN that arithmetic gives.
inline float canonical(float x) { return x != x ? bit_cast<float>(0x7fffffffU) : x; }

FOVEA_DEVICE float fma_rn_ftz(float a, float b, float c, Site site = Site::here()) {
  check_operands("fma.rn.ftz", site, a, b, c);
  return canonical(ftz(std::fma(ftz(a), ftz(b), ftz(c))));
}

FOVEA_DEVICE float fma_rn(float a, float b, float c, Site site = Site::here()) {
  check_operands("fma.rn", site, a, b, c);
  return canonical(std::fma(a, b, c));
}

FOVEA_DEVICE float add_rn(float a, float b, Site site = Site::here()) {
  check_operands("add.rn", site, a, b);
  return a + b;
}

FOVEA_DEVICE float mul_rn(float a, float b, Site site = Site::here()) {
  check_operands("mul.rn", site, a, b);
  return a * b;
}

FOVEA_DEVICE float div_rn(float a, float b, Site site = Site::here()) {
  check_operands("div.rn", site, a, b);
  return a / b;
}

FOVEA_DEVICE float sqrt_rn(float x, Site site = Site::here()) {
  check_operands("sqrt.rn", site, x);
  return std::sqrt(x);
}

FOVEA_DEVICE float cvt_rni(float x, Site site = Site::here()) {
  check_operands("cvt.rni", site, x);
  return std::nearbyint(x);
}

/// NaN gives way, a signalling one too, which std::fmax makes quiet instead; +0 is above -0.
inline float greater_of(float a, float b) {
  if (a != a || b != b) return a != a ? b : a;
  return a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
}
inline float lesser_of(float a, float b) {
  return a != a || b != b ? greater_of(a, b) : -greater_of(-a, -b);
}

FOVEA_DEVICE float max_ftz(float a, float b, Site site = Site::here()) {
  check_operands("max.ftz", site, a, b);
  return greater_of(ftz(a), ftz(b));
}

FOVEA_DEVICE float min_ftz(float a, float b, Site site = Site::here()) {
  check_operands("min.ftz", site, a, b);
  return lesser_of(ftz(a), ftz(b));
}

FOVEA_DEVICE float abs(float x, Site site = Site::here()) {
  check_operands("abs", site, x);
  return std::fabs(x);
}

FOVEA_DEVICE float abs_ftz(float x, Site site = Site::here()) {
  check_operands("abs.ftz", site, x);
  return std::fabs(ftz(x));
}

FOVEA_DEVICE float max_nan(float a, float b, Site site = Site::here()) {
  check_operands("max.NaN", site, a, b);
  return a != a || b != b ? std::nanf("") : greater_of(a, b);
}

// ---- widths ------------------------------------------------------------------------------------

FOVEA_DEVICE std::uint32_t cvt_bf16x2(float lo, float hi, Site site = Site::here()) {
  check_operands("cvt.bf16x2", site, lo, hi);
  return emulator::encode_bf16(lo) | emulator::encode_bf16(hi) << 16;
}

FOVEA_DEVICE std::uint32_t cvt_f16x2(float lo, float hi, Site site = Site::here()) {
  check_operands("cvt.f16x2", site, lo, hi);
  return emulator::encode_f16(lo) | emulator::encode_f16(hi) << 16;
}

FOVEA_DEVICE float f32_of_bf16_lo(std::uint32_t pair) { return bit_cast<float>(pair << 16); }

FOVEA_DEVICE float f32_of_bf16_hi(std::uint32_t pair) {
  return bit_cast<float>(pair & 0xffff0000U);
}

FOVEA_DEVICE float f32_of_f16_lo(std::uint32_t pair) {
  return emulator::decode_f16(pair & 0xffffU);
}

FOVEA_DEVICE float f32_of_f16_hi(std::uint32_t pair) { return emulator::decode_f16(pair >> 16); }

FOVEA_DEVICE std::uint32_t cvt_e4m3x2(float lo, float hi, Site site = Site::here()) {
  emulator::require(89, {"cvt.e4m3x2", site});
  check_operands("cvt.e4m3x2", site, lo, hi);
  return emulator::encode_e4m3(lo) | emulator::encode_e4m3(hi) << 8;
}

FOVEA_DEVICE std::uint32_t f16x2_of_e4m3x2_lo(std::uint32_t codes, Site site = Site::here()) {
  emulator::require(89, {"cvt.f16x2.e4m3x2", site});
  const auto f16_of = [](std::uint32_t code) {
    return emulator::encode_f16(emulator::decode_small_float(code & 0xffU, 4, 3, false));
  };
  return f16_of(codes) | f16_of(codes >> 8) << 16;
}

FOVEA_DEVICE std::uint32_t f16x2_of_e4m3x2_hi(std::uint32_t codes, Site site = Site::here()) {
  return f16x2_of_e4m3x2_lo(codes >> 16, site);
}

/// Four integers from `least` to `greatest`, the first in bits 0..7.
FOVEA_DEVICE std::uint32_t bytes_of(const float (&numbers)[4], float least, float greatest) {
  std::uint32_t word = 0;
  for (int i = 3; i >= 0; --i) {
    const float x = numbers[i];
    const float code = x != x ? 0.0F : std::nearbyint(std::fmin(std::fmax(x, least), greatest));
    word = word << 8 | (static_cast<std::uint32_t>(static_cast<std::int32_t>(code)) & 0xffU);
  }
  return word;
}

FOVEA_DEVICE std::uint32_t cvt_u8x4(float a, float b, float c, float d, Site site = Site::here()) {
  check_operands("cvt.u8x4", site, a, b, c);
  check_operands("cvt.u8x4", site, d);
  return bytes_of({a, b, c, d}, 0.0F, 255.0F);
}

FOVEA_DEVICE std::uint32_t cvt_s8x4(float a, float b, float c, float d, Site site = Site::here()) {
  check_operands("cvt.s8x4", site, a, b, c);
  check_operands("cvt.s8x4", site, d);
  return bytes_of({a, b, c, d}, -128.0F, 127.0F);
}

FOVEA_DEVICE std::uint32_t cvt_rna_tf32(float x, Site site = Site::here()) {
  emulator::require(80, {"cvt.rna.tf32", site});
  check_operands("cvt.rna.tf32", site, x);
  const auto bits = bit_cast<std::uint32_t>(x);
  const bool is_finite = (bits & 0x7f800000U) != 0x7f800000U;
  return (is_finite ? bits + 0x1000U : bits) & 0xffffe000U;
}

/// Products of bf16 are exact in f32, and so are sums of theirs in f64.
FOVEA_DEVICE std::uint32_t fma_bf16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                      Site site = Site::here()) {
  emulator::require(80, {"fma.bf16x2", site});
  const auto lo = double{f32_of_bf16_lo(a)} * f32_of_bf16_lo(b) + f32_of_bf16_lo(c);
  const auto hi = double{f32_of_bf16_hi(a)} * f32_of_bf16_hi(b) + f32_of_bf16_hi(c);
  return emulator::encode_bf16(static_cast<float>(lo)) |
         emulator::encode_bf16(static_cast<float>(hi)) << 16;
}

FOVEA_DEVICE std::uint32_t and_or(std::uint32_t a, std::uint32_t mask, std::uint32_t bits) {
  return (a & mask) | bits;
}

FOVEA_DEVICE std::uint32_t prmt(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  const std::uint64_t bytes = std::uint64_t{b} << 32 | a;
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t which = selector >> (4 * i) & 7U;
    result |= static_cast<std::uint32_t>(bytes >> (8 * which) & 0xffU) << (8 * i);
  }
  return result;
}

FOVEA_DEVICE std::uint32_t mul_bf16x2(std::uint32_t a, std::uint32_t b, Site site = Site::here()) {
  emulator::require(80, {"fma.bf16x2", site});
  return emulator::encode_bf16(f32_of_bf16_lo(a) * f32_of_bf16_lo(b)) |
         emulator::encode_bf16(f32_of_bf16_hi(a) * f32_of_bf16_hi(b)) << 16;
}

FOVEA_DEVICE std::uint32_t add_f16x2(std::uint32_t a, std::uint32_t b) {
  return emulator::encode_f16(f32_of_f16_lo(a) + f32_of_f16_lo(b)) |
         emulator::encode_f16(f32_of_f16_hi(a) + f32_of_f16_hi(b)) << 16;
}

FOVEA_DEVICE std::uint32_t mul_f16x2(std::uint32_t a, std::uint32_t b) {
  return emulator::encode_f16(f32_of_f16_lo(a) * f32_of_f16_lo(b)) |
         emulator::encode_f16(f32_of_f16_hi(a) * f32_of_f16_hi(b)) << 16;
}

}  // namespace fovea::cuda::ptx
