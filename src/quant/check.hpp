// What a recipe must satisfy.
#pragma once

#include <cstdint>
#include <string>

#include "fovea/quant.hpp"

namespace fovea::quant {

/// Empty, or the first thing wrong: "quant.pv is int8 with accumulation one_level; expected two_level, ...".
std::string obstacle(const Quantization& quant);

/// The same beside a problem's head_dim.
std::string obstacle(const Quantization& quant, std::int64_t head_dim_qk);

}  // namespace fovea::quant
