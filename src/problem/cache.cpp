// Validation of the KV cache: what its tensors, lengths, slots and pages must satisfy before anything is written.
// Entries behind the end of a sequence are never looked at.
#include "problem/cache.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "problem/forward.hpp"
#include "problem/head_dim.hpp"
#include "problem/tensor_checks.hpp"
#include "quant/row_codes.hpp"

namespace fovea {
namespace {

constexpr std::int64_t kMaxSeqlen =
    std::numeric_limits<std::int32_t>::max();  // positions are 32-bit in programs

constexpr std::int64_t kMaxRotaryDim = 512;

constexpr std::string_view kCacheShape = "[slots, capacity, num_heads_kv, head_dim]";
constexpr std::string_view kPagesShape = "[num_pages, page_size, num_heads_kv, head_dim]";

std::string shown(const TensorView& view) { return view ? to_string(view.spec()) : "missing"; }

class CacheDoor {
 public:
  CacheDoor(const KvCache& cache, const Append& append, const std::optional<Rotary>& rotary,
            std::int64_t batch, std::string_view where)
      : cache_(cache),
        append_(append),
        rotary_(rotary),
        batch_(batch),
        new_tokens_(new_tokens(append)),
        is_paged_(is_paged(cache)),
        pages_(cache),
        checks_(where, cache.k.spec().device) {}

  std::int64_t check() {
    check_batch();
    check_tensors();
    check_append();
    const std::int64_t longest = checks_.is_host() ? check_sequences() : check_room();
    if (rotary_) check_rotary();
    return longest;
  }

 private:
  std::int64_t check_sequences() const {
    std::int64_t longest = 0;
    for (std::int64_t i = 0; i < batch_; ++i) longest = std::max(longest, check_sequence(i));
    if (append_.k) check_destinations();
    return longest;
  }

  /// All that follows from shapes.
  std::int64_t check_room() const {
    const std::int64_t capacity = std::min(cache_capacity(cache_), kMaxSeqlen);
    if (new_tokens_.each > capacity) {
      checks_.refuse(fmt::format("append.k has {} new tokens; expected at most {}, {}",
                                 new_tokens_.each, capacity, room(0)));
    }
    return capacity;
  }

  // ---- shapes ----

  /// As of any problem: programs count sequences in 32 bits.
  void check_batch() const {
    if (batch_ > kMaxSeqlen)
      checks_.refuse(fmt::format("batch is {}; expected at most {}", batch_, kMaxSeqlen));
  }

  void check_tensors() {
    check_cache_ranks(cache_, checks_);
    check_rows({"cache.k", cache_.k}, {"cache.k_scale", cache_.k_scale}, cache_.k.size(3));
    check_rows({"cache.v", cache_.v}, {"cache.v_scale", cache_.v_scale}, cache_.v.size(3));
    if (is_paged_) {
      check_pages();
    } else if (cache_.batch_idx) {
      check_indices({"cache.batch_idx", cache_.batch_idx});
    } else if (batch_ > cache_.k.size(0)) {
      checks_.refuse(
          fmt::format("cache.k has {} slots for a batch of {}; expected a slot for every sequence",
                      cache_.k.size(0), batch_));
    }
    check_indices({"cache.seqlens", cache_.seqlens});
    if (cache_.left_padding) check_indices({"cache.left_padding", cache_.left_padding});
  }

  /// Of k or v: numbers, or codes and their scales.
  void check_rows(const NamedTensor& rows, const NamedTensor& scale, std::int64_t head_dim) const {
    const std::array shape{cache_.k.size(0), cache_.k.size(1), cache_.k.size(2), head_dim};
    if (quant::is_code(rows.view.dtype())) {
      checks_.check({rows.name, rows.view, has_append()}, rows.view.dtype(), shape);
      return check_codes(rows, scale);
    }
    if (!is_float(rows.view.dtype())) {
      checks_.refuse(fmt::format("{} is {}; expected f32, f16 or bf16, or codes: i8 or e4m3",
                                 rows.name, name(rows.view.dtype())));
    }
    checks_.check_float({rows.name, rows.view, has_append()}, shape);
    if (scale.view) {
      checks_.refuse(fmt::format("{} is given and {} is {}; expected none, only codes have scales",
                                 scale.name, rows.name, name(rows.view.dtype())));
    }
  }

