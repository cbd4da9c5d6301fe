// Exact sums of floats by integers: one value whatever the order, so that atomics make no difference to the bits.
//
//   sum = Σ digits[i] 2^(24 i - 150)        signed, each of them a sum of numbers below 2^24
//
// A float has 24 bits and so touches two digits at most: two additions to memory. 2^39 of them fit into a digit, as
// many as all pairs of 16 heads of 185,000 queries and keys. What is not finite leaves a mark beside.
// Kulisch and Miranker 1986 call it a long accumulator.
#pragma once

#include "common/element.cuh"
#include "common/online_softmax.cuh"
#include "ptx/base.cuh"
#include "ptx/memory.cuh"
#include "shared/captured_params.h"

namespace fovea::cuda {

inline constexpr std::int32_t kDigitBits = 24;
inline constexpr std::uint64_t kDigitMask = (1U << kDigitBits) - 1;

/// Marks of ExactSum::not_finite.
inline constexpr std::uint32_t kAddedInfinity = 1, kAddedMinusInfinity = 2, kAddedNan = 4;

FOVEA_DEVICE void add_exactly(ExactSum* sum, float value) {
  constexpr std::uint32_t kMantissa = 0x7fffff, kGreatestExponent = 0xff;
  const auto bits = ptx::bit_cast<std::uint32_t>(value);
  const bool is_negative = bits >> 31U != 0;
  const std::uint32_t exponent = bits >> 23U & kGreatestExponent;
  if (exponent == kGreatestExponent) {
    const std::uint32_t infinite = is_negative ? kAddedMinusInfinity : kAddedInfinity;
    ptx::red_or_global(&sum->not_finite, (bits & kMantissa) != 0 ? kAddedNan : infinite);
    return;
  }
  // value = mantissa 2^(place - 150)
  const std::uint32_t place = exponent == 0 ? 1 : exponent;
  const std::uint64_t mantissa = (bits & kMantissa) | (exponent == 0 ? 0U : kMantissa + 1);
  const std::uint64_t shifted = mantissa << place % kDigitBits;
  const std::uint64_t halves[2] = {shifted & kDigitMask, shifted >> kDigitBits};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (halves[i] != 0)
      ptx::red_add_global(&sum->digits[place / kDigitBits + i],
                          is_negative ? 0 - halves[i] : halves[i]);
  }
}

/// The nearest two floats.
FOVEA_DEVICE void add_exactly(ExactSum* sum, double value) {
  const auto hi = static_cast<float>(value);
  add_exactly(sum, hi);
  const auto lo = static_cast<float>(value - static_cast<double>(hi));
  if (hi - hi == 0 && lo != 0) add_exactly(sum, lo);
}

FOVEA_DEVICE float value_of(const ExactSum* sum) {
  constexpr double kDigit = 0x1p24, kLowest = 0x1p-150;
  if (const std::uint32_t marks = ptx::ld_global(&sum->not_finite); marks != 0) {
    if (marks == kAddedInfinity) return infinity();
    return marks == kAddedMinusInfinity ? -infinity() : infinity() - infinity();
  }
  // Digits become what is below 2^24; what is carried out of the last one has the sum's sign.
  std::uint32_t digits[kExactDigits];
  std::int64_t carry = 0;
#pragma unroll
  for (int i = 0; i < kExactDigits; ++i) {
    const auto whole = static_cast<std::int64_t>(ptx::ld_global(&sum->digits[i])) + carry;
    digits[i] = static_cast<std::uint32_t>(static_cast<std::uint64_t>(whole) & kDigitMask);
    carry = whole >> kDigitBits;
  }
  // Of a negative sum the upper digits are those of -1: value stays -1 until the first of its own, exactly.
  auto value = static_cast<double>(carry);
#pragma unroll
  for (int i = kExactDigits - 1; i >= 0; --i) value = value * kDigit + digits[i];
  return static_cast<float>(value * kLowest);
}

// ---- kernels -------------------------------------------------------------------------------------

/// A thread for each sum, as below.
FOVEA_DEVICE void clear_sums(const SumsParams& p) {
  const std::int64_t idx =
      static_cast<std::int64_t>(ptx::block_idx().x) * kExactSumThreads + ptx::thread_idx().x;
  if (idx >= p.num_sums) return;
  ExactSum* const sum = p.sums + idx;
#pragma unroll
  for (int i = 0; i < kExactDigits; ++i) ptx::st_global(&sum->digits[i], std::uint64_t{0});
  ptx::st_global(&sum->not_finite, 0U);
}

/// Rounded into the gradients that are wanted, of any dtype and strides.
FOVEA_DEVICE void write_sums(const SumsParams& p) {
  const std::int64_t idx =
      static_cast<std::int64_t>(ptx::block_idx().x) * kExactSumThreads + ptx::thread_idx().x;
  if (idx >= p.num_sums) return;
  std::int32_t of = p.num_gradients - 1;
  while (idx < p.first_sum[of]) --of;
  const SummedGradient& gradient = p.gradients[of];
  std::int64_t rest = idx - p.first_sum[of], at = 0;
#pragma unroll 1
  for (std::int32_t dim = gradient.rank - 1; dim >= 0; --dim) {
    at += rest % gradient.shape[dim] * gradient.strides[dim];
    rest /= gradient.shape[dim];
  }
  store_element(gradient.data, gradient.element, at, value_of(p.sums + idx));
}

}  // namespace fovea::cuda
