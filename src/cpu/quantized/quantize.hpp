// The public quantisers: the operands of attention_quantized, one at a time, in the layouts of fovea/quantize.hpp.
#pragma once

#include "fovea/quantize.hpp"

namespace fovea::cpu {

/// Arguments have been validated.
void quantize_q(const QuantizeQ& args, Executor& executor);
void quantize_k(const QuantizeK& args, Executor& executor);
void quantize_v(const QuantizeV& args, Executor& executor);

}  // namespace fovea::cpu