  void check_codes(const NamedTensor& rows, const NamedTensor& scale) const {
    if (rows.view.size(3) > kMaxHeadDim) {
      checks_.refuse(fmt::format("{} is {} with head_dim {}; expected at most {} of codes",
                                 rows.name, name(rows.view.dtype()), rows.view.size(3),
                                 kMaxHeadDim));
    }
    if (has_latent_values(cache_)) {
      checks_.refuse(fmt::format(
          "cache.v is the first columns of cache.k, which is {}; expected f32, f16 or bf16, or "
          "values of their own: codes of keys have the scale of the whole key",
          name(cache_.k.dtype())));
    }
    if (scale.view.rank() == 3) return check_scales_of_rows(scale);
    check_given_scale(rows, scale);
  }

  /// Written with the rows.
  void check_scales_of_rows(const NamedTensor& scale) const {
    checks_.check({scale.name, scale.view, has_append()}, Dtype::f32,
                  std::array{cache_.k.size(0), cache_.k.size(1), cache_.k.size(2)});
  }

  void check_given_scale(const NamedTensor& rows, const NamedTensor& scale) const {
    const bool is_of_heads = scale.view.rank() == 2 && scale.view.size(0) == batch_ &&
                             scale.view.size(1) == cache_.k.size(2);
    const bool is_of_all = scale.view.rank() == 1 && scale.view.size(0) == 1;
    if (scale.view.dtype() != Dtype::f32 || (!is_of_heads && !is_of_all)) {
      checks_.refuse(fmt::format(
          "{} is {} and {} is {}; expected f32 [{}, {}, {}], a scale for each row and head, or of "
          "e4m3 a given one: [{}, {}] or [1]",
          rows.name, name(rows.view.dtype()), scale.name, shown(scale.view), cache_.k.size(0),
          cache_.k.size(1), cache_.k.size(2), batch_, cache_.k.size(2)));
    }
    if (rows.view.dtype() == Dtype::i8) {
      checks_.refuse(fmt::format(
          "{} is {} and {} is i8; expected a scale for each row and head: int8 has no NaN, which "
          "the scale of its row shows",
          scale.name, shown(scale.view), rows.name));
    }
    checks_.check_memory(scale);
    if (checks_.is_host()) check_given_values(scale);
  }

  void check_given_values(const NamedTensor& scale) const {
    const RowScales scales = row_scales(scale.view);
    const std::int64_t batch = scale.view.rank() == 2 ? batch_ : 1;
    const std::int64_t heads = scale.view.rank() == 2 ? cache_.k.size(2) : 1;
    for (std::int64_t i = 0; i < batch * heads; ++i) {
      const float value = *scales.at(i / heads, {}, i % heads);
      if (value > 0 && std::isfinite(value)) continue;
      checks_.refuse(fmt::format("{}[{}, {}] is {}; expected a finite number above 0", scale.name,
                                 i / heads, i % heads, value));
    }
  }

  bool has_append() const { return append_.k || append_.v; }

  void check_pages() const {
    const std::string_view by = cache_.page_table ? "cache.page_table" : "cache.page_indptr";
    if (cache_.batch_idx) {
      checks_.refuse(fmt::format(
          "cache.batch_idx is given beside {}; expected one of them, {} each sequence's "
          "pages",
          by, cache_.page_table ? "the rows of the table already name" : "it already names"));
    }
    if (cache_.page_table) {
      check_page_table();
    } else {
      check_page_list();
    }
    if (cache_.k.size(1) < 1) {
      checks_.refuse(fmt::format("cache.k is {}; expected pages of at least one row: {}",
                                 shown(cache_.k), kPagesShape));
    }
  }

