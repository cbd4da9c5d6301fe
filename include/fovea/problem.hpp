// What to compute, as data: shapes or bounds, dtypes, programs, wanted outputs. No addresses but those of captured
// tensors. Validated once, when it is planned. Read attention.hpp next.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "fovea/expr.hpp"
#include "fovea/mask.hpp"
#include "fovea/quant.hpp"
#include "fovea/tensor.hpp"

namespace fovea {

/// Type of the inputs of the two matrix products. `automatic`: bf16 where inputs are bf16 and the processor multiplies
/// it faster, else f32. Sums are always f32.
enum class ComputeDtype : std::uint8_t { automatic, f32, bf16 };

/// Instruction set of the CPU kernels. `automatic` takes the best that this processor has (or FOVEA_CPU_TARGET).
/// avx512_vnni and avx_vnni multiply int8 codes of a recipe and are for nothing else; avx512_bf16 and amx_bf16 multiply
/// these in eight bits too.
enum class CpuTarget : std::uint8_t {
  automatic,
  scalar,
  avx2,
  avx512,
  avx512_bf16,
  amx_bf16,
  neon,
  avx512_vnni,
  avx_vnni
};
FOVEA_EXPORT std::string_view name(CpuTarget target);
FOVEA_EXPORT std::optional<CpuTarget> parse_cpu_target(std::string_view name);

/// When a plan of a forward call on a GPU is ready whose kernels have to be compiled. `complete`: when they are, in
/// seconds. `staged`: as soon as a kernel is that compiles in a fraction of the time and runs several times slower; the
/// others are compiled beside the plan's calls and run those that begin afterwards. The two round differently: what is
/// said of equal bits holds before that and after it. `automatic`: FOVEA_COMPILE, else complete.
enum class CompileMode : std::uint8_t { automatic, complete, staged };
FOVEA_EXPORT std::string_view name(CompileMode mode);
FOVEA_EXPORT std::optional<CompileMode> parse_compile_mode(std::string_view name);

/// Keys are dropped after the softmax with probability p, the rest scaled by 1 / (1 - p). Counter-based: the decision
/// for (seed, offset, batch, q_head, q_idx, kv_idx) is the same on every backend, tiling and sharding. p in [0, 1].
struct Dropout {
  float p = 0;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  bool operator==(const Dropout&) const = default;
};

/// An upper bound in place of a length: one plan for all lengths up to it.
struct UpTo {
  std::int64_t value = 0;
  bool operator==(const UpTo&) const = default;
};
constexpr UpTo up_to(std::int64_t value) { return {value}; }

struct Problem {
  // [batch, seqlen_q,  num_heads_q,  head_dim_qk], or packed [total_q,  num_heads_q,  head_dim_qk]. f32, f16, bf16; all
  // three e4m3 where quant has qk=e4m3, pv=e4m3 and scales=given: then they are its codes, and nothing rounds them
  TensorSpec q{};
  // [batch, seqlen_kv, num_heads_kv, head_dim_qk], or packed [total_kv, num_heads_kv, head_dim_qk]
  TensorSpec k{};
  // [batch, seqlen_kv, num_heads_kv, head_dim_v],  or packed [total_kv, num_heads_kv, head_dim_v]
  TensorSpec v{};
  // as q with head_dim_v, f32, f16 or bf16; rank 0: row-major of q's dtype, bf16 where that is e4m3
  TensorSpec out{};

  ScoreMod score{};  // after scale; see the order of operations in docs/design/contract.md
  MaskMod mask{};
  std::optional<float> softmax_scale{};  // default 1 / sqrt(head_dim_qk)
  bool has_sinks = false;                // learnable sinks, one logit per q head
  Dropout dropout{};
  bool reads_dropout_seed = false;  // from tensors of the call: see AttentionForward
  bool has_dropout_places = false;
  // what q, k, probabilities and v are rounded to
  Quantization quant{};
  // packed: cu_seqlens_q and cu_seqlens_kv have num_sequences + 1 entries
  std::optional<std::int64_t> num_sequences{};

  bool wants_lse = false;
  bool wants_row_max = false;

  // dense: this plan serves every seqlen_q up to the bound. Packed: of one sequence
  std::optional<UpTo> seqlen_q{};
  std::optional<UpTo> seqlen_kv{};

  ComputeDtype compute_dtype = ComputeDtype::automatic;
  CpuTarget cpu_target = CpuTarget::automatic;
  bool is_deterministic = true;
  /// cuda: SMs that the kernel leaves free, for communication that runs beside it; less than the device has. Those that
  /// run one CTA an SM do (Hopper's, and sm90/decode); others refuse it by name. No bits depend on it. The cpu has no
  /// SMs: there it changes nothing.
  int sm_margin = 0;
  /// Of forward plans alone, on cuda. Decoding is complete whatever the variable says; gradients and tangents too, and
  /// refuse `staged` by name. Recipes, f32, head dims above 256 and a sm_margin have no kernel that compiles sooner:
  /// there it changes nothing.
  CompileMode compile_mode = CompileMode::automatic;
  int num_threads = 0;  // workers that the workspace is sized for; 0: the executor's concurrency
};

}  // namespace fovea
