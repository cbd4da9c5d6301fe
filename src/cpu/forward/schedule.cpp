#include "cpu/forward/schedule.hpp"

#include <algorithm>

#include "cpu/forward/few_rows.hpp"

namespace fovea::cpu {
namespace {

constexpr std::int64_t kFewItemsPerWorker = 2;

}  // namespace

ForwardSchedule::ForwardSchedule(const ForwardCall& call, bool are_splits_side_by_side,
                                 std::int64_t* first_item)
    : call_(call),
      spec_(call.spec),
      are_splits_side_by_side_(are_splits_side_by_side),
      first_item_(first_item),
      few_heads_(choose_few_heads()),
      total_panels_(count_panels()) {
  first_item_[0] = 0;
  for (std::int64_t i = 0; i < num_sequences(); ++i)
    first_item_[i + 1] = first_item_[i] + items_of(call_.sequence(i));
}

// ---- what a sequence has ----

std::int64_t ForwardSchedule::num_tiles(const Sequence& s) const {
  return ceil_div(s.seqlen_kv, spec_.tile_kv);
}

std::int64_t ForwardSchedule::num_panels(const Sequence& s) const {
  return ceil_div(num_rows(s), spec_.lanes);
}

/// Then the items of a sequence are its splits and heads.
bool ForwardSchedule::has_one_panel(const Sequence& s) const { return num_rows(s) <= spec_.lanes; }

bool ForwardSchedule::is_few(const Sequence& s) const {
  return num_rows(s) <= std::min(kFewRows, spec_.lanes);
}

std::int64_t ForwardSchedule::num_splits(const Sequence& s) const {
  if (!has_one_panel(s)) return 1;
  return std::max<std::int64_t>(1, ceil_div(num_tiles(s), spec_.tiles_per_split));
}

void ForwardSchedule::limit_to_split(ForwardItem& item, std::int64_t split) const {
  item.tile_begin = split * spec_.tiles_per_split;
  item.tile_end = std::min(num_tiles(item.sequence), item.tile_begin + spec_.tiles_per_split);
}

// ---- counts ----

std::int64_t ForwardSchedule::count_panels() const {
  std::int64_t panels = 0;
  for (std::int64_t i = 0; i < num_sequences(); ++i)
    panels += num_panels(call_.sequence(i)) * call_.problem.num_heads_kv;
  return panels;
}

/// Heads of an item of few rows: as many as lie together in memory, but enough items for every worker.
std::int64_t ForwardSchedule::choose_few_heads() const {
  std::int64_t items = 0;
  for (std::int64_t i = 0; i < num_sequences(); ++i) {
    const Sequence s = call_.sequence(i);
    if (is_few(s)) items += are_splits_side_by_side_ ? num_splits(s) : 1;
  }
  const std::int64_t num_heads_kv = call_.problem.num_heads_kv;
  std::int64_t heads = heads_at_once(call_.k, num_heads_kv);
  while (heads > 1 &&
         items * ceil_div(num_heads_kv, heads) < kFewItemsPerWorker * call_.plan.num_workers)
    heads = ceil_div(heads, 2);
  return heads;
}

std::int64_t ForwardSchedule::num_head_blocks(const Sequence& s) const {
  return ceil_div(call_.problem.num_heads_kv, is_few(s) ? few_heads_ : 1);
}

/// Panels in each item of a sequence and kv head: fewer towards the end of the call.
std::int64_t ForwardSchedule::panels_per_item(const Sequence& s, std::int64_t kv_head) const {
  const std::int64_t groups = num_sequences() * call_.problem.num_heads_kv;
  const std::int64_t left = groups - s.index * call_.problem.num_heads_kv - kv_head;
  const std::int64_t remaining = ceil_div(total_panels_ * left, groups);
  return std::min(spec_.panels, panels_of_an_item(remaining, call_.plan.num_workers));
}

std::int64_t ForwardSchedule::num_row_blocks(const Sequence& s, std::int64_t kv_head) const {
  return ceil_div(num_panels(s), panels_per_item(s, kv_head));
}

/// Items of one sequence over all its kv heads.
std::int64_t ForwardSchedule::items_of(const Sequence& s) const {
  if (call_.problem.num_heads_q == 0 || s.seqlen_q == 0) return 0;
  if (has_one_panel(s)) return (are_splits_side_by_side_ ? num_splits(s) : 1) * num_head_blocks(s);
  std::int64_t items = 0;
  for (std::int64_t head = 0; head < call_.problem.num_heads_kv; ++head)
    items += num_row_blocks(s, head);
  return items;
}

// ---- items ----

ForwardItem ForwardSchedule::item_at(std::int64_t index) const {
  const std::int64_t* end = first_item_ + num_sequences() + 1;
  const std::int64_t* found = std::upper_bound<const std::int64_t*>(first_item_, end, index) - 1;
  const Sequence s = call_.sequence(found - first_item_);
  const std::int64_t rest = index - *found;
  return has_one_panel(s) ? item_of_one_panel(s, rest) : item_of_rows(s, rest);
}

ForwardItem ForwardSchedule::item_of_one_panel(const Sequence& s, std::int64_t index) const {
  // Rows of neighbouring heads mostly share a memory page: workers read them at the same time.
  const std::int64_t heads = is_few(s) ? few_heads_ : 1;
  const std::int64_t kv_head = index % num_head_blocks(s) * heads;
  ForwardItem item{.sequence = s,
                   .kv_head = kv_head,
                   .num_heads = std::min(heads, call_.problem.num_heads_kv - kv_head),
                   .row_begin = 0,
                   .row_end = num_rows(s),
                   .tile_begin = 0,
                   .tile_end = num_tiles(s)};
  if (are_splits_side_by_side_ && num_splits(s) > 1)
    limit_to_split(item, index / num_head_blocks(s));
  return item;
}

ForwardItem ForwardSchedule::item_of_rows(const Sequence& s, std::int64_t index) const {
  std::int64_t kv_head = 0;
  for (; index >= num_row_blocks(s, kv_head); ++kv_head) index -= num_row_blocks(s, kv_head);
  const std::int64_t block = num_row_blocks(s, kv_head) - 1 - index;  // causal: the longest first
  const std::int64_t block_rows = panels_per_item(s, kv_head) * spec_.lanes;
  return {.sequence = s,
          .kv_head = kv_head,
          .row_begin = block * block_rows,
          .row_end = std::min(num_rows(s), (block + 1) * block_rows),
          .tile_begin = 0,
          .tile_end = num_tiles(s)};
}

}  // namespace fovea::cpu
