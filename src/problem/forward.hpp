// A forward problem, validated, lengths and heads resolved and named. Backends read this and check nothing.
#pragma once

#include <cstdint>
#include <string_view>

#include "fovea/attention.hpp"
#include "fovea/problem.hpp"

#include "core/philox.hpp"
#include "expr/node.hpp"

namespace fovea {

/// How the tensors of a call over a cache lie, as far as a plan depends on it.
struct CacheLayout {
  std::int64_t page_size = 0;  // 0: contiguous
  bool has_left_padding = false;
  bool has_aligned_rows = false;   // q, out, k and v: contiguous rows, at multiples of 16 bytes
  bool has_latent_values = false;  // v is the view of k's first columns
};

struct ForwardProblem {
  Problem problem;  // as posed; out resolved
  bool is_varlen = false;
  std::int64_t num_sequences = 0;  // dense: batch
  std::int64_t seqlen_q = 0;       // of one sequence: the length, or the bound
  std::int64_t seqlen_kv = 0;
  std::int64_t total_q = 0;  // rows of q of all sequences (or the bound)
  std::int64_t num_heads_q = 0, num_heads_kv = 0;
  std::int64_t group = 1;  // q heads per kv head
  std::int64_t head_dim_qk = 0, head_dim_v = 0;
  float softmax_scale = 1;
  bool is_cached = false;  // keys and values lie in a cache, which knows their lengths (cache.hpp)
  bool is_paged = false;   // in pages of it
  CacheLayout cache{};     // where there is one
  // Packed over a cache: sequences of more queries, and rows of nobody, are another plan's.
  bool is_beside_longer = false;
  std::int64_t fewest_queries = 0;  // packed over a cache: sequences of fewer are another plan's

  /// Whether there is a score to compute, and something for programs to read.
  bool has_positions() const {
    return seqlen_q != 0 && seqlen_kv != 0 && num_sequences != 0 && num_heads_q != 0;
  }
  Device device() const { return problem.q.device; }  // of every tensor
};

/// of_q: k and v have the dtype of q, as every operation but attention over a cache asks. of_cache: floats or codes.
enum class KvDtypes : std::uint8_t { of_q, of_cache };

/// Throws InvalidArgument: "<where>: k has head_dim 96 but q has 128; expected ...".
ForwardProblem validate(const Problem& problem, std::string_view where,
                        KvDtypes kv_dtypes = KvDtypes::of_q);

/// Arguments against the problem that a plan was made for: dtypes, shapes, programs, cu_seqlens, outputs that overlap
/// inputs. Throws InvalidArgument before anything is written.
void validate_arguments(const ForwardProblem& problem, const AttentionForward& args,
                        std::string_view where);

/// Whether the rows of `part` are the first columns of those of `whole`, in one memory: keys and values of multi-head
/// latent attention.
bool are_first_columns(const TensorView& part, const TensorView& whole);

/// Everything that a plan depends on, as one number: the key of the plan cache.
expr::Digest problem_key(const Problem& problem);

/// With what the call's tensors add to seed and offset, which lie on the host.
Dropout dropout_of(const AttentionForward& args);

/// Of a dense call whose dropout_places lie on the host.
philox::Places dropout_places_of(const AttentionForward& args);

/// Of q_scale, k_scale or v_scale, on the host.
float scale_at(const TensorView& scale, std::int64_t sequence, std::int64_t kv_head);

/// cu_seqlens entry as int64 (the tensor is i32 or i64).
std::int64_t cu_seqlen(const TensorView& cu_seqlens, std::int64_t index);

/// One line: "bf16 q [2, 128, 8, 64] k [2, 256, 2, 64] ... causal".
std::string describe(const ForwardProblem& problem);

}  // namespace fovea