  void check_page_table() const {
    const TensorView& table = cache_.page_table;
    if (cache_.page_indptr || cache_.page_indices) {
      checks_.refuse(
          "cache.page_table is given beside cache.page_indptr or cache.page_indices; expected the "
          "table, or both of them");
    }
    if (!is_index(table.dtype()) || table.rank() != 2 || table.size(0) != batch_) {
      checks_.refuse(fmt::format("cache.page_table is {}; expected i32 or i64 [{}, max_pages]",
                                 shown(table), batch_));
    }
    checks_.check_memory({"cache.page_table", table});
  }

  void check_page_list() const {
    const TensorView& indptr = cache_.page_indptr;
    const TensorView& indices = cache_.page_indices;
    if (!is_index(indptr.dtype()) || indptr.rank() != 1 || indptr.size(0) != batch_ + 1) {
      checks_.refuse(fmt::format("cache.page_indptr is {}; expected i32 or i64 [{}]", shown(indptr),
                                 batch_ + 1));
    }
    if (!is_index(indices.dtype()) || indices.rank() != 1) {
      checks_.refuse(fmt::format("cache.page_indices is {}; expected i32 or i64 [num_indices]",
                                 shown(indices)));
    }
    checks_.check_memory({"cache.page_indptr", indptr});
    checks_.check_memory({"cache.page_indices", indices});
    if (checks_.is_host()) check_offsets();
  }

  void check_offsets() const {
    std::int64_t before = 0;
    for (std::int64_t i = 0; i <= batch_; ++i) {
      const std::int64_t offset = index_at(cache_.page_indptr, i);
      if (i == 0 ? offset != 0 : offset < before) {
        checks_.refuse(fmt::format(
            "cache.page_indptr[{}] is {} after {}; expected offsets from 0 that never decrease", i,
            offset, before));
      }
      before = offset;
    }
    if (before > cache_.page_indices.size(0)) {
      checks_.refuse(
          fmt::format("cache.page_indptr ends at {}; expected at most {}, the entries of "
                      "cache.page_indices",
                      before, cache_.page_indices.size(0)));
    }
  }

  void check_indices(const NamedTensor& e) const {
    if (!is_index(e.view.dtype()) || e.view.rank() != 1 || e.view.size(0) != batch_) {
      checks_.refuse(
          fmt::format("{} is {}; expected i32 or i64 [{}]", e.name, shown(e.view), batch_));
    }
    checks_.check_memory(e);
  }

  void check_append() {
    if (!has_append()) {
      if (append_.cu_seqlens)
        checks_.refuse("append.cu_seqlens is given without append.k; expected new tokens");
      return;
    }
    if (has_latent_values(cache_)) {
      check_latent_append();
    } else if (!append_.k || !append_.v) {
      checks_.refuse(fmt::format("append.{} is given without append.{}; expected both or neither",
                                 append_.k ? "k" : "v", append_.k ? "v" : "k"));
    }
    if (append_.cu_seqlens) return check_packed_append();
    if (append_.k.rank() != 4) {
      checks_.refuse(
          fmt::format("append.k is {}; expected rank 4: [batch, seqlen_new, num_heads_kv, "
                      "head_dim_qk], or packed, with cu_seqlens",
                      shown(append_.k)));
    }
    const std::int64_t each = new_tokens_.each;
    checks_.check_float({"append.k", append_.k},
                        std::array{batch_, each, cache_.k.size(2), cache_.k.size(3)});
    if (!append_.v) return;
    checks_.check_float({"append.v", append_.v},
                        std::array{batch_, each, cache_.v.size(2), cache_.v.size(3)});
  }

