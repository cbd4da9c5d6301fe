// Scores of a tile become codes of probabilities: the softmax of recipes that round p and v. What a code is,
// formats.hpp of src/quant says; what it is relative to, reference/quantized.hpp.
#pragma once

#include <cstdint>

#include "fovea/quant.hpp"

#include "cpu/kernels/panel.hpp"

namespace fovea::cpu {

/// What is known of the rows of a panel. All [lanes].
struct QuantizedRows {
  float* row_max = nullptr;  // as PanelState: in raw scores
  float* origin = nullptr;   // the reference: sums are relative to it
  float* row_sum = nullptr;
  float* kept_sum = nullptr;  // of what dropout keeps, scaled as it is
  float* rescale = nullptr;   // written: what sums so far are multiplied by
  float* weight =
      nullptr;  // written: what the tile's product of codes is multiplied by, before the scales of v
};

struct QuantizedTile {
  float* scores = nullptr;  // [num_keys][lanes]; -inf is hidden. Codes of what is kept are written
  std::int64_t num_keys = 0, lanes = 0, num_rows = 0;
  float unit = 1;  // of scores: what they are multiplied by
};

/// A row that sees NaN or +inf has row_sum NaN from then on.
void round_probabilities(const Quantization& quant, const QuantizedTile& tile,
                         const PanelDropout& dropout, const QuantizedRows& rows);

}  // namespace fovea::cpu
