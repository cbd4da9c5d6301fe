// Forward mode: how out and lse move when q, k, v and captured tensors move. Read backward.hpp for reverse mode.
//
// Call path: this header -> src/plan/jvp.cpp (find or make the plan) -> src/cpu/attention_jvp.cpp (walk
// tiles), or src/cuda/jvp/attention_jvp.hpp.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fovea/attention.hpp"

namespace fovea {

/// Everything that attention_jvp takes. A tangent that is not given is 0.
struct AttentionJvp {
  // out and lse are written too, lse where it is given; row_max must not be. Its executor and stream are the call's
  AttentionForward forward{};

  FloatView q_tangent{};        // as q
  FloatView k_tangent{};        // as k
  FloatView v_tangent{};        // as v
  Float32View sinks_tangent{};  // [num_heads_q] f32
  // by name, as the captured tensor; scalars: one element
  std::vector<CapturedTensor> captured_tangents{};

  FloatView out_tangent{};    // as out, written
  Float32View lse_tangent{};  // as lse, written; optional

  // optional here, required by JvpPlan::run; forward.workspace is not used
  std::span<std::byte> workspace{};
};

/// Attention and its derivative along one direction (Jacobian-vector product), in one pass over the tiles.
///
/// out' = P ∘ (s' - lse') v + P v',  lse' = Σ p s',  s' = derivative of the final score along the direction.
///
/// Shapes, dtypes, kinks, bits and errors as in attention_forward and attention_backward; tangents f32, f16 or bf16,
/// any strides. A row that sees no key has tangents of exactly 0; with a sink, its lse is the sink and moves with it.
///
/// Work     up to three times attention_forward: a product for each tangent of q, k and v and one for P · (s' - its
///          mean) beside its two. On the CPU they are taken in f32; in bf16 where forward.compute_dtype is bf16, or
///          where forward.cpu_target is a target of bf16 products and q, k and v are bf16: by the dot products of
///          AVX512-BF16, with P and P · (s' - its mean) rounded between. On a GPU they are taken by tensor cores, and
///          rounded likewise, where q, k, v and their tangents are of one dtype of 16 bits; else, or where
///          forward.compute_dtype is f32, by f32 multiply-adds. Above a head_dim_v of 128, or 256 in f32, products of
///          scores are taken again for each so many columns.
/// Memory   workspace of O(threads · tile), on a GPU of tables of what the mask loads; allocated by the call where it
///          is not given.
/// Device   one for all tensors: the cpu, or a GPU of compute capability 7.5 or above, on forward.stream.
/// Throws   InvalidArgument before anything is written; Unsupported with each candidate's reason.
FOVEA_EXPORT void attention_jvp(const AttentionJvp& args);
FOVEA_EXPORT void attention_jvp(const AttentionJvp& args, Runtime& runtime);

/// A forward-mode problem as data: shapes without addresses.
struct JvpProblem {
  Problem forward{};                                 // wants_row_max must be false
  TensorSpec q_tangent{}, k_tangent{}, v_tangent{};  // rank 0: not given
  TensorSpec out_tangent{};
  bool has_sinks_tangent = false;
  bool wants_lse_tangent = false;
  /// Captured floats that move.
  struct Captured {
    std::string name;
    TensorSpec spec;
  };
  std::vector<Captured> captured_tangents{};
};
FOVEA_EXPORT JvpProblem problem_of(const AttentionJvp& args);

/// A validated forward-mode problem, its kernel and its exact workspace. Immutable, cheap to copy, thread safe.
class FOVEA_EXPORT JvpPlan {
 public:
  std::size_t workspace_bytes() const;
  Explanation explain() const;
  /// As Plan::run: the arguments must fit the plan's problem; throws InvalidArgument before anything is written.
  void run(const AttentionJvp& args) const;

  struct Impl;
  explicit JvpPlan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  const Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<const Impl> impl_;
};

/// Validates, chooses, prepares: derivatives of the score program are lowered here. Throws InvalidArgument, or
/// Unsupported with every candidate's reason.
FOVEA_EXPORT JvpPlan plan_jvp(const JvpProblem& problem);
FOVEA_EXPORT Explanation explain(const JvpProblem& problem);

}  // namespace fovea
