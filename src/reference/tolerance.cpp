#include "reference/tolerance.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/plain_formula.hpp"
#include "reference/plain_gradients.hpp"

namespace fovea::reference {

namespace {

constexpr double kFactor = 2;          // "at most twice the error of the plain formula"
constexpr double kRoundF32 = 0x1p-24;  // half a unit in the last place of 1

Dtype dtype_of(ComputeDtype dtype) {
  return dtype == ComputeDtype::bf16 ? Dtype::bf16 : Dtype::f32;
}

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
  const double weight = rounding(dtype_of(compute_dtype), 1) * plain.largest_average;
  const double score = score_floor(plain, 1).absolute * plain.largest_average;
  return {weight + score, weight * std::sqrt(std::min(count, 64.0)) + score * std::sqrt(count)};
}

/// What an output may err by for one reason: `relative` of the largest sum that it is relative to.
struct Reason {
  double relative = 0;
  const std::vector<double>& of;
  bool is_luck = false;  // of few elements: in the norm it counts for 64 of them at most
};

Floor floor_of(const std::vector<Reason>& reasons) {
  Floor floor;
  for (const Reason& reason : reasons) {
    double largest = 0;
    for (const double each : reason.of) {
      if (std::isfinite(each)) largest = std::max(largest, std::fabs(each));
    }
    const auto count = static_cast<double>(reason.of.size());
    const double absolute = reason.relative * largest;
    floor.absolute += absolute;
    floor.norm += absolute * std::sqrt(reason.is_luck ? std::min(count, 64.0) : count);
  }
  return floor;
}

/// No fp32 evaluation knows a score s better than a few roundings of it, and so a probability;
/// programs and their slopes cost a few more.
double error_of_scores(double largest_score) { return 8 * kRoundF32 * (1 + largest_score); }

/// A tensor that is not wanted is not compared.
Dtype dtype_of(const TensorView& view) { return view ? view.dtype() : Dtype::f32; }

bool is_equal_non_finite(double got, double expected) {
  return got == expected || (std::isnan(got) && std::isnan(expected));
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

Tolerances tolerances(const AttentionForward& args, const ForwardResult& expected,
                      ComputeDtype compute_dtype) {
  const PlainResult plain = plain_formula(args, compute_dtype);
  const Floor statistic = score_floor(plain, plain.lse.size());
  return {
      .out = tolerance(plain.out, expected.out, args.out.dtype(), out_floor(plain, compute_dtype)),
      .lse = tolerance(plain.lse, expected.lse, Dtype::f32, statistic),
      .row_max = tolerance(plain.row_max, expected.row_max, Dtype::f32, statistic)};
}

GradientTolerances tolerances(const AttentionBackward& args, const BackwardResult& expected,
                              ComputeDtype compute_dtype) {
  const PlainBackward plain = plain_backward(args, compute_dtype);
  const double scores = error_of_scores(plain.largest_score);
  const double products = rounding(dtype_of(compute_dtype), 1);
  const double out = rounding(args.forward.out.dtype(), 1);
  const auto allowed = [&](const TensorView& view, const auto& of) {
    const Floor floor = floor_of({{scores, of(plain.by_scores)},
                                  {products, of(plain.by_products), true},
                                  {out, of(plain.by_out), true}});
    return tolerance(of(plain.values), of(expected), dtype_of(view), floor);
  };
  const auto member = [](std::vector<double> BackwardResult::*which) {
    return [which](const BackwardResult& of) -> const std::vector<double>& { return of.*which; };
  };
  GradientTolerances result{.dq = allowed(args.dq, member(&BackwardResult::dq)),
                            .dk = allowed(args.dk, member(&BackwardResult::dk)),
                            .dv = allowed(args.dv, member(&BackwardResult::dv)),
                            .dsinks = allowed(args.dsinks, member(&BackwardResult::dsinks)),
                            .dcaptured = {}};
  for (const CapturedTensor& each : args.dcaptured) {
    const auto captured = [&](const BackwardResult& of) -> const std::vector<double>& {
      return of.dcaptured.at(each.name);
    };
    result.dcaptured[each.name] = allowed(each.view, captured);
  }
  return result;
}

JvpTolerances tolerances(const AttentionJvp& args, const JvpResult& expected) {
  const PlainJvp plain = plain_jvp(args);
  const double scores = error_of_scores(plain.largest_score);
  return {
      .forward = tolerances(args.forward, expected.forward, ComputeDtype::f32),
      .out_tangent = tolerance(plain.out_tangent, expected.out_tangent, dtype_of(args.out_tangent),
                               floor_of({{scores, plain.out_by_scores}})),
      .lse_tangent = tolerance(plain.lse_tangent, expected.lse_tangent, Dtype::f32,
                               floor_of({{scores, plain.lse_by_scores}}))};
}

Comparison compare(const std::vector<double>& got, const std::vector<double>& expected,
                   const Tolerance& tolerance) {
  Comparison result;
  double worst_ratio = 0, largest_error = 0, squares = 0, expected_squares = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = std::fabs(got[i] - expected[i]);
    const bool is_finite = std::isfinite(got[i]) && std::isfinite(expected[i]);
    double ratio = error / tolerance.allowed(expected[i]);
    if (!is_finite) ratio = is_equal_non_finite(got[i], expected[i]) ? 0 : INFINITY;
    if (is_finite) {
      squares += error * error;
      expected_squares += expected[i] * expected[i];
      if (error > largest_error) result.largest = i;
      largest_error = std::max(largest_error, error);
    }
    if (ratio > 1) ++result.num_wrong;
    if (ratio > worst_ratio) {
      result.worst = i;
      worst_ratio = ratio;
    }
  }
  result.norm = std::sqrt(squares);
  result.expected_norm = std::sqrt(expected_squares);
  return result;
}

}  // namespace fovea::reference
