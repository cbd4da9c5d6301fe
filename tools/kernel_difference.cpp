#include "kernel_difference.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "reference/tolerance.hpp"

namespace fovea::tools {
namespace {

/// Of f32, what counts are the orders of sums over thousands of keys.
constexpr double kRoundingsOfF32Sums = 64;
/// Two kernels, two roundings each.
constexpr double kRoundings = 4;

double unit_of(Dtype dtype) {
  return reference::rounding(dtype, 1) * (dtype == Dtype::f32 ? kRoundingsOfF32Sums : 1);
}

struct Allowed {
  double absolute = 0, relative = 0;  // of an element
  double relative_l2 = 0;             // of all
};

std::string why_differs(std::string_view name, const std::vector<double>& got,
                        const std::vector<double>& expected, const Allowed& allowed) {
  if (got.size() != expected.size()) return fmt::format("{} has another size", name);
  double error_squares = 0, squares = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool is_same = got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i]));
    if (is_same) {
      if (std::isfinite(got[i])) squares += expected[i] * expected[i];
      continue;
    }
    const double error = std::fabs(got[i] - expected[i]);
    const double most = std::isfinite(expected[i])
                            ? allowed.absolute + allowed.relative * std::fabs(expected[i])
                            : 0;
    if (!(error <= most)) {  // so written that NaN is beyond it
      return fmt::format("element {} of {} is {:.6g}; the table's kernel has {:.6g}", i, name,
                         got[i], expected[i]);
    }
    error_squares += error * error;
    squares += expected[i] * expected[i];
  }
  if (error_squares <= allowed.relative_l2 * allowed.relative_l2 * squares) return "";
  return fmt::format("{} differs from the table's kernel by {:.3g} in relative L2; expected {:.3g}",
                     name, std::sqrt(error_squares / squares), allowed.relative_l2);
}

}  // namespace

std::string why_differs(const KernelResults& got, const KernelResults& expected, Dtype dtype,
                        double largest_value) {
  const double unit = kRoundings * unit_of(dtype);
  std::string why =
      why_differs("out", got.out, expected.out,
                  {.absolute = unit * largest_value, .relative = unit, .relative_l2 = unit});
  if (!why.empty()) return why;
  return why_differs("lse", got.lse, expected.lse,
                     {.absolute = unit, .relative = unit, .relative_l2 = unit});
}

std::string why_gradients_differ(const std::vector<std::vector<double>>& got,
                                 const std::vector<std::vector<double>>& expected, Dtype dtype) {
  constexpr std::array kNames{"dq", "dk", "dv", "dsinks"};
  const double unit = kRoundings * unit_of(dtype);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    double largest = 0;
    for (const double value : expected[i]) {
      if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
    }
    std::string why =
        why_differs(kNames.at(i), got[i], expected[i],
                    {.absolute = unit * largest, .relative = unit, .relative_l2 = unit});
    if (!why.empty()) return why;
  }
  return "";
}

}  // namespace fovea::tools
