// A validated cache: where its sequences lie and how long they are, read where the caller keeps them. Backends read
// this and check nothing. What reads contents (cached_sequence, cache_row, index_at, ...) is for tensors of the host.
// decode.hpp validates attention over it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "fovea/kv_cache.hpp"

#include "problem/tensor_checks.hpp"

namespace fovea {

/// The tokens of each sequence in a tensor of queries or new tokens: [batch, each, ...], or packed [total, ...].
struct SequenceRows {
  std::int64_t each = 0;    // of every sequence; of packed tokens 0
  TensorView cu_seqlens{};  // given: packed

  bool is_packed() const { return static_cast<bool>(cu_seqlens); }
  std::int64_t count(std::int64_t sequence) const;
  /// The row where a sequence begins, in a packed tensor; else 0: tensors have a dimension for sequences.
  std::int64_t begin(std::int64_t sequence) const;
  /// Tokens of the whole batch.
  std::int64_t total(std::int64_t batch) const;

  struct Token {
    std::int64_t sequence = 0, index = 0;
  };
  /// Token `row` of total(batch), sequence by sequence.
  Token token(std::int64_t row, std::int64_t batch) const;
};

/// Of tensors that are given. cu_seqlens has no say where tokens have a dimension for sequences.
SequenceRows sequence_rows(const TensorView& tokens, const TensorView& cu_seqlens);
/// Where nothing is appended: none.
SequenceRows new_tokens(const Append& append);

/// Are the values the first columns of the keys, in their memory? Then whoever appends writes keys alone.
bool has_latent_values(const KvCache& cache);

/// Where the scale of a row of codes lies. Strides are 0 along what shares a scale.
struct RowScales {
  float* data = nullptr;  // null: rows are numbers
  std::int64_t sequence_stride = 0, slot_stride = 0, row_stride = 0, head_stride = 0;
  bool are_of_rows = false;  // appending writes them

  float* at(std::int64_t sequence, const struct CacheRow& row, std::int64_t head) const;
};
/// Of cache.k_scale or cache.v_scale: its rank says what a scale is of.
RowScales row_scales(const TensorView& scale);

/// A cache and the tokens that the call appends to it.
struct GrownCache {
  const KvCache& cache;
  SequenceRows new_tokens{};
  std::int64_t total_new = 0;  // rows of packed new tokens
};
GrownCache grown_cache(const KvCache& cache, const Append& append);

/// What a call does before it attends: writes new keys and values, turns keys and queries.
struct NewTokens {
  const KvCache& cache;
  const Append& append;
  std::int64_t batch = 0;
  const Rotary* rotary = nullptr;
  TensorView q{};             // turned where there is a rotary; not given: keys alone
  TensorView cu_seqlens_q{};  // of packed queries
  TensorView rotated_q{};     // as q, dense
};

/// One sequence of a cache before the append. Rows are counted from the start of its slot, or of its first page.
struct CachedSequence {
  std::int64_t slot = 0;            // contiguous: of the cache; paged: row of the page table
  std::int64_t begin = 0, end = 0;  // rows [begin, end) are its keys, rows before are left padding
};
CachedSequence cached_sequence(const KvCache& cache, std::int64_t index);

/// Where a row of a sequence lies: the first two indices of k and v.
struct CacheRow {
  std::int64_t slot = 0, row = 0;
};
CacheRow cache_row(const KvCache& cache, std::int64_t slot, std::int64_t row);

inline float* RowScales::at(std::int64_t sequence, const CacheRow& row, std::int64_t head) const {
  return data + sequence * sequence_stride + row.slot * slot_stride + row.row * row_stride +
         head * head_stride;
}

/// Rows that one sequence can have, left padding included.
std::int64_t cache_capacity(const KvCache& cache, std::int64_t index);
/// Rows that any sequence has at most: from shapes alone, before anything is checked.
std::int64_t cache_capacity(const KvCache& cache);

/// The position of a token at the end of a sequence of seqlen_kv keys; negative before its first key.
std::int64_t rotary_position(const Rotary& rotary, const SequenceRows& tokens,
                             const SequenceRows::Token& token, std::int64_t seqlen_kv);

/// Whether keys lie in pages, named by a table or by offsets and a list.
inline bool is_paged(const KvCache& cache) {
  return cache.page_table || cache.page_indptr || cache.page_indices;
}

/// An element of an i32 or i64 tensor of one or two dimensions.
inline std::int64_t index_at(const TensorView& view, std::int64_t i, std::int64_t j = 0) {
  const std::int64_t at = i * view.stride(0) + (view.rank() > 1 ? j * view.stride(1) : 0);
  if (view.dtype() == Dtype::i64) return static_cast<const std::int64_t*>(view.data())[at];
  return static_cast<const std::int32_t*>(view.data())[at];
}

/// Which page holds which keys. Read where it lies, at each question.
class PageIndex {
 public:
  PageIndex() = default;
  explicit PageIndex(const KvCache& cache)
      : table_(cache.page_table), indptr_(cache.page_indptr), indices_(cache.page_indices) {}

  std::int64_t at(std::int64_t sequence, std::int64_t page) const {
    if (table_) return index_at(table_, sequence, page);
    return index_at(indices_, index_at(indptr_, sequence) + page);
  }
  /// Pages that a sequence has entries for.
  std::int64_t num_entries(std::int64_t sequence) const {
    if (table_) return table_.size(1);
    return index_at(indptr_, sequence + 1) - index_at(indptr_, sequence);
  }

 private:
  TensorView table_, indptr_, indices_;
};

/// The cache, the new tokens (packed ones with their cu_seqlens) and their rotation, all on the device of cache.k.
/// Throws InvalidArgument before anything is written. Returns the keys of the longest sequence after the append. What
/// tensors of a GPU hold is not looked at: the longest is then whatever a sequence has room for.
std::int64_t validate_cache(const KvCache& cache, const Append& append,
                            const std::optional<Rotary>& rotary, std::int64_t batch,
                            std::string_view where);

/// Before anything else is asked of a cache.
void check_cache_ranks(const KvCache& cache, const TensorChecks& checks);

/// How queries are turned: by positions of their own where they have some.
Rotary rotary_of_queries(const Rotary& rotary);

/// rotary.positions of these tokens, `name` to the caller, must find their angles. What a GPU holds is not looked at.
void refuse_far_positions(const Rotary& rotary, const SequenceRows& tokens, std::int64_t batch,
                          const TensorChecks& checks, std::string_view name = "rotary.positions");

/// A token at the end of the sequence must find its angles.
void refuse_short_rotary(const Rotary& rotary, std::int64_t sequence, std::int64_t seqlen_kv,
                         const TensorChecks& checks);

}  // namespace fovea
