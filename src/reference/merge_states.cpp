#include "reference/merge_states.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/element.hpp"
#include "reference/head_rows.hpp"

namespace fovea::reference {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// A NaN wins over every number.
double largest_of(const std::vector<double>& values) {
  double largest = -kInfinity;
  for (const double value : values) {
    if (value > largest || std::isnan(value)) largest = value;
  }
  return largest;
}

/// exp(value - largest); a state of the largest lse weighs 1, infinite or not.
double relative(double value, double largest) {
  return value == largest ? 1 : std::exp(value - largest);
}

/// log Σ exp(value), with the largest exponent taken out.
double log_sum_exp(const std::vector<double>& values) {
  const double largest = largest_of(values);
  if (largest == -kInfinity) return -kInfinity;
  double sum = 0;
  for (const double value : values) sum += relative(value, largest);
  return largest + std::log(sum);
}

/// exp(value - lse) of each, by the same exponents: infinite ones share the weight.
std::vector<double> weights_of(const std::vector<double>& values) {
  const double largest = largest_of(values);
  std::vector<double> weights;
  double sum = 0;
  for (const double value : values) {
    weights.push_back(relative(value, largest));
    sum += weights.back();
  }
  for (double& weight : weights) weight /= sum;
  return weights;
}

}  // namespace

MergedState merge_states(const MergeStates& args) {
  const TensorSpec& spec = args.out.spec();
  const auto dims = static_cast<std::size_t>(spec.rank);
  const std::int64_t batch = dims == 4 ? spec.shape[0] : 1;
  const std::int64_t seqlen = spec.shape[dims - 3];
  const std::int64_t heads = spec.shape[dims - 2];
  std::vector<HeadRows> outs(args.outs.begin(), args.outs.end());
  std::vector<std::vector<double>> lses;
  for (const TensorView& lse : args.lses) lses.push_back(elements(lse));

  HeadRows out = HeadRows::zeros_like(spec);
  MergedState result;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t head = 0; head < heads; ++head) {
      for (std::int64_t row = 0; row < seqlen; ++row) {
        std::vector<double> of_row;
        of_row.reserve(lses.size());
        for (const std::vector<double>& lse : lses) of_row.push_back(lse[result.lse.size()]);
        const std::vector<double> weights = weights_of(of_row);
        for (std::size_t i = 0; i < outs.size(); ++i) {
          if (of_row[i] == -kInfinity) continue;  // saw no key: its out may be anything
          add_value(out[{b, row, head}], weights[i], outs[i][{b, row, head}]);
        }
        result.lse.push_back(log_sum_exp(of_row));
      }
    }
  }
  result.out = out.values();
  return result;
}

}  // namespace fovea::reference
