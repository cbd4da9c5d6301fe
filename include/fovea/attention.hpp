// Attention: plan once and run often, or call attention_forward and let the runtime remember the plan.
//
// Call path: this header -> src/plan/forward.cpp (find or make the plan) -> src/cpu/attention_forward.cpp (walk
// tiles) -> src/cpu/kernels/ (vector code).
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fovea/error.hpp"
#include "fovea/expr.hpp"
#include "fovea/mask.hpp"
#include "fovea/problem.hpp"
#include "fovea/quant.hpp"
#include "fovea/runtime.hpp"
#include "fovea/tensor.hpp"

namespace fovea {

/// Everything that attention_forward takes; what is not named has the default. See attention_forward for shapes.
struct AttentionForward {
  InputView q{};
  InputView k{};
  InputView v{};
  FloatView out{};
  Float32View lse{};  // optional output
  // optional output: the row's largest final score, -inf where it sees no key
  Float32View row_max{};

  ScoreMod score{};
  MaskMod mask{};
  std::optional<float> softmax_scale{};
  Float32View sinks{};  // [num_heads_q] f32, optional
  Dropout dropout{};
  /// [1] i64, optional, both or neither: numbers that are added to dropout.seed and dropout.offset when the call runs,
  /// on its device, as 64 bits that wrap. A captured graph draws anew at each replay when they have changed, and calls
  /// of one graph draw apart by offsets of their own. Backward takes the same.
  Int64View dropout_seed{};
  Int64View dropout_offset{};
  /// [batch + num_heads_q + seqlen_q + seqlen_kv] i32, contiguous, optional; not for packed sequences. Where batch
  /// entries, query heads, queries and keys of this call, one list behind the other, stand in the whole that dropout
  /// draws for: a part of a problem drops what the whole does. Four keys, from a multiple of 4 on, stand side by side
  /// in the whole, too, from a multiple of 4 on. On cuda nobody looks at what the tensor holds.
  Int32View dropout_places{};
  /// q, k, probabilities and v in eight or four bits: parse_quantization("accurate"), or fields. Which
  /// run on which device: docs/guides/quantization.md.
  Quantization quant{};
  // [batch, num_heads_kv] f32, packed [num_sequences, num_heads_kv], any strides: where quant.scales is given, what q,
  // k and v are divided by before they are rounded; where they are codes of e4m3, what these are multiplied by
  Float32View q_scale{};
  Float32View k_scale{};
  Float32View v_scale{};
  IndexView cu_seqlens_q{};   // [num_sequences + 1] i32 or i64: makes q, out, lse packed
  IndexView cu_seqlens_kv{};  // [num_sequences + 1] i32 or i64: makes k, v packed

  ComputeDtype compute_dtype = ComputeDtype::automatic;
  CpuTarget cpu_target = CpuTarget::automatic;
  bool is_deterministic = true;
  int sm_margin = 0;  // cuda: SMs left free for what runs beside the call; see Problem

