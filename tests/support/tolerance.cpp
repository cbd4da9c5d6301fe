#include "support/tolerance.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "support/plain_formula.hpp"

namespace fovea::testing {

namespace {

constexpr double kFactor = 2;  // "at most twice the error of the plain formula"
constexpr double kRoundF32 = 0x1p-24, kRoundBf16 = 0x1p-8;  // half a unit in the last place of 1

double smallest_rounding(Dtype dtype) {  // of denormals
  return dtype == Dtype::f32 ? 0x1p-150 : dtype == Dtype::f16 ? 0x1p-25 : 0x1p-134;
}

/// A floor for problems so small that the plain formula may be right by luck (one key, one lane, a
/// power of two).
///
/// No fp32 evaluation knows a score s better than a few roundings of s, whatever its order:
/// scaling, the step to base 2 and the subtraction of the maximum cost one each, a program's
/// function a few. So scores, lse and row_max get four roundings of 1 + max |s|, out gets as much
/// relative to Σ weight · |v|, and one rounding of each weight to the compute dtype. That last one
/// is a matter of luck in few elements only: in the norm it counts for 64 of them at most, so that
/// in a large result the plain formula alone decides.
Floor score_floor(const PlainResult& plain, std::size_t count) {
  const double absolute = 4 * kRoundF32 * (1 + plain.largest_score);
  return {absolute, absolute * std::sqrt(static_cast<double>(count))};
}

Floor out_floor(const PlainResult& plain, ComputeDtype compute_dtype) {
  const auto count = static_cast<double>(plain.out.size());
  const double weight =
      (compute_dtype == ComputeDtype::bf16 ? kRoundBf16 : kRoundF32) * plain.largest_average;
  const double score = score_floor(plain, 1).absolute * plain.largest_average;
  return {weight + score, weight * std::sqrt(std::min(count, 64.0)) + score * std::sqrt(count)};
}

}  // namespace

double rounding(Dtype dtype, double value) {
  if (value == 0 || !std::isfinite(value)) return smallest_rounding(dtype);
  const int significant_bits = dtype == Dtype::f32 ? 24 : dtype == Dtype::f16 ? 11 : 8;
  return std::max(std::ldexp(1.0, std::ilogb(value) - significant_bits), smallest_rounding(dtype));
}

Tolerance tolerance(const std::vector<double>& plain, const std::vector<double>& expected,
                    Dtype dtype, const Floor& floor) {
  Tolerance result{.dtype = dtype};
  double squares = 0;
  double rounding_squares = 0;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    if (!std::isfinite(plain[i]) || !std::isfinite(expected[i])) continue;
    const double error = std::fabs(plain[i] - expected[i]);
    const double round = rounding(dtype, expected[i]);
    result.plain_absolute = std::max(result.plain_absolute, error);
    squares += error * error;
    rounding_squares += round * round;
  }
  result.plain_norm = std::sqrt(squares);
  result.absolute = kFactor * result.plain_absolute + floor.absolute;
  result.norm = kFactor * result.plain_norm + std::sqrt(rounding_squares) + floor.norm;
  return result;
}

double Tolerance::allowed(double expected) const { return absolute + rounding(dtype, expected); }

Tolerances tolerances(const AttentionForward& args, const reference::ForwardResult& expected,
                      ComputeDtype compute_dtype) {
  const PlainResult plain = plain_formula(args, compute_dtype);
  const Floor statistic = score_floor(plain, plain.lse.size());
  return {
      .out = tolerance(plain.out, expected.out, args.out.dtype(), out_floor(plain, compute_dtype)),
      .lse = tolerance(plain.lse, expected.lse, Dtype::f32, statistic),
      .row_max = tolerance(plain.row_max, expected.row_max, Dtype::f32, statistic)};
}

}  // namespace fovea::testing
