#include "reference/head_rows.hpp"

#include <cmath>

#include "reference/element.hpp"

namespace fovea::reference {

HeadRows::HeadRows(const TensorView& view) : HeadRows(view.spec(), elements(view)) {}

HeadRows::HeadRows(const TensorSpec& spec, std::vector<double> values)
    : values_(std::move(values)) {
  const auto last = static_cast<std::size_t>(spec.rank) - 1;
  seqlen_ = spec.shape[last - 2];
  num_heads_ = spec.shape[last - 1];
  head_dim_ = spec.shape[last];
}

HeadRows HeadRows::zeros_like(const TensorSpec& spec) {
  return {spec, std::vector<double>(static_cast<std::size_t>(spec.num_elements()))};
}

std::size_t HeadRows::offset(const RowIndex& at) const {
  return static_cast<std::size_t>(((at.batch * seqlen_ + at.row) * num_heads_ + at.head) *
                                  head_dim_);
}

HeadRows rows_or_zeros(const TensorView& view, const TensorView& shape) {
  return view ? HeadRows(view) : HeadRows::zeros_like(shape.spec());
}

double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void add(std::span<double> sum, double factor, std::span<const double> row) {
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += factor * row[i];
}

void add_value(std::span<double> out, double weight, std::span<const double> value) {
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] += weight == 0 && !std::isfinite(value[i]) ? value[i] : weight * value[i];
}

}  // namespace fovea::reference
