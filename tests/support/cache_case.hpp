// One problem of attention over a cache (CacheCase), its memory in any layout (CacheMemory), and the same keys as dense
// tensors, one sequence at a time: what a cache must be indistinguishable from.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fovea/kv_cache.hpp"

#include "support/guarded_tensor.hpp"

namespace fovea::testing {

struct CacheCase {
  std::vector<std::int64_t> seqlens{};  // keys of each sequence, appended ones included
  std::int64_t seqlen_q = 1;
  std::int64_t num_new = 0;  // of the keys, at the end: given as append, not in the cache
  std::vector<std::int64_t> packed_q{};    // queries of each sequence, instead of seqlen_q
  std::vector<std::int64_t> packed_new{};  // new tokens of each, instead of num_new
  bool has_max_seqlen_q = false;           // with packed_q
  std::int64_t num_heads_q = 2, num_heads_kv = 1;
  std::int64_t head_dim_qk = 16, head_dim_v = 24;

  Dtype q_dtype = Dtype::f32, k_dtype = Dtype::f32, v_dtype = Dtype::f32;
  Dtype index_dtype = Dtype::i32;
  std::int64_t page_size = 0;      // 0: contiguous
  bool has_heads_first = false;    // [slots, heads, rows, head_dim] in memory
  bool has_page_list = false;      // pages: page_indptr and page_indices instead of page_table
  bool has_batch_idx = false;      // contiguous: slots in another order
  bool has_left_padding = false;   // of 3, 8, 13 ... rows
  bool has_latent_values = false;  // v is the view of k's first columns
  // Of e4m3, [batch, num_heads_kv]: scales that are given, not those of rows. Codes: k_dtype, v_dtype i8 or e4m3.
  bool has_given_scales = false;
  std::uint64_t seed = 1;         // of values
  std::uint64_t page_seed = 1;    // of the order of pages
  std::uint64_t layout_seed = 1;  // of the layouts of indices, tables, sinks and lse; 0: row-major
  bool has_drawn_tokens = false;  // of q, out and new tokens too

  // Keys that each sequence has of the first of its group, whose sequences begin at `groups`; empty: one group.
  std::int64_t shared_prefix = 0;
  std::vector<std::int64_t> groups{};

  ScoreMod score{};
  MaskMod mask = causal();
  Quantization quant{};  // of numbers of q's dtype, whatever the cache holds
  bool has_sinks = false;
  double q_magnitude = 1;       // queries are so many times as large; the scale makes up for it
  double value_growth = 0;      // values of key i are 2^(value_growth i) times as large
  std::int64_t plan_room = -1;  // how many more keys a plan is for, or no plan
  std::vector<std::shared_ptr<GuardedTensor>> captured{};  // what programs read
  std::int64_t nan_key =
      -1;  // its values (latent: all of it) are NaN in every sequence that has it

  std::int64_t batch() const { return static_cast<std::int64_t>(seqlens.size()); }
  std::int64_t left_padding(std::int64_t sequence) const {
    return has_left_padding ? 3 + 5 * sequence : 0;
  }
  std::int64_t queries(std::int64_t sequence) const {
    return packed_q.empty() ? seqlen_q : packed_q[static_cast<std::size_t>(sequence)];
  }
  std::int64_t new_tokens(std::int64_t sequence) const {
    return packed_new.empty() ? num_new : packed_new[static_cast<std::size_t>(sequence)];
  }
  bool appends() const { return num_new > 0 || !packed_new.empty(); }
  /// Whose key this is.
  std::int64_t owner(std::int64_t sequence, std::int64_t kv_idx) const;
};

/// Cache rows, pages and entries that no sequence uses hold NaN, Inf, -1 and huge numbers.
class CacheMemory {
 public:
  explicit CacheMemory(const CacheCase& problem);

  AttentionDecode args(CpuTarget target = CpuTarget::automatic);
  /// The keys of one sequence, appended ones included, as dense tensors; out and lse are memory of their own.
  AttentionForward dense(std::int64_t sequence, CpuTarget target = CpuTarget::automatic);

  /// The rows of one sequence: of q, out or such a tensor [1, queries, heads, head_dim], of lse [1, heads, queries].
  TensorView rows_of(const TensorView& tokens, std::int64_t sequence) const;
  TensorView lse_of(const TensorView& statistics, std::int64_t sequence) const;

  /// Bits of one sequence in out and lse of args().
  std::vector<std::uint64_t> out_bits(std::int64_t sequence);
  std::vector<std::uint64_t> lse_bits(std::int64_t sequence);

  /// "q was written", "wrote outside of cache.k": empty when inputs and guards are as they were, and of the cache only
  /// rows of appended tokens changed.
  std::string damage() const;
  /// Empty when packed rows behind the last sequence are 0 in out, -inf in lse.
  std::string damage_of_nobody() const;

  GuardedTensor q, k, v, k_scale, v_scale, page_table, seqlens, batch_idx, left_padding, new_k,
      new_v, sinks;
  GuardedTensor page_indptr, page_indices;
  GuardedTensor cu_seqlens_q, cu_seqlens_new, cu_sequences;
  GuardedTensor out, lse;

 private:
  struct Dense {
    GuardedTensor q, k, v, out, lse;
  };

  /// Values are the same in every layout.
  std::optional<float> softmax_scale() const;
  double value(std::uint64_t stream, std::int64_t sequence, std::int64_t row, std::int64_t head,
               std::int64_t dim) const;
  /// A head of a key or value as the cache holds it: elements of its dtype, or codes and their scale.
  struct HeldRow {
    std::vector<double> elements;
    float scale = 1;
  };
  HeldRow held_row(std::uint64_t stream, std::int64_t sequence, std::int64_t row, std::int64_t head,
                   std::int64_t head_dim) const;
  float given_scale(std::uint64_t stream, std::int64_t sequence, std::int64_t head) const;
  std::int64_t rows_before(std::int64_t sequence) const;
  void pack_tokens();
  void make_tokens();
  void place_sequences();
  void list_pages();
  void fill_cache(GuardedTensor& cache, GuardedTensor& scales, GuardedTensor& appended,
                  std::uint64_t stream, std::int64_t head_dim) const;
  GuardedTensor make_scales(std::uint64_t stream) const;
  std::int64_t offset(const TensorView& cache, std::int64_t sequence, std::int64_t row,
                      std::int64_t head) const;

  CacheCase problem_;
  std::int64_t num_slots_ = 0, rows_per_slot_ = 0;
  std::vector<std::vector<std::int64_t>> places_;  // of each sequence: its slot, or its pages
  std::vector<Dense> dense_;
};

/// The view of one entry of the first dimension, or of some.
TensorView entry_of(const TensorView& view, std::int64_t index, std::int64_t count = 1);

/// The call for one sequence of the batch alone, in the same memory. Packed queries stay where they are: rows before
/// and behind are nobody's.
AttentionDecode alone(const AttentionDecode& together, std::int64_t sequence);

}  // namespace fovea::testing
