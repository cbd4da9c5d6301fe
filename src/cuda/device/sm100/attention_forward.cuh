// Attention forward by tcgen05 and TMA: Blackwell (sm_100a, sm_103a).
//
//   S = Q Kᵀ;  P = exp(mask(program(scale S)) - m);  O = Σ P V / l   Dao 2023 (FlashAttention-2), Dao et al. 2026 (-4)
//
// A CTA stays on its SM and works off tiles of 256 rows, two groups of 128, or of one group. Scores, probabilities and
// sums are in tensor memory; one thread issues all products; the four warps of each group do its softmax, a thread each
// row. While one group is in its softmax the other one's products run:
//
//   tensor cores | S0 S1 |      O0 S0' | O1 S1' | O0 S0" | O1 S1" | ...
//   group 0             |  P0   |       |  P0'   |        |  P0"
//   group 1                |   P1     |        |  P1'   |        |
//
// Powers of full tiles are relative to a reference that needs no maximum (common/optimistic_softmax.cuh), so that O has
// to be scaled hardly ever: groups do that themselves, and no warps stand by for it.
//
// Tensor memory, 512 columns: S0 S1 (128 each), O0 O1 (head_dim_v each), P0 P1 (64 each) where there is room for them
// beside, up to head_dim 64; else P lies over the scores it was made of, which by then are in registers.
//
// Bound: tensor cores, 8192 flops a clock and SM: 1024 clocks for the 128 x 128 scores and their sums at head_dim 128.
// ex2 takes as many on sm_100, which is why some keys have their powers from a polynomial there (forward/row.cuh), and
// half as many on sm_103. Nothing here has run on a GPU: docs/kernels/attention_forward_sm100.md has what is expected,
// and what the emulator checks.
//
// Who waits for whom: q_full, k_full, v_full (bytes of TMA), q_empty, k_empty, v_empty (products that read them are
// complete; K also: each computing warp has read what is posted beside it), s_full (scores are there, and all sums of
// tiles before), p_full (P is there, and scores and sums have been read), o_full (a row tile's sums are), sums_done (P
// has been multiplied, where scores wait for that); the others as on Hopper (sm90/attention_forward.cuh).
//
// The rest is Hopper's: which row tile comes next and which kv tiles it visits (sm90/forward/schedule.cuh), how they
// are loaded (load.cuh, copy_tma.cuh), row tiles with NaN or infinity among their values computed again in passes
// (redo.cuh), packed sequences, dropout.
//
// Chapters, in forward/: cta (what all roles know), multiply, softmax with row and scores, output, roles. The entry is
// here.
//
// One group alone where two have no room, above head_dim 128, or no rows: up to 128 queries; few rows, whose heads
// share the tile and whose keys are split among CTAs, with f32 partial states that common/combine joins. Products and
// softmax take turns then.
//
// Refused (forward/sm100.cpp has the words): f32 inputs, head dims above 256, codes, what TMA cannot read.
#pragma once

#include "sm100/forward/multiply.cuh"
#include "sm100/forward/roles.cuh"
#include "sm100/forward/softmax.cuh"

namespace fovea::cuda::sm100 {

/// num_warps * 32 threads: as many CTAs as there are SMs, or fewer.
template <Sm100ForwardSpec spec, class Mods>
FOVEA_DEVICE void attention_forward(const Sm90ForwardParams& p) {
  run_roles<spec, Mods, Products<spec>, Softmax<spec, Mods>>(p);
}

}  // namespace fovea::cuda::sm100
