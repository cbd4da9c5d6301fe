#include "mask/range_table.hpp"

#include <algorithm>

#include "core/ceil_div.hpp"
#include "mask/element_range.hpp"

namespace fovea::mask {
namespace {

using expr::Interval;

// Tiles begin at multiples of 32 in practice, so that a query reads no single elements; 8 keeps the levels above below
// a seventh of the lowest.
constexpr std::int64_t kElementsPerSegment = 32;
constexpr std::int64_t kFanOut = 8;

/// Grows from nothing to the bounds of all that was added.
class Bounds {
 public:
  void add(const Interval& range) {
    range_ = is_empty_ ? range : hull(range_, range);
    is_empty_ = false;
  }
  const Interval& range() const { return range_; }

 private:
  bool is_empty_ = true;
  Interval range_;
};

}  // namespace

RangeTable::RangeTable(const TensorView& view, int dim) : view_(view), dim_(dim) {
  if (view.stride(dim) != 0) extent_ = view.size(dim);
  for (int d = view.rank() - 1; d >= 0; --d) {
    if (d == dim || view.stride(d) == 0) continue;
    line_strides_[static_cast<std::size_t>(d)] = num_lines_;
    num_lines_ *= view.size(d);
  }
  build_lowest_level();
  while (levels_.back().num_segments > kFanOut) build_level_above(levels_.back());
}

RangeTable::Line RangeTable::line_at(const std::array<std::int64_t, kMaxRank>& others) const {
  Line line;
  for (int d = 0; d < view_.rank(); ++d) {
    if (d == dim_) continue;
    const auto i = static_cast<std::size_t>(d);
    line.idx += others[i] * line_strides_[i];
    line.offset += others[i] * view_.stride(d);
  }
  return line;
}

void RangeTable::for_each_line(auto&& visit) const {
  std::array<std::int64_t, kMaxRank> others{};
  for (std::int64_t n = 0; n < num_lines_; ++n) {
    visit(line_at(others));
    for (int d = view_.rank() - 1; d >= 0; --d) {
      const auto i = static_cast<std::size_t>(d);
      if (line_strides_[i] == 0) continue;
      if (++others[i] < view_.size(d)) break;
      others[i] = 0;
    }
  }
}

void RangeTable::build_lowest_level() {
  Level& level = levels_.emplace_back();
  level.num_segments = ceil_div(extent_, kElementsPerSegment);
  level.segments.reserve(static_cast<std::size_t>(num_lines_ * level.num_segments));
  const std::int64_t stride = view_.stride(dim_);
  for_each_line([&](const Line& line) {
    for (std::int64_t begin = 0; begin < extent_; begin += kElementsPerSegment) {
      level.segments.push_back(
          range_of_elements(view_, {.offset = line.offset + begin * stride,
                                    .count = std::min(kElementsPerSegment, extent_ - begin),
                                    .stride = stride}));
    }
  });
}

void RangeTable::build_level_above(const Level& below) {
  Level above;
  above.num_segments = ceil_div(below.num_segments, kFanOut);
  above.segments.reserve(static_cast<std::size_t>(num_lines_ * above.num_segments));
  for (std::int64_t line = 0; line < num_lines_; ++line) {
    const Interval* segments = below.segments.data() + line * below.num_segments;
    for (std::int64_t begin = 0; begin < below.num_segments; begin += kFanOut) {
      Bounds bounds;
      const std::int64_t end = std::min(begin + kFanOut, below.num_segments);
      for (std::int64_t i = begin; i < end; ++i) bounds.add(segments[i]);
      above.segments.push_back(bounds.range());
    }
  }
  levels_.push_back(std::move(above));
}

Interval RangeTable::range(const std::array<std::int64_t, kMaxRank>& others, std::int64_t first,
                           std::int64_t last) const {
  const Line line = line_at(others);
  const std::int64_t stride = view_.stride(dim_);
  Bounds bounds;
  const auto add_elements = [&](std::int64_t begin, std::int64_t end) {
    if (begin >= end) return;
    bounds.add(range_of_elements(
        view_, {.offset = line.offset + begin * stride, .count = end - begin, .stride = stride}));
  };
  if (stride == 0) {
    add_elements(0, 1);
    return bounds.range();
  }

  // Elements outside whole segments are read one by one, then each level gives its segments outside whole ones above.
  std::int64_t begin = ceil_div(first, kElementsPerSegment);
  std::int64_t end =
      last + 1 == extent_ ? levels_.front().num_segments : (last + 1) / kElementsPerSegment;
  if (begin >= end) {
    add_elements(first, last + 1);
    return bounds.range();
  }
  add_elements(first, begin * kElementsPerSegment);
  add_elements(end * kElementsPerSegment, last + 1);
  for (std::size_t l = 0; begin < end; ++l) {
    const Level& level = levels_[l];
    const Interval* segments = level.segments.data() + line.idx * level.num_segments;
    const bool is_top = l + 1 == levels_.size();
    std::int64_t inner_begin = is_top ? end : ceil_div(begin, kFanOut) * kFanOut;
    std::int64_t inner_end = is_top ? end : end / kFanOut * kFanOut;
    if (inner_begin >= inner_end) inner_begin = inner_end = end;
    for (std::int64_t i = begin; i < inner_begin; ++i) bounds.add(segments[i]);
    for (std::int64_t i = inner_end; i < end; ++i) bounds.add(segments[i]);
    begin = inner_begin / kFanOut;
    end = inner_end / kFanOut;
    if (inner_begin == inner_end) break;
  }
  return bounds.range();
}

}  // namespace fovea::mask
