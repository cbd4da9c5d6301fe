// Which recipes the kernels of GPUs compute: `accurate` and `fast`, and what differs from them in fields of no effect.
// sm90_quantized.hpp and sm80_quantized.hpp are the kernels.
#pragma once

#include <cstdint>
#include <optional>

#include "fovea/quant.hpp"

#include "cuda/forward/candidates.hpp"

namespace fovea::cuda {

/// What a kernel can have P and V rounded to.
enum class PvFormats : std::uint8_t { none, none_or_e4m3 };

/// Are values codes too, and probabilities?
bool sums_codes(const Quantization& quant);

/// None, or one that such a kernel does not compute, by the first field that tells.
std::optional<Refusal> refuses_recipe(const Quantization& quant, PvFormats formats);

/// For the refusals of a kernel that rounds no operand.
ForwardProblem without_recipe(ForwardProblem problem);

}  // namespace fovea::cuda
