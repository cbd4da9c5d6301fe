// Scores that are products of codes of 8 bits: what kernels of every architecture make of them. What codes are:
// shared/quantize_k.h.
//
// Sums of products come as floats kIntegerOrigin above an integer, and the fma that makes arguments of exp2 takes the
// origin off. That loses nothing: units have 21 bits, so their product with the origin is exact, and references of rows
// are whole octaves, so its sum with one is as well, as long as a unit is below an octave.
#pragma once

#include "common/float_constants.cuh"
#include "common/online_softmax.cuh"
#include "ptx/math.cuh"
#include "shared/element.h"

namespace fovea::cuda {

/// What makes codes logarithms to base 2: the scales of row and keys, to the nearest number of 21 bits. A negative
/// scale of keys says that one is not rounded. Rows or keys of zeros have scales so small that their product is 0, and
/// what they do not see, -inf · 0, would be NaN.
FOVEA_DEVICE float code_unit(float row_scale, float key_scale) {
  constexpr float kLeast = 0x1p-100F;  // beside which their scores are 0
  const float unit = ptx::max_ftz(row_scale * ptx::abs_ftz(key_scale), kLeast);
  return ptx::bit_cast<float>((ptx::bit_cast<std::uint32_t>(unit) + 4U) & ~7U);
}

/// Units from which on a row is far from 0, given the greatest scale of its head's keys: half of what is exact still. A
/// scale of 0 is that of a row which is not rounded.
inline constexpr float kFarUnit = 0.5F;
FOVEA_DEVICE bool is_far_row(float row_scale, float greatest_key_scale) {
  return row_scale * greatest_key_scale >= kFarUnit;
}

/// References of rows, in octaves, from which on what is taken off is rounded too coarsely: by 1/4 of an octave where P
/// is codes; elsewhere by 4, which elements of 16 bits bear.
template <bool sums_codes>
inline constexpr float kFarReference = sums_codes ? 0x1p22F : 0x1p26F;
template <bool sums_codes>
FOVEA_DEVICE bool is_far_reference(float reference) {
  // Those of rows with huge scores (common/online_softmax.cuh) are in another unit, and exact.
  constexpr float kLeastHuge = kHugeScore * kHugeUnit;
  const float size = ptx::abs_ftz(reference);
  return size >= kFarReference<sums_codes> && size < kLeastHuge;
}

/// What a sum of products of codes starts at, so that it is a float: products of e4m3 are floats as they stand.
constexpr float sum_origin(Codes codes) { return codes == Codes::int8 ? kIntegerOrigin : 0.0F; }

/// The nearest; -inf stays.
FOVEA_DEVICE float whole_octave(float x) { return ptx::add_rn(x, kIntegerOrigin) - kIntegerOrigin; }

/// move_origin of common/online_softmax.cuh, where scores are codes with this unit: origins are logarithms. `greatest`
/// is one too.
FOVEA_DEVICE OriginStep move_origin_of_codes(RowState& row, float greatest, float unit) {
  OriginStep step = move_origin<false>(row, whole_octave(greatest), 1.0F);
  step.c = unit;
  step.minus_origin_c = ptx::fma_rn(-kIntegerOrigin, unit, step.minus_origin_c);
  return step;
}

}  // namespace fovea::cuda