  /// Values that are the first columns of keys are written with them.
  void check_latent_append() const {
    if (append_.v) {
      checks_.refuse(
          "append.v is given and cache.v is the first columns of cache.k; expected append.k alone, "
          "whose first columns become the values");
    }
    if (rotary_) {
      checks_.refuse(
          "rotary is given, append.k has the values in its first columns, and rotary would turn "
          "them; expected keys and queries whose last columns are turned already");
    }
  }

  void check_packed_append() const {
    if (append_.k.rank() != 3) {
      checks_.refuse(
          fmt::format("append.k is {}; expected rank 3: [total_new, num_heads_kv, head_dim_qk] "
                      "(packed: append.cu_seqlens is given)",
                      shown(append_.k)));
    }
    const std::int64_t total = append_.k.size(0);
    checks_.check_float({"append.k", append_.k},
                        std::array{total, cache_.k.size(2), cache_.k.size(3)});
    if (append_.v) {
      checks_.check_float({"append.v", append_.v},
                          std::array{total, cache_.v.size(2), cache_.v.size(3)});
    }
    check_packed_offsets({.name = "append.cu_seqlens",
                          .cu_seqlens = append_.cu_seqlens,
                          .batch = batch_,
                          .total = total,
                          .longest = kMaxSeqlen,
                          .longest_name = "what 32 bits count"},
                         checks_);
  }

  // ---- one sequence ----

  /// Returns its keys after the append.
  std::int64_t check_sequence(std::int64_t i) const {
    const CachedSequence s = cached_sequence(cache_, i);
    if (cache_.left_padding && s.begin < 0) {
      checks_.refuse(fmt::format("cache.left_padding[{}] is {}; expected >= 0", i, s.begin));
    }
    if (s.end < s.begin) {
      checks_.refuse(fmt::format(
          "cache.seqlens[{}] is {}; expected at least {}", i, s.end,
          cache_.left_padding ? fmt::format("{}, its left padding", s.begin) : std::string("0")));
    }
    check_capacity(s, i);
    if (is_paged_) {
      check_pages_of(s, i);
    } else if (s.slot < 0 || s.slot >= cache_.k.size(0)) {
      checks_.refuse(
          fmt::format("cache.batch_idx[{}] is {}; expected 0 to {}, the slots of cache.k", i,
                      s.slot, cache_.k.size(0) - 1));
    }
    return s.end - s.begin + new_tokens_.count(i);
  }

  void check_capacity(const CachedSequence& s, std::int64_t i) const {
    const std::int64_t capacity = std::min(cache_capacity(cache_, i), kMaxSeqlen);
    const std::int64_t num_new = new_tokens_.count(i);
    if (s.end <= capacity - num_new) return;
    const std::string appended =
        num_new > 0 ? fmt::format(" and {} more are appended", num_new) : std::string();
    checks_.refuse(fmt::format("cache.seqlens[{}] is {}{}; expected at most {} rows in all, {}", i,
                               s.end, appended, capacity, room(i)));
  }

  std::string room(std::int64_t i) const {
    if (!is_paged_) return "the capacity of a slot";
    const std::int64_t pages =
        checks_.is_host() ? pages_.num_entries(i) : cache_capacity(cache_) / cache_.k.size(1);
    return fmt::format("{} pages of {} rows", pages, cache_.k.size(1));
  }

  /// "cache.page_table[1, 3]", where page 3 of sequence 1 is named.
  std::string entry_name(std::int64_t i, std::int64_t page) const {
    if (cache_.page_table) return fmt::format("cache.page_table[{}, {}]", i, page);
    return fmt::format("cache.page_indices[{}]", index_at(cache_.page_indptr, i) + page);
  }

