// What tells tcgen05.mma of its operands (PTX ISA, TensorCore 5th Generation Family Instructions: instruction
// descriptor, shared memory descriptor).
//
// Instruction descriptor:
//   bits  4-5   type of d: 0 f16, 1 f32, 2 s32         with scales: which byte of its column b's scales begin at
//         7-9   type of a                                    23    0: scales are ue4m3, 1: ue8m0
//        10-12  type of b                                    27-28 m / 128
//        13,14  negate a, b                                  29-30 where a's scales begin
//        15,16  a, b are MN-major
//        17-22  n / 8
//        24-28  m / 16; m and n are those of both CTAs of a pair
//
// Shared memory descriptor: the fields of matrix_descriptor.cuh, and
//   bits 46-48  1: not wgmma's
//   bits 61-63  swizzle: 0 none, 2, 4, 6: 128, 64, 32 bytes; bits 62-63 say the same as wgmma's
#pragma once

#include "ptx/tcgen05.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda {

/// Types of a, b and d.
enum class TensorType : std::uint8_t {
  f16,
  bf16,
  tf32,
  e4m3,
  e5m2,
  e2m3,
  e3m2,
  e2m1,
  s8,
  u8,
  f32,
  s32,
};

FOVEA_DEVICE constexpr ptx::Tcgen05Kind tcgen05_kind(TensorType operand) {
  switch (operand) {
    case TensorType::f16:
    case TensorType::bf16:
      return ptx::Tcgen05Kind::f16;
    case TensorType::s8:
    case TensorType::u8:
      return ptx::Tcgen05Kind::i8;
    case TensorType::tf32:
      return ptx::Tcgen05Kind::tf32;
    default:
      return ptx::Tcgen05Kind::f8f6f4;
  }
}

/// What the fields for a and b hold, in every kind but mxf4 and mxf4nvf4.
FOVEA_DEVICE constexpr std::uint32_t operand_code(TensorType type) {
  switch (type) {
    case TensorType::bf16:
    case TensorType::e5m2:
    case TensorType::s8:
      return 1;
    case TensorType::tf32:
      return 2;
    case TensorType::e2m3:
      return 3;
    case TensorType::e3m2:
      return 4;
    case TensorType::e2m1:
      return 5;
    default:
      return 0;
  }
}

FOVEA_DEVICE constexpr std::uint32_t sum_code(TensorType type) {
  return type == TensorType::f16 ? 0 : type == TensorType::s32 ? 2 : 1;
}

/// d = a b: m rows, n columns, 32 bytes of depth. m and n are those of both CTAs of a pair.
struct TensorProduct {
  TensorType a = TensorType::bf16, b = TensorType::bf16, d = TensorType::f32;
  int m = 128, n = 128;
  ptx::Major a_major = ptx::Major::k, b_major = ptx::Major::k;
  bool negates_a = false, negates_b = false;
  int cta_group = 1;
};

/// Of one CTA 64 or 128 rows, and columns by 8; of a pair twice as many rows, and columns by 16. Integers: columns by
/// 16 above 32, of a pair by 32.
FOVEA_DEVICE constexpr bool is_tcgen05_shape(const TensorProduct& product) {
  const bool is_integer = tcgen05_kind(product.a) == ptx::Tcgen05Kind::i8;
  const int rows = product.m / product.cta_group;
  int step = 8 * product.cta_group;
  if (is_integer && (product.cta_group == 2 || product.n > 32)) step = 16 * product.cta_group;
  return (product.cta_group == 1 || product.cta_group == 2) &&
         rows * product.cta_group == product.m && (rows == 64 || rows == 128) &&
         product.n >= step && product.n <= 256 && product.n % step == 0 &&
         !(is_integer && product.n == 8 && product.cta_group == 2);
}

/// Operands of one kind, and a sum that it has.
FOVEA_DEVICE constexpr bool is_tcgen05_types(const TensorProduct& product) {
  const ptx::Tcgen05Kind kind = tcgen05_kind(product.a);
  if (kind != tcgen05_kind(product.b)) return false;
  if (kind == ptx::Tcgen05Kind::i8) return product.d == TensorType::s32;
  if (kind == ptx::Tcgen05Kind::f16 && product.a != product.b) return false;
  const bool may_sum_in_f16 = kind == ptx::Tcgen05Kind::f8f6f4 || product.a == TensorType::f16;
  return product.d == TensorType::f32 || (product.d == TensorType::f16 && may_sum_in_f16);
}

template <TensorProduct product>
FOVEA_DEVICE constexpr ptx::InstructionDescriptor instruction_descriptor() {
  static_assert(
      is_tcgen05_types(product),
      "a and b are both f16, both bf16, both tf32, both of 8-bit integers or both of floats "
      "of up to 8 bits; d is f32, of f16 and of small floats also f16, of integers s32");
  static_assert(
      is_tcgen05_shape(product),
      "m is 64 or 128, of a pair 128 or 256; n is a multiple of 8, of a pair of 16, up to 256, "
      "for integers above 32 twice that");
  static_assert(
      tcgen05_kind(product.a) != ptx::Tcgen05Kind::i8 || (!product.negates_a && !product.negates_b),
      "integers are not negated");
  const auto bit = [](bool is_set, int at) { return static_cast<std::uint32_t>(is_set) << at; };
  return {sum_code(product.d) << 4 | operand_code(product.a) << 7 | operand_code(product.b) << 10 |
          bit(product.negates_a, 13) | bit(product.negates_b, 14) |
          bit(product.a_major == ptx::Major::mn, 15) | bit(product.b_major == ptx::Major::mn, 16) |
          static_cast<std::uint32_t>(product.n / 8) << 17 |
          static_cast<std::uint32_t>(product.m / 16) << 24};
}

