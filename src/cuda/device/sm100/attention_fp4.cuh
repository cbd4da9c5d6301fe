// Attention forward in four bits by tcgen05: Blackwell (sm_100a, sm_103a).
//
//   S = Q̂ K̂ᵀ + q̄_b (K - μ)ᵀ;  P = exp(mask(program(scale S)) - m);  O = Σ P̂ V̂ / l         Zhang et al. 2025
//                                                                               (SageAttention3, arXiv 2505.11594)
//
// The roles of sm100/attention_forward: a CTA stays on its SM, one thread issues all products, the four warps of each
// group of 128 rows do its softmax, a thread each row. Kernels before it (sm120/round_to_fp4.cuh) have left 128 rows of
// Q, K and V each as a record, which a bulk copy brings as tcgen05 reads it: codes for the products, and scales that
// tcgen05.cp copies to tensor memory just before them.
//
//   tensor cores | S0 |  S1 |     O0 S0' |    O1 S1' | ...     a quarter of the time, or less
//   group 0           |   P0, its scales  |     P0'
//   group 1                 |    P1, its scales   |    P1'
//
// Tensor memory, 512 columns at head_dim 128: S (128, of both groups), O0 O1 (128 each), P0 P1 (16 each, eight codes to
// a column), scales of Q, K, V and P of either group (8 each). Scores of the groups take turns in one place: a group is
// waiting for them when they come, and has them in registers before the other one's P is there. So nothing lies over P,
// and no order of execution is relied on that the ISA does not promise.
//
// Keys are walked from left to right, as the recipe has it: codes of P are relative to the greatest score so far.
//
// Bound: the softmax. Products of 128 x 128 x 128 take 128 clocks each of tensor cores, 256 a step, where 16-bit ones
// take 1024; ex2 takes 1024 on sm_100 and 512 on sm_103, instructions of a step some 900 issue slots of each
// scheduler. Nothing here has run on a GPU: docs/kernels/attention_fp4_sm100.md has what is expected, and what the
// emulator checks.
//
// Values that are not finite have code 0 and a mark on their key. A row tile that has met a mark is computed again in
// passes, as in the kernel of 16 bits, with indicators in V's place.
//
// Chapters, in fp4/: cta (what lies where), copies, products, softmax, output. Those of forward/ have the rest.
//
// Refused: caches, dropout, head dims above 128, other recipes than nvfp4 and mxfp4. Keys are not split among CTAs, nor
// do heads share a tile.
#pragma once

#include "sm100/forward/roles.cuh"
#include "sm100/fp4/copies.cuh"
#include "sm100/fp4/products.cuh"
#include "sm100/fp4/softmax.cuh"

namespace fovea::cuda::sm100 {

/// num_warps * 32 threads: as many CTAs as there are SMs, or fewer.
template <Sm100Fp4Spec spec, class Mods>
FOVEA_DEVICE void attention_fp4(const Sm100Fp4Params& p) {
  run_roles<spec, Mods, Fp4Products<spec>, Fp4Softmax<spec, Mods>>(p);
}

}  // namespace fovea::cuda::sm100