  /// Only the pages that hold its keys: entries of left padding and behind the end may be anything.
  void check_pages_of(const CachedSequence& s, std::int64_t i) const {
    const std::int64_t page_size = cache_.k.size(1);
    const std::int64_t end = s.end + new_tokens_.count(i);
    if (end == s.begin) return;
    for (std::int64_t page = s.begin / page_size; page <= (end - 1) / page_size; ++page) {
      const std::int64_t entry = pages_.at(i, page);
      if (entry >= 0 && entry < cache_.k.size(0)) continue;
      checks_.refuse(fmt::format(
          "{} is {}; expected 0 to {}, a page of cache.k, since sequence {} has {} rows",
          entry_name(i, page), entry, cache_.k.size(0) - 1, i, end));
    }
  }

  // ---- where new tokens go ----

  struct Destination {
    std::int64_t page = 0, sequence = 0, index = 0;  // index: of the page table
    bool operator<(const Destination& other) const { return page < other.page; }
  };

  /// A slot or page takes new tokens of one sequence at most, and once.
  void check_destinations() const {
    std::vector<Destination> destinations;
    const std::int64_t rows = cache_.k.size(1);
    for (std::int64_t i = 0; i < batch_; ++i) {
      const CachedSequence s = cached_sequence(cache_, i);
      const std::int64_t num_new = new_tokens_.count(i);
      if (num_new == 0) continue;
      if (!is_paged_) {
        destinations.push_back({s.slot, i, 0});
        continue;
      }
      for (std::int64_t page = s.end / rows; page <= (s.end + num_new - 1) / rows; ++page)
        destinations.push_back({pages_.at(i, page), i, page});
    }
    std::ranges::stable_sort(destinations, {}, &Destination::page);
    const auto twice = std::ranges::adjacent_find(destinations, {}, &Destination::page);
    if (twice == destinations.end()) return;
    const Destination& a = *twice;
    const Destination& b = *(twice + 1);
    if (is_paged_) {
      checks_.refuse(fmt::format(
          "{} is {}, as {}; expected a page of its own for every place that tokens are appended to",
          entry_name(b.sequence, b.index), b.page, entry_name(a.sequence, a.index)));
    }
    checks_.refuse(
        fmt::format("cache.batch_idx[{}] is {}, as cache.batch_idx[{}]; expected a slot of its own "
                    "for every sequence that tokens are appended to",
                    b.sequence, b.page, a.sequence));
  }

  // ---- rotation of the new tokens ----

  void check_rotary() const {
    const Rotary& r = *rotary_;
    if (r.cos.rank() != 2) {
      checks_.refuse(fmt::format(
          "rotary.cos is {}; expected rank 2: [max_positions, rotary_dim / 2]", shown(r.cos)));
    }
    const std::array shape{r.cos.size(0), r.cos.size(1)};
    checks_.check_float({"rotary.cos", r.cos}, shape);
    checks_.check_float({"rotary.sin", r.sin}, shape);
    const std::int64_t widest = std::min(cache_.k.size(3), kMaxRotaryDim);
    if (r.cos.size(1) > widest / 2) {
      checks_.refuse(
          fmt::format("rotary.cos is {}, for a rotary_dim of 2 x {}; expected at most {}, {}",
                      shown(r.cos), r.cos.size(1), widest,
                      widest < kMaxRotaryDim ? "the head_dim_qk of cache.k" : "the widest head"));
    }
    if (r.positions) check_positions(r);
    if (append_.k && !r.positions && checks_.is_host()) check_reach(r);
  }

  /// One for every new token, and for every query: each the other's.
  void check_positions(const Rotary& r) const {
    const bool is_packed = r.positions.rank() == 1;
    const bool has_shape = is_packed || (r.positions.rank() == 2 && r.positions.size(0) == batch_);
    if (!is_index(r.positions.dtype()) || !has_shape || (append_.k && !fits_new_tokens(r))) {
      checks_.refuse(fmt::format("rotary.positions is {}; expected i32 or i64 {}",
                                 shown(r.positions), positions_shape()));
    }
    checks_.check_memory({"rotary.positions", r.positions});
    if (append_.k) refuse_far_positions(r, new_tokens_, batch_, checks_);
  }

