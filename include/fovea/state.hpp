// The algebra of partial results: attention over a part of the keys is (out, lse), and such states merge.
//
// Call path: this header -> src/plan/merge_states.cpp (check) -> src/cpu/merge_states.cpp (a row at a time).
#pragma once

#include <vector>

#include "fovea/runtime.hpp"
#include "fovea/tensor.hpp"

namespace fovea {

/// Everything that merge_states takes. See merge_states for shapes.
struct MergeStates {
  std::vector<TensorView> outs{};  // one of each state, in the order of the sum
  std::vector<TensorView> lses{};
  TensorView out{};              // written; may be outs[0]
  TensorView lse{};              // written, optional; may be lses[0]
  Executor* executor = nullptr;  // default: the runtime's pool
};

/// out = Σ_i exp(lse_i - lse) out_i, lse = log Σ_i exp(lse_i), summed in the order given.
///
/// outs[i] [batch, seqlen_q, num_heads_q, head_dim_v], or packed [total_q, num_heads_q, head_dim_v]; f32, f16, bf16,
/// any strides lses[i] [batch, num_heads_q, seqlen_q], or packed [num_heads_q, total_q]; f32
/// out     as outs[i], any of their dtypes
/// lse     as lses[i]
///
/// A state of lse -inf saw no key: it changes nothing, whatever its out holds (NaN too). All of them so, or no states
/// at all: out 0, lse -inf. One state is copied. Lengths of 0 are legal; sums are f32.
/// Uses     keys split over devices or in time, a prefix shared by many sequences, local and global attention joined.
/// Bits     depend on the row's states and their order alone.
/// Throws   InvalidArgument before anything is written: shapes that differ, lse that is not f32, outputs that overlap
///          states other than as said.
/// Source   Milakov & Gimelshein 2018.
FOVEA_EXPORT void merge_states(const MergeStates& args);

}  // namespace fovea
