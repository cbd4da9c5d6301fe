#include "cpu/prefix_places.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace fovea::cpu {
namespace {

void set(const TensorView& view, std::int64_t i, std::int64_t value) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  static_cast<std::int32_t*>(view.mutable_data())[i] =
      static_cast<std::int32_t>(std::clamp<std::int64_t>(value, 0, kMost));
}

class Places {
 public:
  Places(const PrefixSource& source, const PrefixPlaces& places)
      : s_(source), p_(places), pages_(source.cache) {}

  void write() const {
    for (std::int64_t group = 0; group < s_.num_groups; ++group) write_group(group);
    if (p_.cu_seqlens) set(p_.cu_seqlens, s_.num_groups, queries_before(s_.batch));
    std::int64_t row = 0;
    for (std::int64_t i = 0; i < s_.batch; ++i) {
      write_sequence(i);
      if (p_.rows) write_rows(i, row);
    }
    if (!p_.rows) return;
    for (; row < s_.num_rows; ++row) write_row(row, 0, 0, 0, 0);  // nobody's
  }

 private:
  std::int64_t group_begin(std::int64_t group) const {
    return s_.cu_sequences ? index_at(s_.cu_sequences, group) : 0;
  }

  /// Queries of the sequences before `sequence`.
  std::int64_t queries_before(std::int64_t sequence) const {
    if (s_.queries.is_packed()) return index_at(s_.queries.cu_seqlens, sequence);
    return sequence * s_.queries.each;
  }

  /// Of its first sequence. A group without sequences has no rows, and keys that nobody asks for.
  void write_group(std::int64_t group) const {
    const std::int64_t first = group_begin(group);
    if (p_.cu_seqlens) set(p_.cu_seqlens, group, queries_before(first));
    const bool is_empty = first >= s_.batch;
    const CachedSequence leader = is_empty ? CachedSequence{} : cached_sequence(s_.cache, first);
    std::int64_t padding = leader.begin;
    if (p_.slots) set(p_.slots, group, leader.slot);
    if (p_.page_table) {
      const std::int64_t page_size = s_.cache.k.size(1);
      write_pages(group, first, padding / page_size);
      padding %= page_size;
    }
    if (p_.prefix_left_padding) set(p_.prefix_left_padding, group, padding);
    set(p_.prefix_seqlens, group, is_empty ? 0 : padding + s_.num_keys);
  }

  /// Entries behind those that it has are those of nothing.
  void write_pages(std::int64_t group, std::int64_t first, std::int64_t begin) const {
    const std::int64_t width = p_.page_table.size(1);
    const std::int64_t has = first < s_.batch ? pages_.num_entries(first) : 0;
    for (std::int64_t page = 0; page < width; ++page) {
      const bool exists = begin + page < has;
      set(p_.page_table, group * width + page, exists ? pages_.at(first, begin + page) : 0);
    }
  }

  void write_sequence(std::int64_t i) const {
    const CachedSequence s = cached_sequence(s_.cache, i);
    const std::int64_t padding = s.begin + s_.num_keys - s_.skipped_rows;
    const std::int64_t end = s.end + s_.new_tokens.count(i) - s_.skipped_rows;
    // Sequences without queries may be shorter than the prefix.
    set(p_.suffix_seqlens, i, std::max(end, padding));
    if (p_.suffix_left_padding) set(p_.suffix_left_padding, i, padding);
  }

  void write_rows(std::int64_t i, std::int64_t& row) const {
    const CachedSequence s = cached_sequence(s_.cache, i);
    const std::int64_t count = s_.queries.count(i);
    const std::int64_t seqlen_kv = s.end - s.begin + s_.new_tokens.count(i);
    for (std::int64_t q_idx = 0; q_idx < count; ++q_idx)
      write_row(row++, i, q_idx, count, seqlen_kv);
  }

  void write_row(std::int64_t row, std::int64_t sequence, std::int64_t q_idx, std::int64_t seqlen_q,
                 std::int64_t seqlen_kv) const {
    const std::int64_t at = row * kPrefixRowColumns;
    set(p_.rows, at, sequence);
    set(p_.rows, at + 1, q_idx);
    set(p_.rows, at + 2, seqlen_q);
    set(p_.rows, at + 3, seqlen_kv);
  }

  const PrefixSource& s_;
  const PrefixPlaces& p_;
  const PageIndex pages_;
};

}  // namespace

void write_prefix_places(const PrefixSource& source, const PrefixPlaces& places) {
  Places(source, places).write();
}

}  // namespace fovea::cpu
