#include "support/numeric_gradient.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "reference/element.hpp"

namespace fovea::testing {

namespace {

constexpr double kGrid = 0x1p-10;

struct Element {
  GuardedTensor& tensor;
  std::int64_t offset = 0;
};

/// Central differences of two steps, extrapolated (Richardson): the error falls as the fourth power
/// of the step, about 1e-11 here, and rounding costs about 1e-13.
double derivative(const Element& x, const std::function<double()>& f) {
  const double value = reference::element(x.tensor.view(), x.offset);
  const auto difference = [&](double step) {
    x.tensor.set(x.offset, value + step);
    const double above = f();
    x.tensor.set(x.offset, value - step);
    const double below = f();
    x.tensor.set(x.offset, value);
    return (above - below) / (2 * step);
  };
  return (4 * difference(kGrid) - difference(2 * kGrid)) / 3;
}

}  // namespace

void round_to_grid(GuardedTensor& tensor) {
  if (!tensor.view()) return;
  for_each_offset(tensor.view().spec(), [&](std::int64_t offset) {
    const double value = reference::element(tensor.view(), offset);
    if (std::isfinite(value)) tensor.set(offset, std::round(value / kGrid) * kGrid);
  });
  tensor.seal();
}

void expect_is_gradient(const std::vector<double>& gradient, GuardedTensor& tensor,
                        const std::function<double()>& f, std::string_view name) {
  std::map<std::int64_t, double> by_offset;
  std::size_t next = 0;
  for_each_offset(tensor.view().spec(),
                  [&](std::int64_t offset) { by_offset[offset] += gradient.at(next++); });
  ASSERT_EQ(next, gradient.size()) << name;
  for (const auto& [offset, got] : by_offset) {
    const bool is_finite = std::isfinite(reference::element(tensor.view(), offset));
    const double expected = is_finite ? derivative({tensor, offset}, f) : 0;
    const double allowed = is_finite ? 1e-9 * (1 + std::fabs(expected)) : 0;
    EXPECT_NEAR(got, expected, allowed) << name << " at offset " << offset;
  }
}

}  // namespace fovea::testing
