// Which recipes the kernels of GPUs compute: `accurate` and `fast`, `sage1`, `sage2` and `fp8_static`, `nvfp4` and
// `mxfp4`, and what differs from them in fields that are parameters or of no effect. sm90_quantized.hpp,
// sm80_quantized.hpp and sm120_fp4.hpp are the kernels.
#pragma once

#include <optional>

#include "fovea/quant.hpp"

#include "cuda/device/shared/rounding.h"
#include "cuda/forward/candidates.hpp"

namespace fovea::cuda {

/// Are values codes too, and probabilities?
bool sums_codes(const Quantization& quant);

/// None, or one that such kernels do not compute, by the first field that tells.
std::optional<Refusal> refuses_recipe(const Quantization& quant);

/// Which of them, of a recipe that is not refused below.
Rounding rounding_of(const Quantization& quant);
/// The same of kernels that compute `sage1`, `sage2` and `fp8_static` too, and other groups of rows and keys.
std::optional<Refusal> refuses_recipe_of_team(const Quantization& quant);

/// Of such a recipe: which rows of q share a scale (shared/quantize_kv.h), how many keys do, what is taken from them.
struct RowGroups {
  std::int32_t span = 1, step = 1;
};
RowGroups groups_of_q(const Quantization& quant);
std::int32_t scale_tile_of(const Quantization& quant);
KeyMean key_mean_of(const Quantization& quant);

/// The same of kernels that compute `nvfp4` and `mxfp4`.
std::optional<Refusal> refuses_recipe_of_four_bits(const Quantization& quant);

/// For the refusals of a kernel that rounds no operand. Codes of the call are numbers of bf16 there.
ForwardProblem without_recipe(ForwardProblem problem);

}  // namespace fovea::cuda
