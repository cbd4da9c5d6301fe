// NaN and infinity in values, which may reach the rows that see them and no others.
//
// In Q and K they need nothing: masked scores are replaced, so keys that a row does not see are harmless. In V they are
// not (0 * NaN), nor where a row sees them: its weight of them may have underflowed, or was dropped, but is not 0.
//
// Where one thread or warp goes through a row key by key, such a value is added as it is: sum_with_seen. That is how
// sm80/attention_forward_f32 sums, and how kernels that stream a cache compute a row again (common/careful_row.cuh).
//
// Tensor cores sum rows together, those that see a key and those that do not. There, rows whose sums were not finite
// are computed again in passes by the kernel's own loop: such elements are taken out of V, and then, once for each
// sign, indicators are multiplied: 1 where V holds one, 1 where a row sees the key. What is not 0 among those sums
// names the elements of O that infinity or NaN reaches. All rows of a tile cost three times the first pass so; key by
// key, by a warp each, they would cost far more.
//
// Either way the common path pays for looking at the sums.
#pragma once

#include "common/float_constants.cuh"
#include "ptx/base.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "shared/element.h"

namespace fovea::cuda {

/// `sum` with a value that the row sees.
FOVEA_DEVICE float sum_with_seen(float sum, float weight, float value) {
  const bool is_finite = value - value == 0;
  return is_finite ? ptx::fma_rn(weight, value, sum) : sum + value;
}

/// A sum of such, scaled: what infinity has reached stays so where the factor has underflowed.
FOVEA_DEVICE float scaled_sum(float sum, float factor) {
  const bool is_finite = sum - sum == 0;
  return is_finite || factor != 0 ? sum * factor : sum;
}

/// Of which values a row is computed: all; then, where sums were not finite, or below the range of floats, the finite
/// ones, and indicators of the others. `low`: the finite ones by a softmax whose largest power is 1, where sums left
/// the range of floats although values and scores did not.
enum class Pass : std::int32_t { low = -1, all, finite, positive, negative, end };

FOVEA_DEVICE bool is_indicator(Pass pass) { return pass > Pass::finite; }

/// 0, or NaN where one of the numbers is infinite or NaN: one multiply-add each.
template <int n>
FOVEA_DEVICE float zero_if_finite(const float (&x)[n]) {
  float zero = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) zero = ptx::fma_rn(x[i], 0.0F, zero);
  return zero;
}

/// What a pass of indicators adds to the elements that they name.
FOVEA_DEVICE float infinity_of(Pass pass) {
  return pass == Pass::positive ? infinity() : -infinity();
}

/// All ones of the exponent.
template <Element element>
inline constexpr std::uint32_t kInfinityBits = element == Element::bf16 ? 0x7f80U : 0x7c00U;

/// Is there a NaN or infinity among 8 elements? An exponent of ones and one more carries into the place of the sign.
template <Element element>
FOVEA_DEVICE bool has_nonfinite(const ptx::U32x4& chunk) {
  constexpr std::uint32_t kExponents = kInfinityBits<element> * 0x10001U;
  constexpr std::uint32_t kLastBits = (kInfinityBits<element> & -kInfinityBits<element>)*0x10001U;
  const auto carries = [](std::uint32_t pair) { return (pair & kExponents) + kLastBits; };
  const std::uint32_t all =
      carries(chunk.x) | carries(chunk.y) | carries(chunk.z) | carries(chunk.w);
  return (all & 0x80008000U) != 0;
}

/// One element's bits, as this pass wants it: finite, or one of indicators.
template <Element element>
FOVEA_DEVICE std::uint32_t value_of_pass(std::uint32_t bits, Pass pass) {
  constexpr std::uint32_t kInfinity = kInfinityBits<element>;
  constexpr std::uint32_t kOneBits = element == Element::bf16 ? 0x3f80U : 0x3c00U;
  const std::uint32_t magnitude = bits & 0x7fffU;
  if (pass == Pass::finite) return magnitude >= kInfinity ? 0 : bits;
  const bool is_negative = (bits & 0x8000U) != 0;
  const bool is_meant =
      magnitude > kInfinity || (magnitude == kInfinity && is_negative == (pass == Pass::negative));
  return is_meant ? kOneBits : 0;
}

/// Of a pair.
template <Element element>
FOVEA_DEVICE std::uint32_t values_of_pass(std::uint32_t pair, Pass pass) {
  return value_of_pass<element>(pair & 0xffffU, pass) | value_of_pass<element>(pair >> 16U, pass)
                                                            << 16U;
}

}  // namespace fovea::cuda
