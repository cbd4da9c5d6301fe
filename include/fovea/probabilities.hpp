// Probabilities of attention as a tensor, to look at and to test with: what attention_forward never writes out.
//
// Call path: this header -> src/plan/probabilities.cpp (check) -> src/cpu/attention_probabilities.cpp (the steps of
// forward, a panel of rows at a time).
#pragma once

#include "fovea/attention.hpp"

namespace fovea {

/// Everything that attention_probabilities takes.
struct AttentionProbabilities {
  /// The call whose probabilities are wanted. v, out, lse and row_max are not looked at, nor is what chooses kernels;
  /// its executor runs this call.
  AttentionForward forward{};
  FloatView probabilities{};  // written
};

/// exp(score - lse) of each query and key, by the plain formula: every program, mask, sink and packed layout that
/// attention_forward takes. A key that dropout drops has its sign bit set (-0 where it rounds to 0), so that
/// signbit(p) is the dropout mask, and out = Σ over keys kept of p / (1 - dropout.p) v.
///
/// probabilities [batch, num_heads_q, seqlen_q, seqlen_kv]  f32, f16, bf16; any strides; must not overlap an input
///
/// Packed sequences: [num_sequences, num_heads_q, rows, columns], at least the longest seqlen_q and seqlen_kv; 0 behind
/// a sequence's end. Hidden keys have exactly +0, whatever q and k hold there, and so has a row that sees none; with a
/// sink, rows sum up to less than 1.
///
/// Memory   seqlen_q · seqlen_kv of the caller's, and O(threads · seqlen_kv): for problems that are looked at.
/// Accuracy that of attention_forward in fp32, and one rounding: below 2^-99 of a row's largest they are 0. Rows that
///          see what is not finite are computed in fp64 but for scores and programs.
/// Bits     a row's depend on its own sequence alone.
/// Device   the cpu. Tensors on cuda are refused by name before anything is read or written.
/// Throws   InvalidArgument before anything is written; Unsupported for tensors that do not live on the cpu.
FOVEA_EXPORT void attention_probabilities(const AttentionProbabilities& args);
FOVEA_EXPORT void attention_probabilities(const AttentionProbabilities& args, Runtime& runtime);

}  // namespace fovea
