// Attention forward with Q and K in 8 bits, by mma.sync: every tensor-core GPU from sm_80 up. On Hopper and Blackwell
// it is the fallback for recipes.
//
//   S = scale_i scale_g (Q̂ K̂ᵀ) + Q μ;  P = exp(mask(program(scale S)) - m);  O = Σ P V / l      shared/quantize_k.h
//
// It is sm80/attention_forward, whose essay says who waits for whom; all of that but the first product, what is beside
// its operands and the units of its scores (team/code_scores.cuh) is the same code. P and V stay in 16 bits; or, from
// compute capability 8.9 on, they are codes of e4m3, and their softmax and product are team/coded_sums.cuh.
//
// Bound: tensor cores. Q Kᵀ takes half of the clocks that it takes in 16 bits, so the products of a tile take three
// quarters, or half; half the bytes of K, and of V, are copied and read. Sums of codes are floats, and their scales go
// into the fma that makes arguments of exp2, or codes of P. docs/kernels/attention_quantized_sm80.md has figures.
//
// Refused: head dims above 128 (of values in 16 bits above 256), caches, recipes beyond those that
// docs/guides/quantization.md lists.
#pragma once

#include "ptx/griddepcontrol.cuh"
#include "shared/forward_params_sm80.h"
#include "shared/forward_spec.h"
#include "sm80/attention_forward.cuh"

namespace fovea::cuda::sm80 {

template <TeamSpec spec, class Mods>
FOVEA_DEVICE void attention_quantized(const Sm80QuantizedParams& p) {
  ptx::griddepcontrol_wait();  // for the codes
  const Work work = find_work<spec>(p.common);
  if (work.is_nothing) return;
  Forward<spec, Mods> forward(p.common, work);
  forward.sums.scores.codes.rounded = &p.rounded;
  forward.run();
}

}  // namespace fovea::cuda::sm80
