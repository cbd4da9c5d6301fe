// The formula as a person would code it in the kernels' dtypes: fp32 sums in plain order, no tiles,
// no rescaling. Its error to the oracle is the yardstick of tolerance.hpp; it is never what a
// result is compared with.
#pragma once

#include <cstdint>
#include <vector>

#include "fovea/attention.hpp"

namespace fovea::reference {

/// What a kernel multiplies in.
struct Products {
  ComputeDtype dtype = ComputeDtype::f32;
  /// Instructions of bf16 products take denormal numbers for 0 (docs/design/contract.md), also where f32 products are
  /// sums of bf16 parts.
  bool loses_denormals = false;

  Products(ComputeDtype of, bool is_by_bf16_parts = false)
      : dtype(of), loses_denormals(of == ComputeDtype::bf16 || is_by_bf16_parts) {}
};

/// A number as an operand of such products.
float as_operand(float value, const Products& products);

/// exp(exponent) of a key beside its row's greatest score or lse: 0 where kernels may take it for 0
/// (docs/design/contract.md).
float key_weight(float exponent);

/// Layouts of ForwardResult. Inputs of the products, and the weights between them, are of their dtype.
struct PlainResult {
  std::vector<double> out, lse, row_max;
  double largest_score = 0;  // max |final score| over visible keys and sinks
  // max over out of Σ weight · |v| : what a relative error of the weights is relative to
  double largest_average = 0;
  double largest_weight = 0;   // of a visible key, dropped or not
  double largest_value = 0;    // max |v| of a visible key, as what is kept by dropout counts it
  std::int64_t most_keys = 0;  // that a row sees
};

PlainResult plain_formula(const AttentionForward& args, const Products& products);

}  // namespace fovea::reference