  // optional for attention_forward, required by Plan::run where workspace_bytes() > 0
  std::span<std::byte> workspace{};
  Executor* executor = nullptr;  // cpu; default: the runtime's pool
  // cuda: the CUstream that the call is enqueued on; null: the default stream
  void* stream = nullptr;
};

/// Exact attention, forward: out = softmax(mask(score(scale * q kᵀ))) v, lse = log Σ exp(score).
///
/// q     [batch, seqlen_q,  num_heads_q,  head_dim_qk]  f32, f16, bf16, or codes of e4m3 where quant is fp8_static,
///       with scales; any strides, contiguous last dimension is fast
/// k     [batch, seqlen_kv, num_heads_kv, head_dim_qk]  dtype of q; num_heads_q is a multiple of num_heads_kv
/// v     [batch, seqlen_kv, num_heads_kv, head_dim_v]   dtype of q
/// out   [batch, seqlen_q,  num_heads_q,  head_dim_v]   written; f32, f16 or bf16; must not overlap an input
/// lse   [batch, num_heads_q, seqlen_q]  f32, optional  natural log; -inf where a row sees no key (out is 0 there)
/// sinks [num_heads_q] f32, optional                    a logit that joins each row's denominator
///
/// Packed sequences: q [total_q, num_heads_q, head_dim_qk], k and v likewise, out as q, lse [num_heads_q, total_q],
/// with cu_seqlens_q and cu_seqlens_kv (read at the call; start at 0, never decrease, last <= total). Rows after the
/// last sequence get out 0, lse -inf.
///
/// Work     2·batch·num_heads_q·seqlen_q·seqlen_kv·(head_dim_qk + head_dim_v) flops, less skipped tiles.
/// Memory   workspace of O(threads · tile); nothing grows with seqlen_q · seqlen_kv.
/// Accuracy at most twice the error of the plain formula in the same dtype (tests/property/accuracy_test.cpp).
/// Bits     a row's bits depend on its own sequence alone: not on batch mates, threads, scheduling or run.
/// Device   that of the tensors, captured ones and cu_seqlens too. On cuda the call is enqueued on args.stream and
///          returns; workspace is device memory; what tensors hold (cu_seqlens, captured positions) is not checked.
/// Throws   InvalidArgument before anything is written; Unsupported with each candidate's reason.
/// Source   Milakov & Gimelshein 2018 (online softmax); Dao et al. 2022 (tiling).
FOVEA_EXPORT void attention_forward(const AttentionForward& args);
FOVEA_EXPORT void attention_forward(const AttentionForward& args, Runtime& runtime);

/// The Problem that these arguments pose: shapes without addresses.
[[nodiscard]] FOVEA_EXPORT Problem problem_of(const AttentionForward& args);

/// How much of the score matrix a mask leaves: tiles by kind, as the kernels will see them.
struct TileCount {
  std::int64_t empty = 0, partial = 0, full = 0;
  std::int64_t total() const { return empty + partial + full; }
  bool operator==(const TileCount&) const = default;
};

/// What a plan decided and why. print() is a page for a person, json() one object with the same fields.
struct FOVEA_EXPORT Explanation {
  struct Refused {
    std::string candidate;
    std::string reason;
  };
  std::string problem;  // one line
  std::string kernel;   // "cpu/attention_forward", empty when nothing can run
  std::string tuning;   // cuda: what measurements of fovea tune said of this choice, if anything
  // cuda: "kernel pack FILE", "disk cache" or "NVRTC 13.0.88": where its kernels came from, or would come from
  std::string kernel_source;
  std::string sums;    // of gradients on a GPU: in what order and memory
  std::string quant;   // of a problem that states an accuracy: the recipe that was taken, and why
  std::string target;  // "avx512"
  std::string compute_dtype;
  std::string score, mask;  // formulas, of which 4,096 bytes are shown
  std::int64_t tile_q = 0, tile_kv = 0;
  std::optional<TileCount> tiles;  // absent where mask data is, as in plans, or too many
  double flops = 0;                // of visible tiles
  double bytes = 0;                // inputs read once, outputs written once
  std::string bound;               // "compute" or "memory"
  std::size_t workspace_bytes = 0;
  std::vector<Refused> refused;  // candidates before the chosen one, best first, one reason each

  [[nodiscard]] std::string print() const;
  [[nodiscard]] std::string json() const;
};

/// A validated problem, its kernel and its exact workspace. Cheap to copy, thread safe, and immutable but for the
/// kernel of CompileMode::staged.
class FOVEA_EXPORT Plan {
 public:
  [[nodiscard]] std::size_t workspace_bytes() const;
  [[nodiscard]] Explanation explain()
      const;  // looks at no tensor: the problem's were lent for `plan` alone

  /// Runs on args.executor (default: the process's pool). Nothing is compiled; memory is the workspace, a few small
  /// lists and, for masks that read tensors by position, range tables of about a byte per element. The arguments must
  /// fit the plan's Problem: same dtypes, heads and head dims, lengths equal or within bounds, programs with the same
  /// formula. On cuda it enqueues on args.stream and returns: no allocation, no wait, nothing compiled; a graph may
  /// capture it. On Hopper the first call with a tensor that does not start at a multiple of 16 bytes loads another
  /// kernel, compiled if need be. Throws InvalidArgument before anything is written.
  void run(const AttentionForward& args) const;

  /// Does every run from now on use the same kernels? Not while a plan of CompileMode::staged runs by a kernel in the
  /// place of those that are compiled; a run that begins after this is true uses these. Throws why they cannot be had
  /// (CompileError, DeviceError), as does `run` then.
  [[nodiscard]] bool is_final() const;
  /// Returns when it is: before bits are compared, times are taken, or a graph captures runs that it will keep. In a
  /// process that ends, which stops compiling, this throws CompileError; in a forked one, which compiles nothing,
  /// DeviceError.
  void wait() const;

  struct Impl;
  explicit Plan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  const Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<const Impl> impl_;
};

/// Validates, chooses, prepares, for the device that q lives on. Throws InvalidArgument, or Unsupported with every
/// candidate's reason.
[[nodiscard]] FOVEA_EXPORT Plan plan(const Problem& problem);

/// The same problem with all tensors on `device`: specs made from shapes alone know none.
[[nodiscard]] FOVEA_EXPORT Plan plan(const Problem& problem, Device device);

/// As plan(problem).explain(), but looks at tensors that a mask reads, explains what is unsupported instead of
/// throwing, and compiles no kernel: one that does not compile is an error of the plan's.
[[nodiscard]] FOVEA_EXPORT Explanation explain(const Problem& problem);
[[nodiscard]] FOVEA_EXPORT Explanation explain(const Problem& problem, Device device);

}  // namespace fovea
