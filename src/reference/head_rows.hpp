// q, k, v and what is shaped like them as the oracle sees them: row-major fp64, dense and packed
// alike, a row of head_dim numbers at a time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/tensor.hpp"

namespace fovea::reference {

/// Where a row lies in [batch, seqlen, heads, head_dim], or with batch 0 in packed [total, heads,
/// head_dim].
struct RowIndex {
  std::int64_t batch = 0, row = 0, head = 0;
};

class HeadRows {
 public:
  /// The values of a tensor of any strides.
  explicit HeadRows(const TensorView& view);
  /// Zeros in the shape of such a tensor.
  static HeadRows zeros_like(const TensorSpec& spec);

  std::span<const double> operator[](const RowIndex& at) const {
    return std::span(values_).subspan(offset(at), static_cast<std::size_t>(head_dim_));
  }
  std::span<double> operator[](const RowIndex& at) {
    return std::span(values_).subspan(offset(at), static_cast<std::size_t>(head_dim_));
  }
  const std::vector<double>& values() const { return values_; }

 private:
  HeadRows(const TensorSpec& spec, std::vector<double> values);
  std::size_t offset(const RowIndex& at) const;

  std::int64_t seqlen_ = 0, num_heads_ = 0, head_dim_ = 0;
  std::vector<double> values_;
};

/// A tensor, or zeros in the shape of another where it is not given.
HeadRows rows_or_zeros(const TensorView& view, const TensorView& shape);

double dot(std::span<const double> a, std::span<const double> b);
/// sum += factor · row
void add(std::span<double> sum, double factor, std::span<const double> row);

/// out += weight · value. A value that is not finite reaches every row that sees it, whatever it weighs: a weight may
/// be 0 by rounding or by dropout.
void add_value(std::span<double> out, double weight, std::span<const double> value);

}  // namespace fovea::reference