  bool fits_new_tokens(const Rotary& r) const {
    if (new_tokens_.is_packed())
      return r.positions.rank() == 1 && r.positions.size(0) == append_.k.size(0);
    return r.positions.rank() == 2 && r.positions.size(1) == new_tokens_.each;
  }

  std::string positions_shape() const {
    if (!append_.k) return fmt::format("[{}, seqlen_q], or [total_q]", batch_);
    if (new_tokens_.is_packed()) return fmt::format("[{}]", append_.k.size(0));
    return fmt::format("[{}, {}]", batch_, new_tokens_.each);
  }

  void check_reach(const Rotary& r) const {
    for (std::int64_t i = 0; i < batch_; ++i) {
      const CachedSequence s = cached_sequence(cache_, i);
      const std::int64_t num_new = new_tokens_.count(i);
      if (num_new > 0) refuse_short_rotary(r, i, s.end - s.begin + num_new, checks_);
    }
  }

  const KvCache& cache_;
  const Append& append_;
  const std::optional<Rotary>& rotary_;
  const std::int64_t batch_;
  const SequenceRows new_tokens_;
  const bool is_paged_;
  const PageIndex pages_;
  const TensorChecks checks_;
};

}  // namespace

void check_cache_ranks(const KvCache& cache, const TensorChecks& checks) {
  for (const auto& [label, view] :
       {std::pair{"cache.k", &cache.k}, std::pair{"cache.v", &cache.v}}) {
    if (view->rank() == 4) continue;
    checks.refuse(fmt::format("{} is {}; expected rank 4: {}", label, shown(*view),
                              is_paged(cache) ? kPagesShape : kCacheShape));
  }
}

CachedSequence cached_sequence(const KvCache& cache, std::int64_t index) {
  return {.slot = cache.batch_idx ? index_at(cache.batch_idx, index) : index,
          .begin = cache.left_padding ? index_at(cache.left_padding, index) : 0,
          .end = index_at(cache.seqlens, index)};
}

CacheRow cache_row(const KvCache& cache, std::int64_t slot, std::int64_t row) {
  if (!is_paged(cache)) return {slot, row};
  const std::int64_t page_size = cache.k.size(1);
  return {PageIndex(cache).at(slot, row / page_size), row % page_size};
}

namespace {

std::int64_t rows_of_pages(const KvCache& cache, std::int64_t num_pages) {
  std::int64_t rows = 0;
  const bool is_huge = __builtin_mul_overflow(num_pages, cache.k.size(1), &rows);
  return is_huge ? kMaxSeqlen : rows;
}

}  // namespace

std::int64_t cache_capacity(const KvCache& cache, std::int64_t index) {
  if (!is_paged(cache)) return cache.k.size(1);
  return rows_of_pages(cache, PageIndex(cache).num_entries(index));
}

std::int64_t cache_capacity(const KvCache& cache) {
  if (!is_paged(cache)) return cache.k.size(1);
  const bool has_table = static_cast<bool>(cache.page_table);
  return rows_of_pages(cache, has_table ? cache.page_table.size(1) : cache.page_indices.size(0));
}

std::int64_t SequenceRows::count(std::int64_t sequence) const {
  if (!is_packed()) return each;
  return index_at(cu_seqlens, sequence + 1) - index_at(cu_seqlens, sequence);
}

std::int64_t SequenceRows::begin(std::int64_t sequence) const {
  return is_packed() ? index_at(cu_seqlens, sequence) : 0;
}

std::int64_t SequenceRows::total(std::int64_t batch) const {
  return is_packed() ? index_at(cu_seqlens, batch) : batch * each;
}

SequenceRows::Token SequenceRows::token(std::int64_t row, std::int64_t batch) const {
  if (!is_packed()) return {row / each, row % each};
  // The last sequence that begins at the row or before it. (Clang 14 has no ranges of numbers.)
  std::int64_t sequence = 0;
  for (std::int64_t behind = batch; behind - sequence > 1;) {
    const std::int64_t middle = sequence + (behind - sequence) / 2;
    (begin(middle) <= row ? sequence : behind) = middle;
  }
  return {sequence, row - begin(sequence)};
}

SequenceRows sequence_rows(const TensorView& tokens, const TensorView& cu_seqlens) {
  if (tokens.rank() == 4) return {.each = tokens.size(1)};
  return {.cu_seqlens = cu_seqlens};
}

SequenceRows new_tokens(const Append& append) {
  return append.k ? sequence_rows(append.k, append.cu_seqlens) : SequenceRows{};
}

RowScales row_scales(const TensorView& scale) {
  // Who appends writes through it, and validation has asked whether it may.
  RowScales scales{.data = const_cast<float*>(static_cast<const float*>(scale.data()))};
  if (scale.rank() == 3) {
    scales.are_of_rows = true;
    scales.slot_stride = scale.stride(0);
    scales.row_stride = scale.stride(1);
    scales.head_stride = scale.stride(2);
  } else if (scale.rank() == 2) {
    scales.sequence_stride = scale.stride(0);
    scales.head_stride = scale.stride(1);
  }
  return scales;
}

bool has_latent_values(const KvCache& cache) { return are_first_columns(cache.v, cache.k); }

GrownCache grown_cache(const KvCache& cache, const Append& append) {
  return {.cache = cache,
          .new_tokens = new_tokens(append),
          .total_new = append.cu_seqlens ? append.k.size(0) : 0};
}

std::int64_t rotary_position(const Rotary& rotary, const SequenceRows& tokens,
                             const SequenceRows::Token& token, std::int64_t seqlen_kv) {
  const auto& [sequence, index] = token;
  if (!rotary.positions) return seqlen_kv - tokens.count(sequence) + index;
  if (tokens.is_packed()) return index_at(rotary.positions, tokens.begin(sequence) + index);
  return index_at(rotary.positions, sequence, index);
}

void refuse_short_rotary(const Rotary& rotary, std::int64_t sequence, std::int64_t seqlen_kv,
                         const TensorChecks& checks) {
  if (seqlen_kv <= rotary.cos.size(0)) return;
  checks.refuse(
      fmt::format("rotary.cos has {} rows; expected at least {}, since sequence {} has a new token "
                  "at position {}",
                  rotary.cos.size(0), seqlen_kv, sequence, seqlen_kv - 1));
}

Rotary rotary_of_queries(const Rotary& rotary) {
  Rotary result = rotary;
  if (rotary.positions_q) result.positions = rotary.positions_q;
  return result;
}

void refuse_far_positions(const Rotary& rotary, const SequenceRows& tokens, std::int64_t batch,
                          const TensorChecks& checks, std::string_view name) {
  if (!checks.is_host()) return;
  for (std::int64_t i = 0; i < batch; ++i) {
    for (std::int64_t token = 0; token < tokens.count(i); ++token) {
      const std::int64_t position = rotary_position(rotary, tokens, {i, token}, 0);
      if (position >= 0 && position < rotary.cos.size(0)) continue;
      checks.refuse(fmt::format("{}[{}] is {}; expected 0 to {}, the rows of rotary.cos", name,
                                tokens.is_packed() ? fmt::to_string(tokens.begin(i) + token)
                                                   : fmt::format("{}, {}", i, token),
                                position, rotary.cos.size(0) - 1));
    }
  }
}

std::int64_t validate_cache(const KvCache& cache, const Append& append,
                            const std::optional<Rotary>& rotary, std::int64_t batch,
                            std::string_view where) {
  return CacheDoor(cache, append, rotary, batch, where).check();
}

}  // namespace fovea
