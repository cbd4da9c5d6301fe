#include "reference/partials.hpp"

#include <cmath>
#include <numbers>

#include "core/check.hpp"

namespace fovea::reference {

namespace {

using expr::Op;
using std::numbers::inv_sqrtpi;
using std::numbers::ln2;

/// b · a^(b - 1), and 0 rather than 0 · infinity for a constant.
double pow_by_base(double a, double b) { return b == 0 ? 0 : b * std::pow(a, b - 1); }

}  // namespace

Partials partials(const Application& f) {
  const double a = f.a;
  const double b = f.b;
  const double value = f.value;
  switch (f.op) {
    case Op::add:
      return {1, 1};
    case Op::sub:
      return {1, -1};
    case Op::mul:
      return {b, a};
    case Op::div:
      return {1 / b, -a / (b * b)};
    case Op::mod:
      return {1, -std::floor(a / b)};
    case Op::neg:
      return {.a = -1};
    case Op::min:
      return a <= b ? Partials{1, 0} : Partials{0, 1};
    case Op::max:
      return a >= b ? Partials{1, 0} : Partials{0, 1};
    case Op::abs:
      return {.a = a > 0 ? 1.0 : a < 0 ? -1.0 : 0.0};
    case Op::floor:
    case Op::floor_div:
    case Op::round:
    case Op::ceil:
    case Op::trunc:
      return {};
    case Op::fmod:
      return {1, -std::trunc(a / b)};
    case Op::sin:
      return {.a = std::cos(a)};
    case Op::cos:
      return {.a = -std::sin(a)};
    case Op::tan:
      return {.a = 1 / (std::cos(a) * std::cos(a))};
    case Op::erf:
      return {.a = 2 * std::exp(-a * a) * inv_sqrtpi};
    case Op::log1p:
      return {.a = 1 / (1 + a)};
    case Op::expm1:
      return {.a = std::exp(a)};
    case Op::exp:
      return {.a = value};
    case Op::exp2:
      return {.a = value * ln2};
    case Op::log:
      return {.a = 1 / a};
    case Op::log2:
      return {.a = 1 / (a * ln2)};
    case Op::tanh:
      return {.a = 1 - value * value};
    case Op::sqrt:
      return {.a = 0.5 / value};
    case Op::rsqrt:
      return {.a = -0.5 * value / a};
    case Op::sigmoid:
      return {.a = value * (1 - value)};
    case Op::pow:
      return {pow_by_base(a, b), a == 0 ? 0 : value * std::log(a)};
    default:
      throw InternalError("reference: no derivative of this operation");
  }
}

SecondPartials second_partials(const Application& f) {
  const double a = f.a;
  const double b = f.b;
  const double value = f.value;
  switch (f.op) {
    case Op::mul:
      return {.ab = 1};
    case Op::div:
      return {.ab = -1 / (b * b), .bb = 2 * a / (b * b * b)};
    case Op::exp:
      return {.aa = value};
    case Op::exp2:
      return {.aa = value * ln2 * ln2};
    case Op::log:
      return {.aa = -1 / (a * a)};
    case Op::log2:
      return {.aa = -1 / (a * a * ln2)};
    case Op::tanh:
      return {.aa = -2 * value * (1 - value * value)};
    case Op::sqrt:
      return {.aa = -0.25 / (value * a)};
    case Op::rsqrt:
      return {.aa = 0.75 * value / (a * a)};
    case Op::sigmoid:
      return {.aa = value * (1 - value) * (1 - 2 * value)};
    case Op::sin:
    case Op::cos:
      return {.aa = -value};
    case Op::tan:
      return {.aa = 2 * value * (1 + value * value)};
    case Op::erf:
      return {.aa = -4 * a * std::exp(-a * a) * inv_sqrtpi};
    case Op::log1p:
      return {.aa = -1 / ((1 + a) * (1 + a))};
    case Op::expm1:
      return {.aa = std::exp(a)};
    case Op::pow: {
      if (a == 0) return {.aa = b * pow_by_base(a, b - 1)};
      const double log = std::log(a);
      return {.aa = b * pow_by_base(a, b - 1),
              .ab = std::pow(a, b - 1) * (1 + b * log),
              .bb = value * log * log};
    }
    default:
      return {};  // linear, or flat between its kinks
  }
}

}  // namespace fovea::reference
