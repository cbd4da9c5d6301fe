#include "mask/mask_loads.hpp"

#include <algorithm>
#include <array>

#include "core/check.hpp"
#include "mask/element_range.hpp"

namespace fovea::mask {
namespace {

using expr::Interval;
using expr::Node;

// Above the tile, a rectangle of a dense mask is still scanned when that costs no more than one evaluation of a
// program.
constexpr std::int64_t kCheapScan = 64;

using Index = std::array<std::int64_t, kMaxRank>;

/// The rectangle of elements that a load may touch; dimensions of stride 0 are one element wide.
struct Region {
  Index first{};
  Index last{};
};

Region region_of(const TensorView& view, const Interval* indices) {
  Region region;
  for (int d = 0; d < view.rank(); ++d) {
    const auto i = static_cast<std::size_t>(d);
    region.first[i] = static_cast<std::int64_t>(indices[d].lo);
    region.last[i] =
        view.stride(d) == 0 ? region.first[i] : static_cast<std::int64_t>(indices[d].hi);
  }
  return region;
}

std::int64_t num_elements(const Region& region, int rank) {
  std::int64_t count = 1;
  for (int d = 0; d < rank; ++d) {
    const auto i = static_cast<std::size_t>(d);
    count *= region.last[i] - region.first[i] + 1;
  }
  return count;
}

bool is_all(const Interval& range, Dtype dtype) {
  const Interval all = range_of_dtype(dtype);
  return range.lo <= all.lo && range.hi >= all.hi && range.may_be_nan == all.may_be_nan;
}

/// Dimensions [begin, end) of a part of a region that is looked at as one.
struct Dims {
  int begin = 0, end = 1;
};

/// Hull of part(index) over the region, index being that of a part's first element; stops when nothing more can be
/// learnt.
Interval hull_of_parts(const TensorView& view, const Region& region, Dims dims, auto&& part) {
  Index idx = region.first;
  Interval range = part(idx);
  for (;;) {
    int d = view.rank() - 1;
    for (; d >= 0; --d) {
      const auto i = static_cast<std::size_t>(d);
      if (dims.begin <= d && d < dims.end) continue;
      if (++idx[i] <= region.last[i]) break;
      idx[i] = region.first[i];
    }
    if (d < 0 || is_all(range, view.dtype())) return range;
    range = hull(range, part(idx));
  }
}

std::int64_t offset_of(const TensorView& view, const Index& idx) {
  std::int64_t offset = 0;
  for (int d = 0; d < view.rank(); ++d) offset += idx[static_cast<std::size_t>(d)] * view.stride(d);
  return offset;
}

/// Of bools side by side: dense masks, which are read as a whole.
Interval scan_bools(const TensorView& view, const Region& region) {
  const int rows_dim = view.rank() - 2;
  const auto extent = [&](int dim) {
    const auto i = static_cast<std::size_t>(dim);
    return region.last[i] - region.first[i] + 1;
  };
  return hull_of_parts(view, region, {rows_dim, view.rank()}, [&](const Index& idx) {
    return range_of_bool_rows(
        {.first = static_cast<const std::uint8_t*>(view.data()) + offset_of(view, idx),
         .num_rows = extent(rows_dim),
         .row_stride = view.stride(rows_dim),
         .num_cols = extent(rows_dim + 1)});
  });
}

Interval scan_region(const TensorView& view, const Region& region) {
  if (view.rank() == 0) return range_of_elements(view, {.offset = 0, .count = 1, .stride = 1});
  const int line_dim = view.rank() - 1;
  const std::int64_t stride = view.stride(line_dim);
  if (view.rank() > 1 && view.dtype() == Dtype::boolean && stride == 1) {
    return scan_bools(view, region);
  }
  const auto along = static_cast<std::size_t>(line_dim);
  return hull_of_parts(view, region, {line_dim, line_dim + 1}, [&](const Index& idx) {
    return range_of_elements(view, {.offset = offset_of(view, idx),
                                    .count = region.last[along] - region.first[along] + 1,
                                    .stride = stride});
  });
}

}  // namespace

PositionReads::PositionReads(const std::vector<const Node*>& nodes) {
  for (const Node* node : nodes) {
    const bool is_position =
        node->op == expr::Op::variable &&
        (node->variable == expr::Variable::q_idx || node->variable == expr::Variable::kv_idx);
    const bool has_position_operand = std::ranges::any_of(
        node->operands,
        [this](const expr::NodePtr& operand) { return found_.contains(operand->digest); });
    if (is_position || has_position_operand) found_.insert(node->digest);
  }
}

MaskLoads::MaskLoads(const std::vector<const Node*>& nodes, const Captures& captures) {
  if (captures.tensors.empty()) return;
  const PositionReads reads_positions(nodes);
  for (const Node* node : nodes) {
    if (node->op != expr::Op::load) continue;
    Load& load = loads_.emplace_back();
    load.node = node;
    for (std::size_t d = 0; d < node->operands.size(); ++d) {
      if (!reads_positions(*node->operands[d])) continue;
      ++load.num_position_dims;
      load.last_position_dim = static_cast<int>(d);
    }
    const auto captured = std::ranges::find(captures.tensors, node->name, &CapturedTensor::name);
    FOVEA_ASSERT(captured != captures.tensors.end());
    const TensorView& view = load.view = captured->view;
    const bool has_data = view.data() != nullptr && view.spec().num_elements() > 0;
    if (load.num_position_dims == 1 && has_data) load.table.emplace(view, load.last_position_dim);
  }
}

bool MaskLoads::depend_on_positions() const {
  return std::ranges::any_of(loads_, [](const Load& load) { return load.num_position_dims > 0; });
}

const MaskLoads::Load& MaskLoads::find(const Node& load) const {
  const auto found =
      std::ranges::find_if(loads_, [&](const Load& l) { return l.node->digest == load.digest; });
  FOVEA_ASSERT(found != loads_.end());
  return *found;
}

Interval MaskLoads::range(const Node& node, const Interval* indices, Scan scan) const {
  const Load& load = find(node);
  const TensorView& view = load.view;
  if (view.data() == nullptr || view.spec().num_elements() == 0) {
    return range_of_dtype(view.dtype());
  }
  const Region region = region_of(view, indices);
  if (load.table) {
    const int dim = load.last_position_dim;
    const auto i = static_cast<std::size_t>(dim);
    return hull_of_parts(view, region, {dim, dim + 1}, [&](const Index& idx) {
      return load.table->range(idx, region.first[i], region.last[i]);
    });
  }
  const bool is_uniform = load.num_position_dims == 0;
  if (is_uniform || scan == Scan::allowed || num_elements(region, view.rank()) <= kCheapScan) {
    return scan_region(view, region);
  }
  return range_of_dtype(view.dtype());
}

}  // namespace fovea::mask
