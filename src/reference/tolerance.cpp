#include "reference/tolerance.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <vector>

#include "core/scalar_io.hpp"
#include "core/shape.hpp"
#include "expr/passes.hpp"
#include "expr/softcap.hpp"
#include "problem/input_codes.hpp"
#include "quant/groups.hpp"
#include "reference/head_rows.hpp"
#include "reference/plain_gradients.hpp"
#include "reference/quantized.hpp"
#include "reference/query_rows.hpp"

namespace fovea::reference {

namespace {

Tolerances quantized_tolerances(const AttentionForward& args, const ForwardResult& expected,
                                const Products& products);

constexpr double kFactor = 2;          // "at most twice the error of the plain formula"
constexpr double kRoundF32 = 0x1p-24;  // half a unit in the last place of 1

Dtype dtype_of(const Products& products) {
  return products.dtype == ComputeDtype::bf16 ? Dtype::bf16 : Dtype::f32;
}

/// Half a unit in the last place beyond the largest number: what is less rounds to a finite one.
double range_of(Dtype dtype) {
  return dtype == Dtype::f32 ? 0x1.ffffffp127 : dtype == Dtype::f16 ? 65520 : 0x1.ffp127;
}

/// What sums of `count` products may lose where denormal numbers count as 0: an operand and a sum of each, below
/// 2^-126.
double lost_denormals(const Products& products, double count) {
  return products.loses_denormals ? count * 0x1p-125 : 0;
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
/// is a matter of luck in few rows only, all of whose columns share it: in the norm it counts for 64 rows at most, so
/// that in a large result the plain formula alone decides.
///
/// Scores lie within ± the largest, lse at most the logarithm of their number above it, and out, an average of values
/// that dropout may have made larger, within ± the largest of these: nothing that is right is further off than the
/// width of that range.
Floor score_floor(const PlainResult& plain, std::size_t count) {
  const double absolute = 4 * kRoundF32 * (1 + plain.largest_score);
  const double width = 2 * plain.largest_score + std::log(static_cast<double>(plain.most_keys) + 1);
  return {absolute, absolute * std::sqrt(static_cast<double>(count)), absolute + width};
}

Floor out_floor(const PlainResult& plain, const Products& products) {
  const auto count = static_cast<double>(plain.out.size());
  const double weight = rounding(dtype_of(products), 1) * plain.largest_average;
  const double lost = lost_denormals(products, static_cast<double>(plain.most_keys));
  const double score = score_floor(plain, 1).absolute * plain.largest_average + lost;
  const double rows = std::max(1.0, static_cast<double>(plain.lse.size()));
  const double by_luck = count * std::min(1.0, 64 / rows);
  return {weight + score, weight * std::sqrt(by_luck) + score * std::sqrt(count),
          2 * plain.largest_value + lost};
}

/// From one code of a probability to the next, relative to it (int8: to the greatest of its tile).
double step_of_codes(QuantFormat format) {
  switch (format) {
    case QuantFormat::int8:
      return 1.0 / 255;
    case QuantFormat::e4m3:
      return 0x1p-3;
    case QuantFormat::e2m1:
      return 0x1p-1;
    default:
      return 0x1p-10;
  }
}

/// Keys whose codes change together: those of e2m1 that share a scale, where that is what a rounding decides.
double keys_of_a_lump(const Quantization& quant) {
  return quant.pv == QuantFormat::e2m1 ? static_cast<double>(quant::group_size(quant.v_scales)) : 1;
}

/// Codes of probabilities whose scores lie so near to the boundary of two codes that a rounding of the score decides:
/// the element of a row that meets one errs by a code of the heaviest key, of values up to `of_value`. So many rows may
/// as are to be expected (a score's error in steps of the codes that it may become), three times over, and one.
void add_lumps(const PlainResult& plain, const Quantization& quant, double of_value,
               Tolerance& result, double elements_of_row) {
  if (quant.pv == QuantFormat::none) return;
  const double step = step_of_codes(quant.pv);
  result.lump = keys_of_a_lump(quant) * step * plain.largest_weight * of_value;
  const double num_codes =
      static_cast<double>(plain.lse.size()) * static_cast<double>(plain.most_keys);
  const double num_rows = 1 + 3 * num_codes * 2 * score_floor(plain, 1).absolute / (step / 2);
  result.num_lumps = static_cast<std::int64_t>(std::ceil(num_rows) * elements_of_row);
}

/// What an output may err by for one reason: `relative` of the largest sum that it is relative to.
struct Reason {
  double relative = 0;
  const std::vector<double>& of;
  bool is_luck = false;  // of few elements: in the norm it counts for 64 of them at most
};

double largest_of(const std::vector<double>& values) {
  double largest = 0;
  for (const double each : values) {
    if (std::isfinite(each)) largest = std::max(largest, std::fabs(each));
  }
  return largest;
}

Floor floor_of(const std::vector<Reason>& reasons) {
  Floor floor;
  for (const Reason& reason : reasons) {
    const double largest = largest_of(reason.of);
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

/// At least as many as a gradient is a sum of, with the factor that the sum is taken by.
double num_terms(const AttentionForward& args) {
  const auto count = static_cast<double>(num_statistics(args)) +
                     static_cast<double>(args.k.size(args.k.rank() - 3));
  return count * std::max(1.0F, std::fabs(args.softmax_scale.value_or(1)));
}

/// A tensor that is not wanted is not compared.
Dtype dtype_of(const TensorView& view) { return view ? view.dtype() : Dtype::f32; }

/// Numbers in the shape of a tensor of a call, rounded to its dtype, or to bf16 where that is one of codes.
class Elements {
 public:
  Elements(const TensorView& like, const HeadRows& rows)
      : spec_(make_spec(default_out_dtype(like.dtype()), shape_of(like.spec()))),
        bytes_(rows.values().size() * size_bytes(spec_.dtype)) {
    for (std::size_t i = 0; i < rows.values().size(); ++i) {
      store_scalar(bytes_.data(), spec_.dtype, static_cast<std::int64_t>(i),
                   static_cast<float>(rows.values()[i]));
    }
  }
  TensorView view() const { return {static_cast<const void*>(bytes_.data()), spec_}; }

 private:
  TensorSpec spec_;
  std::vector<std::byte> bytes_;
};

/// q, k and v at the numbers that a recipe rounds them to, or that their codes stand for.
struct RoundedElements {
  explicit RoundedElements(const AttentionForward& args)
      : RoundedElements(args, rounded_operands(args)) {}
  void put_into(AttentionForward& args) const {
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
  }

  Elements q, k, v;

 private:
  RoundedElements(const AttentionForward& args, const RoundedOperands& rounded)
      : q(args.q, rounded.q), k(args.k, rounded.k), v(args.v, rounded.v) {}
};
/// Twice what this costs, where both are finite.
void allow_difference(const std::vector<double>& a, const std::vector<double>& b,
                      Tolerance& tolerance) {
  double largest = 0, squares = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double error = std::fabs(a[i] - b[i]);
    if (!std::isfinite(error)) continue;
    largest = std::max(largest, error);
    squares += error * error;
  }
  tolerance.absolute += kFactor * largest;
  tolerance.norm += kFactor * std::sqrt(squares);
}

/// Caps of a recipe whose probabilities have three bits may be of tanh.approx, which is right to 2^-11: what the recipe
/// itself then gives, by scores that are all as much too large, or each by another part of it.
void allow_approximate_cap(const AttentionForward& args, const ForwardResult& expected,
                           Tolerances& result) {
  constexpr double kError = 0x1p-11;
  const bool has_cap = expr::cap_of(expr::simplify(args.score.expr().shared())) != nullptr;
  // Who asks for the greatest score gets it in full.
  if (!has_cap || args.quant.row_sums != RowSums::codes || args.row_max) return;
  const Expr score = args.score.expr();
  for (const Expr& error : {Expr(kError), kError * sin(4096.0 * arguments().score)}) {
    AttentionForward call = args;
    call.score = ScoreMod(score + score * error);
    const ForwardResult approximate = reference::attention_forward(call);
    allow_difference(approximate.out, expected.out, result.out);
    allow_difference(approximate.lse, expected.lse, result.lse);
  }
}

/// What the arithmetic of the same problem without a recipe may err by, and codes that a rounding decides: what a
/// recipe costs is in the oracle's result.
Tolerances quantized_tolerances(const AttentionForward& args, const ForwardResult& expected,
                                const Products& products) {
  AttentionForward exact = args;
  exact.quant = {};
  exact.q_scale = exact.k_scale = exact.v_scale = {};
  std::optional<RoundedElements> numbers;
  if (are_codes(args.q.dtype())) numbers.emplace(args).put_into(exact);
  const PlainResult plain = plain_formula(exact, products);
  Tolerances result = tolerances(exact, reference::attention_forward(exact), products);
  const double rows = std::max(1.0, static_cast<double>(plain.lse.size()));
  const double width = static_cast<double>(plain.out.size()) / rows;
  add_lumps(plain, args.quant, 2 * plain.largest_value, result.out, width);
  if (args.quant.row_sums == RowSums::codes) add_lumps(plain, args.quant, 1, result.lse, 1);
  allow_approximate_cap(args, expected, result);
  return result;
}

AttentionBackward without_recipe(AttentionBackward args) {
  args.forward.quant = {};
  args.forward.q_scale = args.forward.k_scale = args.forward.v_scale = {};
  return args;
}

/// Gradients where rounded operands are rounded once more, to elements of the call.
BackwardResult backward_at_elements(const AttentionBackward& args) {
  const RoundedElements rounded(args.forward);
  AttentionBackward call = without_recipe(args);
  rounded.put_into(call.forward);
  return reference::attention_backward(call);
}

/// Rounded operands are as large as those of the call. Products of 16 bits take them as elements.
GradientTolerances quantized_tolerances(const AttentionBackward& args, const Products& products) {
  const AttentionBackward exact = without_recipe(args);
  GradientTolerances result = tolerances(exact, reference::attention_backward(exact), products);
  if (products.dtype != ComputeDtype::bf16 || args.forward.q.dtype() == Dtype::f32) return result;
  const BackwardResult rounded = reference::attention_backward(args);
  const BackwardResult once_more = backward_at_elements(args);
  allow_difference(rounded.dq, once_more.dq, result.dq);
  allow_difference(rounded.dk, once_more.dk, result.dk);
  allow_difference(rounded.dv, once_more.dv, result.dv);
  allow_difference(rounded.dsinks, once_more.dsinks, result.dsinks);
  for (auto& [name, tolerance] : result.dcaptured)
    allow_difference(rounded.dcaptured.at(name), once_more.dcaptured.at(name), tolerance);
  return result;
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
    if (!std::isfinite(expected[i])) continue;
    if (!std::isfinite(plain[i])) {
      ++result.num_beyond_f32;
      continue;
    }
    const double error = std::fabs(plain[i] - expected[i]);
    const double round = rounding(dtype, expected[i]);
    result.plain_absolute = std::max(result.plain_absolute, error);
    squares += error * error;
    rounding_squares += round * round;
  }
  result.plain_norm = std::sqrt(squares);
  const double count = std::sqrt(static_cast<double>(plain.size()));
  result.absolute = std::min(kFactor * result.plain_absolute + floor.absolute, floor.most);
  result.norm = std::min(kFactor * result.plain_norm + floor.norm, floor.most * count) +
                std::sqrt(rounding_squares);
  return result;
}

double Tolerance::allowed(double expected) const { return absolute + rounding(dtype, expected); }

bool Tolerance::allows(double got, double expected) const {
  if (got == expected || (std::isnan(got) && std::isnan(expected))) return true;
  if (!std::isfinite(expected) || std::isnan(got)) return false;
  if (std::isfinite(got)) return std::fabs(got - expected) <= allowed(expected);
  return std::signbit(got) == std::signbit(expected) &&
         std::fabs(expected) + absolute >= range_of(dtype);
}

Tolerances tolerances(const AttentionForward& args, const ForwardResult& expected,
                      const Products& products) {
  if (!args.quant.is_none()) return quantized_tolerances(args, expected, products);
  const PlainResult plain = plain_formula(args, products);
  const Floor statistic = score_floor(plain, plain.lse.size());
  return {.out = tolerance(plain.out, expected.out, args.out.dtype(), out_floor(plain, products)),
          .lse = tolerance(plain.lse, expected.lse, Dtype::f32, statistic),
          .row_max = tolerance(plain.row_max, expected.row_max, Dtype::f32, statistic)};
}

GradientTolerances tolerances(const AttentionBackward& args, const BackwardResult& expected,
                              const Products& products) {
  if (!args.forward.quant.is_none()) return quantized_tolerances(args, products);
  const PlainBackward plain = plain_backward(args, products);
  const double scores = error_of_scores(plain.largest_score);
  const double inputs = rounding(dtype_of(products), 1);
  const double out = rounding(args.forward.out.dtype(), 1);
  const auto allowed = [&](const TensorView& view, const auto& of) {
    Floor floor = floor_of({{scores, of(plain.by_scores)},
                            {inputs, of(plain.by_products), true},
                            {out, of(plain.by_out), true}});
    const double lost = lost_denormals(products, num_terms(args.forward));
    floor.absolute += lost;
    floor.norm += lost * std::sqrt(static_cast<double>(of(expected).size()));
    floor.most = 2 * std::max(largest_of(of(plain.by_scores)), largest_of(of(expected)));
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

JvpTolerances tolerances(const AttentionJvp& args, const JvpResult& expected,
                         const Products& products) {
  const PlainJvp plain = plain_jvp(args, products);
  const double scores = error_of_scores(plain.largest_score);
  const double inputs = rounding(dtype_of(products), 1);
  const double lost = lost_denormals(products, num_terms(args.forward));
  const auto floor = [&](const std::vector<double>& by_scores) {
    Floor result = floor_of({{scores, by_scores}, {inputs, by_scores, true}});
    result.absolute += lost;
    result.norm += lost * std::sqrt(static_cast<double>(by_scores.size()));
    return result;
  };
  return {.forward = tolerances(args.forward, expected.forward, products),
          .out_tangent = tolerance(plain.out_tangent, expected.out_tangent,
                                   dtype_of(args.out_tangent), floor(plain.out_by_scores)),
          .lse_tangent = tolerance(plain.lse_tangent, expected.lse_tangent, Dtype::f32,
                                   floor(plain.lse_by_scores))};
}

Comparison compare(const std::vector<double>& got, const std::vector<double>& expected,
                   const Tolerance& tolerance) {
  Comparison result;
  double worst_ratio = 0, squares = 0, expected_squares = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = std::fabs(got[i] - expected[i]);
    const bool is_finite = std::isfinite(got[i]) && std::isfinite(expected[i]);
    const double allowed = tolerance.allowed(expected[i]);
    double ratio = error / allowed;
    if (!is_finite) ratio = tolerance.allows(got[i], expected[i]) ? 0 : INFINITY;
    const bool is_lump = is_finite && error > allowed && error <= allowed + tolerance.lump;
    if (is_lump) ++result.num_lumps;
    if (is_finite) {
      squares += is_lump ? 0 : error * error;
      expected_squares += expected[i] * expected[i];
      if (error > result.largest_error) result.largest = i;
      result.largest_error = std::max(result.largest_error, error);
    }
    if (ratio > 1 && !is_lump) ++result.num_wrong;
    if (ratio > worst_ratio) {
      result.worst = i;
      worst_ratio = ratio;
    }
  }
  if (result.num_lumps > tolerance.num_lumps) result.num_wrong += result.num_lumps;
  result.norm = std::sqrt(squares);
  result.expected_norm = std::sqrt(expected_squares);
  return result;
}

}  // namespace fovea::reference
