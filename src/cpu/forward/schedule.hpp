// How a call of attention_forward is cut into work items, none of which waits for another. A function of shapes and
// threads; no cut changes a bit of any row. Read row_panel.hpp next.
#pragma once

#include <cstdint>

#include "cpu/forward/call.hpp"

namespace fovea::cpu {

/// Rows [row_begin, row_end) of one kv head against kv tiles [tile_begin, tile_end). Row r is query r % seqlen_q of
/// head kv_head * group + r / seqlen_q.
struct ForwardItem {
  Sequence sequence;
  std::int64_t kv_head = 0;
  // Of k and v from kv_head on, with rows of their own: more than one where rows are few.
  std::int64_t num_heads = 1;
  std::int64_t row_begin = 0, row_end = 0;
  std::int64_t tile_begin = 0, tile_end = 0;

  std::int64_t num_rows() const { return row_end - row_begin; }
};

class ForwardSchedule {
 public:
  /// first_item [num_sequences + 1] is written. Splits of one sequence are items of their own where they run side by
  /// side, else one item: the bits are the same.
  ForwardSchedule(const ForwardCall& call, bool are_splits_side_by_side, std::int64_t* first_item);

  std::int64_t num_items() const { return first_item_[num_sequences()]; }
  /// Causal masks: the longest first.
  ForwardItem item_at(std::int64_t index) const;

  bool are_splits_side_by_side() const { return are_splits_side_by_side_; }
  /// A function of the sequence's own lengths alone, so that its bits are.
  std::int64_t num_splits(const Sequence& s) const;
  void limit_to_split(ForwardItem& item, std::int64_t split) const;

  /// So few rows, all in one panel, that K and V are read row by row (few_rows.hpp).
  bool is_few(const Sequence& s) const;
  std::int64_t num_rows(const Sequence& s) const { return call_.problem.group * s.seqlen_q; }

 private:
  std::int64_t num_sequences() const { return call_.problem.num_sequences; }
  std::int64_t num_tiles(const Sequence& s) const;
  std::int64_t num_panels(const Sequence& s) const;
  bool has_one_panel(const Sequence& s) const;
  std::int64_t num_head_blocks(const Sequence& s) const;
  std::int64_t panels_per_item(const Sequence& s, std::int64_t kv_head) const;
  std::int64_t num_row_blocks(const Sequence& s, std::int64_t kv_head) const;
  std::int64_t items_of(const Sequence& s) const;
  ForwardItem item_of_one_panel(const Sequence& s, std::int64_t index) const;
  ForwardItem item_of_rows(const Sequence& s, std::int64_t index) const;
  std::int64_t choose_few_heads() const;
  std::int64_t count_panels() const;

  const ForwardCall& call_;
  const ForwardSpec& spec_;
  const bool are_splits_side_by_side_;
  std::int64_t* const first_item_;
  const std::int64_t few_heads_;  // of an item of few rows
  const std::int64_t total_panels_;
};

}  // namespace fovea::cpu
