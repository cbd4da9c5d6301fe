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

/// A cache and the tokens that the call appends to every sequence of it.
struct GrownCache {
  const KvCache& cache;
  std::int64_t num_new = 0;
};

/// What a call does before it attends: writes new keys and values, turns keys and queries.
struct NewTokens {
  const KvCache& cache;
  const Append& append;
  const Rotary* rotary = nullptr;
  TensorView q{};          // turned where there is a rotary; not given: keys alone
  TensorView rotated_q{};  // as q, dense
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

/// Rows that one sequence can have, left padding included.
std::int64_t cache_capacity(const KvCache& cache, std::int64_t index);
/// Rows that any sequence has at most: from shapes alone, before anything is checked.
std::int64_t cache_capacity(const KvCache& cache);

/// The position of token `token` of `num_tokens` at the end of a sequence of seqlen_kv keys; negative before its first
/// key.
std::int64_t rotary_position(const Rotary& rotary, std::int64_t sequence, std::int64_t token,
                             std::int64_t num_tokens, std::int64_t seqlen_kv);

/// Whether keys lie in pages, named by a table or by offsets and a list.
inline bool is_paged(const KvCache& cache) {
  return cache.page_table || cache.page_indptr || cache.page_indices;
}

/// Tokens that every sequence gains.
inline std::int64_t num_new(const Append& append) { return append.k ? append.k.size(1) : 0; }

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

/// The cache, the new tokens and their rotation, all on the device of cache.k. Throws InvalidArgument before anything
/// is written. Returns the keys of the longest sequence after the append. What tensors of a GPU hold is not looked at:
/// the longest is then whatever a sequence has room for.
std::int64_t validate_cache(const KvCache& cache, const Append& append,
                            const std::optional<Rotary>& rotary, std::int64_t batch,
                            std::string_view where);

/// Before anything else is asked of a cache.
void check_cache_ranks(const KvCache& cache, const TensorChecks& checks);

/// A token at the end of the sequence must find its angles.
void refuse_short_rotary(const Rotary& rotary, std::int64_t sequence, std::int64_t seqlen_kv,
                         const TensorChecks& checks);

}  // namespace fovea
