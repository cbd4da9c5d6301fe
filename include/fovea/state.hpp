// The algebra of partial results: attention over a part of the keys is (out, lse), and such states merge.
//
// Call path: this header -> src/plan/merge_states.cpp (check) -> src/cpu/merge_states.cpp or
// src/cuda/merge/merge_states.cpp (a row at a time).
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/runtime.hpp"
#include "fovea/tensor.hpp"

namespace fovea {

/// Everything that merge_states takes. See merge_states for shapes.
struct MergeStates {
  std::vector<TensorView> outs{};  // one of each state, in the order of the sum
  std::vector<TensorView> lses{};
  FloatView out{};    // written; may be outs[0]
  Float32View lse{};  // written, optional; may be lses[0]

  // optional here, required by MergeStatesPlan::run; cpu alone wants some
  std::span<std::byte> workspace{};
  Executor* executor = nullptr;  // cpu; default: the runtime's pool
  void* stream = nullptr;        // cuda: the CUstream of the call; null: the default stream
};

/// out = Σ_i exp(lse_i - lse) out_i, lse = log Σ_i exp(lse_i), summed in the order given.
///
/// outs[i] [batch, seqlen_q, num_heads_q, head_dim_v], or packed [total_q, num_heads_q, head_dim_v]; f32, f16, bf16,
///         any strides
/// lses[i] [batch, num_heads_q, seqlen_q], or packed [num_heads_q, total_q]; f32
/// out     as outs[i], any of their dtypes
/// lse     as lses[i]
///
/// A state of lse -inf saw no key: it changes nothing, whatever its out holds (NaN too). All of them so, or no states
/// at all: out 0, lse -inf. One state is copied. Lengths of 0 are legal; sums are f32.
/// Device   that of the tensors, all of them. On cuda the call is enqueued on args.stream; at most 32 states.
/// Uses     keys split over devices or in time, a prefix shared by many sequences, local and global attention joined.
/// Bits     depend on the row's states and their order alone.
/// Throws   InvalidArgument before anything is written: shapes that differ, lse that is not f32, outputs that overlap
///          states other than as said. Unsupported with the reason.
/// Source   Milakov & Gimelshein 2018.
FOVEA_EXPORT void merge_states(const MergeStates& args);
FOVEA_EXPORT void merge_states(const MergeStates& args, Runtime& runtime);

/// A validated call, its kernel and its exact workspace, for tensors of these shapes, dtypes, strides and devices.
/// Immutable, cheap to copy, thread safe.
class FOVEA_EXPORT MergeStatesPlan {
 public:
  std::size_t workspace_bytes() const;
  Explanation explain() const;
  /// As Plan::run: no allocation, no wait, nothing compiled. Throws InvalidArgument before anything is written.
  void run(const MergeStates& args) const;

  struct Impl;
  explicit MergeStatesPlan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

/// Tensors need no data here. The executor, where one is given, says how many workers the workspace is for.
FOVEA_EXPORT MergeStatesPlan plan_merge_states(const MergeStates& args);

}  // namespace fovea
