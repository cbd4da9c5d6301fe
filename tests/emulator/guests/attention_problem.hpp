// Inputs of the guests and what they should give: softmax(scale q kᵀ) v in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "cuda/emulator/formats.hpp"

namespace fovea::cuda::emulator {

struct AttentionProblem {
  int rows, keys, head_dim;
  std::vector<std::uint16_t> q, k, v;

  AttentionProblem(int num_rows, int num_keys, int dim)
      : rows(num_rows), keys(num_keys), head_dim(dim) {
    std::mt19937 random(17);
    // Scores of a few units, so that maxima move from tile to tile.
    std::normal_distribution<float> normal(0, 1.5F);
    const auto draw = [&](std::vector<std::uint16_t>& to, int count) {
      for (int i = 0; i < count; ++i) {
        to.push_back(static_cast<std::uint16_t>(encode_bf16(normal(random))));
      }
    };
    draw(q, rows * head_dim);
    draw(k, keys * head_dim);
    draw(v, keys * head_dim);
  }

  float scale_log2() const {
    return static_cast<float>(std::log2(std::exp(1.0)) / std::sqrt(head_dim));
  }

  const std::vector<double>& out() const {
    if (out_.empty()) compute(out_);
    return out_;
  }

  /// Greatest error of `got`; NaN counts as infinite.
  double error(const float* got) const {
    const std::vector<double>& expected = out();
    double worst = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double difference = std::fabs(double{got[i]} - expected[i]);
      worst = std::isnan(difference) ? INFINITY : std::max(worst, difference);
    }
    return worst;
  }

 private:
  void compute(std::vector<double>& result) const {
    for (int row = 0; row < rows; ++row) {
      std::vector<double> p(static_cast<std::size_t>(keys));
      double sum = 0;
      for (int key = 0; key < keys; ++key) {
        double s = 0;
        for (int i = 0; i < head_dim; ++i) s += at(q, row, i) * at(k, key, i);
        sum += p[static_cast<std::size_t>(key)] = std::exp2(s * double{scale_log2()});
      }
      for (int i = 0; i < head_dim; ++i) {
        double o = 0;
        for (int key = 0; key < keys; ++key) o += p[static_cast<std::size_t>(key)] * at(v, key, i);
        result.push_back(o / sum);
      }
    }
  }

  double at(const std::vector<std::uint16_t>& matrix, int row, int column) const {
    return decode_bf16(matrix[static_cast<std::size_t>(row * head_dim + column)]);
  }

  mutable std::vector<double> out_;
};

/// P is rounded to bf16 (2^-9 of itself, weights sum to 1, values below 8 in this draw): 2^-6; a mistake costs 0.1 and
/// more.
inline constexpr double kAllowedError = 0.016;

}  // namespace fovea::cuda::emulator
