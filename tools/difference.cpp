#include "difference.hpp"

#include <algorithm>
#include <cmath>

namespace fovea::tools {
namespace {

constexpr double kFactor = 2;  // at most twice the error of the plain formula
// Half a unit in the last place of 1: 24, 11 and 8 bits of precision.
constexpr double kRoundF32 = 0x1p-24, kRoundF16 = 0x1p-11, kRoundBf16 = 0x1p-8;

bool is_equal_when_not_finite(double got, double expected) {
  return got == expected || (std::isnan(got) && std::isnan(expected));
}

}  // namespace

double rounding(Dtype dtype, double value) {
  const double relative = dtype == Dtype::f32   ? kRoundF32
                          : dtype == Dtype::f16 ? kRoundF16
                                                : kRoundBf16;
  return std::max(relative * std::fabs(value), dtype == Dtype::f16 ? 0x1p-25 : 0x1p-150);
}

Dtype dtype_of_products(ComputeDtype dtype) {
  return dtype == ComputeDtype::bf16 ? Dtype::bf16 : Dtype::f32;
}

float rounded(float value, ComputeDtype dtype) {
  return dtype == ComputeDtype::bf16 ? static_cast<float>(bfloat16(value)) : value;
}

double floor_of_scores(double largest_score) { return 4 * kRoundF32 * (1 + largest_score); }

Difference compare(const Values& values, Dtype dtype, double floor) {
  double plain_max = 0, plain_squares = 0, rounding_squares = 0, error_squares = 0, squares = 0,
         count = 0;
  Difference result;
  for (std::size_t i = 0; i < values.expected.size(); ++i) {
    const double expected = values.expected[i];
    if (!std::isfinite(expected) || !std::isfinite(values.plain[i])) continue;
    const double error = std::fabs(values.plain[i] - expected);
    plain_max = std::max(plain_max, error);
    plain_squares += error * error;
    rounding_squares += rounding(dtype, expected) * rounding(dtype, expected);
    squares += expected * expected;
    ++count;
  }
  for (std::size_t i = 0; i < values.expected.size(); ++i) {
    const double expected = values.expected[i], got = values.got[i];
    if (!std::isfinite(expected) || !std::isfinite(got)) {
      // A finite number that the output's dtype cannot hold becomes infinite; the plain formula tells.
      result.num_wrong +=
          !is_equal_when_not_finite(got, expected) && std::isfinite(values.plain[i]) ? 1 : 0;
      continue;
    }
    const double error = std::fabs(got - expected);
    const double allowed = kFactor * plain_max + floor + rounding(dtype, expected);
    error_squares += error * error;
    result.num_wrong += error > allowed ? 1 : 0;
    if (error >= result.max_error) {
      result.max_error = error;
      result.allowed = allowed;
    }
  }
  const double norm = squares > 0 ? std::sqrt(squares) : 1;
  result.relative_l2 = std::sqrt(error_squares) / norm;
  result.allowed_relative_l2 = (kFactor * std::sqrt(plain_squares) + std::sqrt(rounding_squares) +
                                floor * std::sqrt(count)) /
                               norm;
  return result;
}

}  // namespace fovea::tools
