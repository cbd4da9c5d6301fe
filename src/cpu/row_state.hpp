// What is known of a row after some of its keys: head_dim_v sums, its maximum in natural units, and the sum of its
// probabilities relative to that maximum. States of splits are merged in order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace fovea::cpu {

constexpr std::int64_t state_floats(std::int64_t head_dim_v) { return head_dim_v + 2; }
/// Floats from one state to the next where several are made at once.
constexpr std::int64_t state_pitch(std::int64_t head_dim_v) {
  return (state_floats(head_dim_v) + 15) / 16 * 16;
}

/// What the softmax knows of a row, in units of raw scores.
struct SoftmaxOfRow {
  float row_max = 0, origin = 0, row_sum = 0;
};

/// Completes a state whose sums are relative to the softmax's origin.
inline void settle(const SoftmaxOfRow& row, float unit, std::int64_t head_dim_v, float* state) {
  state[head_dim_v] = row.row_max * unit;
  state[head_dim_v + 1] = row.row_sum;
  if (row.origin != row.row_max) {
    const float factor = std::exp((row.origin - row.row_max) * unit);
    for (std::int64_t d = 0; d < head_dim_v; ++d) state[d] *= factor;
    state[head_dim_v + 1] *= factor;
  }
  // Vector maxima pass over NaN; the sum does not. Here a NaN in sight becomes the row's maximum.
  const bool has_nan = std::isnan(state[head_dim_v + 1]);
  if (has_nan && state[head_dim_v] != std::numeric_limits<float>::infinity())
    state[head_dim_v] = state[head_dim_v + 1];
}

/// NaN wins over every number.
inline double largest_of(double row_max, double sink) {
  return std::isnan(sink) ? sink : std::max(row_max, sink);
}

/// exp(sink - top), where an infinite sink is its own top.
inline double sink_share(double sink, double top) {
  if (sink == -std::numeric_limits<double>::infinity()) return 0;
  return sink == top ? 1 : std::exp(sink - top);
}

/// weight · value, and what is not finite where the weight has rounded to 0: a value reaches its row whatever it
/// weighs.
inline float weighed(float weight, float value) {
  return weight == 0 && !std::isfinite(value) ? value : weight * value;
}

/// into = into + from, both relative to their own maxima.
inline void merge_state(float* into, const float* from, std::int64_t head_dim_v) {
  const auto width = static_cast<std::size_t>(head_dim_v);
  const float into_max = into[width];
  const float from_max = from[width];
  const float row_max = std::isnan(from_max) ? from_max : std::max(into_max, from_max);
  if (row_max == -std::numeric_limits<float>::infinity()) return;
  const float into_weight = std::exp(into_max - row_max);
  const float from_weight = std::exp(from_max - row_max);
  if (into_weight == 0 || from_weight == 0) {
    for (std::size_t d = 0; d < width; ++d)
      into[d] = weighed(into_weight, into[d]) + weighed(from_weight, from[d]);
  } else {
    for (std::size_t d = 0; d < width; ++d) into[d] = into[d] * into_weight + from[d] * from_weight;
  }
  into[width] = row_max;
  into[width + 1] = into[width + 1] * into_weight + from[width + 1] * from_weight;
}

}  // namespace fovea::cpu
