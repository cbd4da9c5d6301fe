// Gradients of attention: attention_backward for one call, plan_backward for many; attention_double_backward for
// gradients of gradients. Read jvp.hpp for forward mode.
//
// Call path: this header -> src/plan/backward.cpp (find or make the plan) -> src/cpu/attention_backward.cpp (walk
// tiles) -> src/cpu/kernels/ (vector code); on GPUs src/cuda/backward/ -> src/cuda/device/.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fovea/attention.hpp"

namespace fovea {

/// Everything that attention_backward takes. What is not given among dq, dk, dv, dsinks and dcaptured is not computed.
struct AttentionBackward {
  FloatView dout{};    // gradient of out; any strides, 0 too
  Float32View dlse{};  // gradient of lse, optional: lse is an output like any other
  /// The call whose gradient is wanted, out and lse as it wrote them: both are inputs here. row_max is not read. With
  /// parts of its keys, as in a ring of ranks, gradients are those of the parts: dq of all parts add up.
  AttentionForward forward{};

  FloatView dq{};
  FloatView dk{};
  FloatView dv{};
  Float32View dsinks{};
  /// By name: captured float tensors of forward.score, and captured float scalars (a tensor of one element).
  std::vector<CapturedTensor> dcaptured{};

  std::span<std::byte> workspace{};  // optional here, required by BackwardPlan::run
  Executor* executor = nullptr;      // cpu; default: the runtime's pool
  // cuda: the CUstream of the call, not forward's; null: the default stream
  void* stream = nullptr;
};

/// Gradients of what attention_forward computes, by recomputing probabilities tile by tile from q, k and lse.
///
/// dout  as forward.out                   f32, f16, bf16
/// dlse  as forward.lse                   f32, optional
/// dq    as q; dk as k; dv as v           written; f32, f16, bf16; must not overlap an input or each other
/// dsinks [num_heads_q] f32               written, optional
/// dcaptured[i] as the captured tensor    written, f32, f16, bf16; the sum over all positions that load an element
///
/// A row that sees no key, padding, hidden keys and packed rows after the last sequence have gradients of exactly 0.
/// What is invisible has no effect, NaN and infinity included.
///
/// Kinks    abs has derivative 0 at 0; min and max of equal operands pass the gradient to the first; select passes it
///          to the chosen side alone; floor, comparisons and int(...) have derivative 0; a clamped load passes it to
///          the element that was read.
/// Work     10·batch·num_heads_q·seqlen_q·seqlen_kv·head_dim flops (head_dim_qk = head_dim_v), less skipped tiles.
/// Memory   workspace of O(threads · (tile + seqlen_kv / 8)) and fp32 sums of dq (up to 8 of them where there are fewer
///          (sequence, kv head) pairs than threads to run) and of captured gradients: nothing grows with
///          seqlen_q · seqlen_kv.
/// Accuracy at most twice the error of the plain formula in the same dtypes.
/// Bits     dq, dk and dv of a sequence depend on that sequence alone: not on batch mates, threads, scheduling or run.
///          dsinks and dcaptured are sums over the batch in a fixed order, or exact.
/// Device   the cpu, or NVIDIA GPUs from compute capability 7.5 on: enqueued on stream, legal in graph capture;
///          workspace there is two to four floats a row, and 104 bytes an element of dcaptured but of a dense bias; on
///          Hopper, for a dense bias that is added to scores of 16 bits, 2 bytes a pair where that is 2 GiB at most.
/// Throws   InvalidArgument before anything is written; Unsupported with each candidate's reason.
/// Source   Dao et al. 2022, appendix B (recomputation; delta = rowsum(dO ∘ O)).
FOVEA_EXPORT void attention_backward(const AttentionBackward& args);
FOVEA_EXPORT void attention_backward(const AttentionBackward& args, Runtime& runtime);

/// A gradient problem as data: shapes without addresses.
struct BackwardProblem {
  Problem forward{};  // wants_lse is implied
  TensorSpec dout{};
  TensorSpec dq{}, dk{}, dv{};  // rank 0: not wanted
  bool has_dlse = false;
  bool wants_dsinks = false;
  /// Captured tensors whose gradient is wanted.
  struct Captured {
    std::string name;
    TensorSpec spec;
  };
  std::vector<Captured> dcaptured{};
};
[[nodiscard]] FOVEA_EXPORT BackwardProblem problem_of(const AttentionBackward& args);

/// A validated gradient problem, its kernel and its exact workspace. Immutable, cheap to copy, thread safe.
class FOVEA_EXPORT BackwardPlan {
 public:
  [[nodiscard]] std::size_t workspace_bytes() const;
  [[nodiscard]] Explanation explain() const;
  /// As Plan::run: the arguments must fit the plan's problem; throws InvalidArgument before anything is written.
  void run(const AttentionBackward& args) const;

  struct Impl;
  explicit BackwardPlan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  const Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<const Impl> impl_;
};

/// Validates, chooses, prepares. Throws InvalidArgument, or Unsupported with every candidate's reason.
[[nodiscard]] FOVEA_EXPORT BackwardPlan plan_backward(const BackwardProblem& problem);
[[nodiscard]] FOVEA_EXPORT Explanation explain(const BackwardProblem& problem);

/// Gradients of L = <ddq, dq> + <ddk, dk> + <ddv, dv> + <ddsinks, dsinks> + Σ <ddcaptured[i], dcaptured[i]>, where dq,
/// dk, dv, dsinks and dcaptured are what attention_backward computes.
struct AttentionDoubleBackward {
  AttentionBackward backward{};   // dout, dlse and forward are read, dq and the others are not
  FloatView ddq{}, ddk{}, ddv{};  // as q, k, v; optional: what is not given is 0
  Float32View ddsinks{};          // [num_heads_q] f32
  std::vector<CapturedTensor> ddcaptured{};  // by name and shape as AttentionBackward::dcaptured

  FloatView grad_dout{};    // as dout, optional; so are the others
  Float32View grad_dlse{};  // as lse
  FloatView grad_q{}, grad_k{}, grad_v{};
  Float32View grad_sinks{};                     // [num_heads_q] f32
  std::vector<CapturedTensor> grad_captured{};  // as ddcaptured, written
  Executor* executor = nullptr;                 // as in AttentionBackward, and of this call
  void* stream = nullptr;
};

/// Backward of backward by the plain formula, a row at a time with fp64 products and sums (programs in fp32): right for
/// every program and mask, far slower than attention_backward. explain_double_backward says so; nothing falls back to
/// it silently.
///
/// Shapes and dtypes as in attention_backward; outputs are f32, f16 or bf16 and must not overlap an input or each
/// other. Gradients flow to everything that attention_backward reads: q, k, v, dout, dlse, sinks and the floats that
/// the score program captures. A row that sees no key, padding and hidden keys have gradients of exactly 0; with a
/// sink, dlse of a row that sees no key gets ddsinks of its head. forward.lse is optional; out and lse are not read but
/// computed again.
/// Memory   O(threads · seqlen_kv · head_dim) in fp64; where grad_sinks or grad_captured are wanted, up to 64 copies of
///          their sums, of 32 MB together or one alone.
/// Bits     as in attention_backward; grad_sinks and grad_captured are sums over the batch in a fixed order.
/// Device   the cpu. Tensors on cuda are refused by name before anything is read or written.
/// Throws   InvalidArgument before anything is written; Unsupported for tensors that do not live on the cpu.
FOVEA_EXPORT void attention_double_backward(const AttentionDoubleBackward& args);
[[nodiscard]] FOVEA_EXPORT Explanation explain_double_backward(const AttentionDoubleBackward& args);

}  // namespace fovea
