#include "cpu/forward/non_finite.hpp"

#include <cmath>
#include <limits>

namespace fovea::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// A value as the products see it: bf16 rounds the largest fp32 numbers to infinity.
float as_multiplied(float value, Dtype product) {
  return product == Dtype::bf16 ? static_cast<float>(bfloat16(value)) : value;
}

}  // namespace

LaneSet non_finite_sums(const RowPanel& panel) {
  LaneSet found = 0;
  for (std::int64_t lane = 0; lane < panel.rows.num_rows(); ++lane) {
    if (!std::isfinite(panel.state.row_sum[lane])) found |= LaneSet{1} << lane;
  }
  return found;
}

LaneSet non_finite_rows(const RowPanel& panel, const ForwardCall& call) {
  LaneSet found = non_finite_sums(panel);
  const std::int64_t width = call.problem.head_dim_v;
  if (call.kernels.is_finite(panel.out, width, panel.num_vectors)) return found;
  for (std::int64_t d = 0; d < width; ++d) {
    for (std::int64_t lane = 0; lane < panel.rows.num_rows(); ++lane) {
      if (!std::isfinite(panel.out[d * call.spec.lanes + lane])) found |= LaneSet{1} << lane;
    }
  }
  return found;
}

void collect_non_finite(const TileStep& step, const TileSource& values, const ForwardCall& call,
                        const ForwardScratch& scratch) {
  const KeyRange range = step.seen.range;
  const std::int64_t lanes = call.spec.lanes;
  for (std::int64_t i = 0; i < range.count; ++i) {
    for (std::int64_t d = 0; d < call.problem.head_dim_v; ++d) {
      const float value =
          as_multiplied(element_of(values, range.begin + i, d), call.kernels.product);
      if (std::isfinite(value)) continue;
      for (std::int64_t lane = 0; lane < lanes; ++lane) {
        if (step.scores[i * lanes + lane] != -kInfinity) scratch.extra[d * lanes + lane] += value;
      }
    }
  }
}

}  // namespace fovea::cpu
