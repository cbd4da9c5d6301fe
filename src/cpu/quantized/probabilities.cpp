#include "cpu/quantized/probabilities.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/philox.hpp"
#include "quant/formats.hpp"

namespace fovea::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class TileRounding {
 public:
  TileRounding(const Quantization& quant, const QuantizedTile& tile, const PanelDropout& dropout,
               const QuantizedRows& rows)
      : quant_(quant),
        tile_(tile),
        dropout_(dropout),
        rows_(rows),
        octaves_(tile.unit * std::numbers::log2e_v<float>),
        log2_max_(std::log2(quant.p_max)),
        code_unit_(1 / (static_cast<double>(quant.p_max) *
                        (quant.p_codes == ProbabilityCodes::linear ? quant::kLinearMean : 1))) {}

  void round_row(std::int64_t lane) const {
    const float greatest = greatest_of(lane);
    if (!(greatest < kInfinity)) return spoil(lane, greatest);
    if (greatest == -kInfinity) return clear(lane);
    raise(lane, greatest);
    // int8: relative to the tile's own maximum.
    const bool is_of_tile = quant_.pv == QuantFormat::int8;
    const float origin = is_of_tile ? greatest : rows_.origin[lane];
    const float of_tile = is_of_tile ? std::exp2((greatest - rows_.origin[lane]) * octaves_) : 1;
    rows_.weight[lane] = static_cast<float>(code_unit_ * of_tile);
    double sum = 0;
    double kept = 0;
    for (std::int64_t key = 0; key < tile_.num_keys; ++key) {
      float& score = at(key, lane);
      const float exponent = (score - origin) * octaves_;
      const float code = code_of(exponent);
      const double counted = quant_.row_sums == RowSums::codes
                                 ? code * code_unit_
                                 : static_cast<double>(std::exp2(exponent));
      const float keep = keep_scale(key, lane);
      sum += counted;
      kept += keep * counted;
      score = code * keep;
    }
    rows_.row_sum[lane] += static_cast<float>(of_tile * sum);
    rows_.kept_sum[lane] += static_cast<float>(of_tile * kept);
  }

 private:
  float& at(std::int64_t key, std::int64_t lane) const {
    return tile_.scores[key * tile_.lanes + lane];
  }

  /// NaN wins over every number.
  float greatest_of(std::int64_t lane) const {
    float greatest = -kInfinity;
    for (std::int64_t key = 0; key < tile_.num_keys; ++key) {
      const float score = at(key, lane);
      if (std::isnan(score)) return score;
      greatest = std::max(greatest, score);
    }
    return greatest;
  }

  void spoil(std::int64_t lane, float greatest) const {
    if (std::isnan(greatest) || greatest > rows_.row_max[lane]) rows_.row_max[lane] = greatest;
    rows_.row_sum[lane] = std::numeric_limits<float>::quiet_NaN();
    clear(lane);
  }

  /// The tile adds nothing.
  void clear(std::int64_t lane) const {
    for (std::int64_t key = 0; key < tile_.num_keys; ++key) at(key, lane) = 0;
    rows_.rescale[lane] = 1;
    rows_.weight[lane] = 0;
  }

  /// The reference follows the maximum, at once or in steps.
  void raise(std::int64_t lane, float greatest) const {
    if (greatest > rows_.row_max[lane]) rows_.row_max[lane] = greatest;
    float& origin = rows_.origin[lane];
    rows_.rescale[lane] = 1;
    if (greatest <= origin) return;
    float raised = greatest;
    if (quant_.p_step > 0 && origin != -kInfinity) {
      const float step = quant_.p_step / octaves_;
      raised = origin + step * std::ceil((greatest - origin) / step);
    }
    const float factor = origin == -kInfinity ? 0 : std::exp2((origin - raised) * octaves_);
    origin = raised;
    rows_.rescale[lane] = factor;
    rows_.row_sum[lane] *= factor;
    rows_.kept_sum[lane] *= factor;
  }

  float code_of(float exponent) const {
    if (quant_.p_codes == ProbabilityCodes::linear) return quant::linear_code(exponent + log2_max_);
    const float p = quant_.p_max * std::exp2(exponent);
    if (quant_.pv == QuantFormat::int8) return std::nearbyint(p);
    return quant_.pv == QuantFormat::e4m3 ? quant::e4m3_code(p) : quant::f16_code(p);
  }

  float keep_scale(std::int64_t key, std::int64_t lane) const {
    if (dropout_.threshold == 0) return 1;
    const std::uint32_t word =
        philox::random_word({dropout_.key[0], dropout_.key[1]}, dropout_.batch,
                            dropout_.q_head[lane], dropout_.q_idx[lane], dropout_.kv_begin + key);
    return word >= dropout_.threshold ? dropout_.keep_scale : 0;
  }

  const Quantization& quant_;
  const QuantizedTile& tile_;
  const PanelDropout& dropout_;
  const QuantizedRows& rows_;
  const float octaves_;  // of a raw score
  const float log2_max_;
  const double code_unit_;  // a probability of 1 in codes, inverted
};

}  // namespace

void round_probabilities(const Quantization& quant, const QuantizedTile& tile,
                         const PanelDropout& dropout, const QuantizedRows& rows) {
  const TileRounding rounding(quant, tile, dropout, rows);
  for (std::int64_t lane = 0; lane < tile.num_rows; ++lane) rounding.round_row(lane);
}

}  // namespace fovea::cpu
