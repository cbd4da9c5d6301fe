// The fields of a recipe as words: what parse, print and refusals have in common.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "fovea/quant.hpp"

namespace fovea::quant {

struct Field {
  std::string_view name;
  std::string (*print)(const Quantization& quant);
  /// False where the text is none of what the field takes.
  bool (*parse)(std::string_view text, Quantization& quant);
  std::string (*expected)();  // "int8, e4m3 or none"
};
std::span<const Field> fields();

std::string_view name(QuantFormat format);
std::string_view name(ScaleGranularity granularity);
std::string_view name(Smoothing smoothing);
std::string_view name(Accumulation accumulation);

}  // namespace fovea::quant