/// d = (a x scales of a)(b x scales of b), sums in f32. The first scales of a row, of one instruction, are byte
/// `a_scale_byte` of their column on; with two scales an instruction 0 or 2, with four 0.
struct ScaledTensorProduct {
  ptx::Tcgen05ScaledKind kind = ptx::Tcgen05ScaledKind::mxf4nvf4_block16;
  TensorType a = TensorType::e2m1, b = TensorType::e2m1;
  bool has_ue8m0_scales = false;
  int m = 128, n = 128;
  ptx::Major a_major = ptx::Major::k, b_major = ptx::Major::k;
  bool negates_a = false, negates_b = false;
  int a_scale_byte = 0, b_scale_byte = 0;
  int cta_group = 1;
};

/// Scales of a row that one instruction takes.
FOVEA_DEVICE constexpr int scales_per_step(ptx::Tcgen05ScaledKind kind) {
  if (kind == ptx::Tcgen05ScaledKind::mxf8f6f4_block32) return 1;
  return kind == ptx::Tcgen05ScaledKind::mxf4nvf4_block16 ? 4 : 2;
}

FOVEA_DEVICE constexpr bool is_scaled_type(const ScaledTensorProduct& product) {
  if (product.kind != ptx::Tcgen05ScaledKind::mxf8f6f4_block32)
    return product.a == TensorType::e2m1 && product.b == TensorType::e2m1;
  return tcgen05_kind(product.a) == ptx::Tcgen05Kind::f8f6f4 &&
         tcgen05_kind(product.b) == ptx::Tcgen05Kind::f8f6f4;
}

FOVEA_DEVICE constexpr bool is_scale_byte(ptx::Tcgen05ScaledKind kind, int byte) {
  return byte >= 0 && byte < 4 && byte % scales_per_step(kind) == 0;
}

template <ScaledTensorProduct product>
FOVEA_DEVICE constexpr ptx::ScaledInstructionDescriptor scaled_instruction_descriptor() {
  using ptx::Tcgen05ScaledKind;
  constexpr bool kIsFourBit = product.kind != Tcgen05ScaledKind::mxf8f6f4_block32;
  static_assert(is_scaled_type(product),
                "mxf4 and mxf4nvf4 multiply e2m1, mxf8f6f4 floats of up to 8 bits");
  static_assert(product.cta_group == 1 || product.cta_group == 2,
                "cta_group is 1, or 2 for a pair of CTAs");
  static_assert(product.m == 128 || (product.m == 256 && product.cta_group == 2),
                "m is 128, of a pair 128 or 256");
  static_assert(product.n >= 8 * product.cta_group && product.n <= 256 &&
                    product.n % (8 * product.cta_group) == 0,
                "n is a multiple of 8, of a pair of 16, up to 256");
  static_assert(
      !kIsFourBit || (product.a_major == ptx::Major::k && product.b_major == ptx::Major::k),
      "packed operands of 4 bits are K-major");
  static_assert(product.has_ue8m0_scales || product.kind == Tcgen05ScaledKind::mxf4nvf4_block16,
                "scales are ue8m0; for blocks of 16 also ue4m3");
  static_assert(is_scale_byte(product.kind, product.a_scale_byte) &&
                    is_scale_byte(product.kind, product.b_scale_byte),
                "scales begin at byte 0 to 3 of a column, two at 0 or 2, four at 0");
  const auto bit = [](bool is_set, int at) { return static_cast<std::uint32_t>(is_set) << at; };
  return {static_cast<std::uint32_t>(product.b_scale_byte) << 4 |
          (kIsFourBit ? 1 : operand_code(product.a)) << 7 |
          (kIsFourBit ? 1 : operand_code(product.b)) << 10 | bit(product.negates_a, 13) |
          bit(product.negates_b, 14) | bit(product.a_major == ptx::Major::mn, 15) |
          bit(product.b_major == ptx::Major::mn, 16) |
          static_cast<std::uint32_t>(product.n / 8) << 17 | bit(product.has_ue8m0_scales, 23) |
          static_cast<std::uint32_t>(product.m / 128) << 27 |
          static_cast<std::uint32_t>(product.a_scale_byte) << 29};
}

/// The operand that wgmma would find by `descriptor` (matrix_descriptor, k_major_descriptor, mn_major_descriptor).
FOVEA_DEVICE constexpr ptx::SmemDescriptor smem_descriptor(ptx::MatrixDescriptor descriptor) {
  return {descriptor | std::uint64_t{1} << 46};
}

/// 32 rows of 16 bytes, one below the other: scales, as tcgen05_cp takes them to all quarters of the lanes.
FOVEA_DEVICE constexpr ptx::SmemDescriptor scales_descriptor(ptx::SharedAddress address) {
  constexpr std::uint32_t kRowBytes = 16;
  return smem_descriptor(matrix_descriptor(address, kRowBytes, 8 * kRowBytes, Swizzle::none));
}

/// The operand `bytes` further on, a multiple of 16.
FOVEA_DEVICE constexpr ptx::SmemDescriptor advanced(ptx::SmemDescriptor descriptor, int bytes) {
  return {advanced(descriptor.bits, bytes)};
}

}  // namespace fovea::cuda
