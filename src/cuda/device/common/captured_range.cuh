// What a load from a captured tensor may yield over a tile: from the elements themselves where they are few, else from
// the tensor's table of ranges (range_table.cuh), else anything that the dtype holds. Printed tile kinds call
// load_range.
#pragma once

#include "common/range.cuh"
#include "shared/range_table.h"

namespace fovea::cuda::program {

// ---- entries -----------------------------------------------------------------------------------

/// Floats as ints of the same order: -NaN, -inf, ..., -0, 0, ..., inf, NaN. Its own inverse, but for the types.
FOVEA_DEVICE std::int32_t flipped_if_negative(std::int32_t bits) {
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
FOVEA_DEVICE std::int32_t order_of(float a) {
  return flipped_if_negative(ptx::bit_cast<std::int32_t>(a));
}
FOVEA_DEVICE float float_of_order(std::int32_t order) {
  return ptx::bit_cast<float>(flipped_if_negative(order));
}
FOVEA_DEVICE std::int32_t order_of(Int a) { return a.value; }
FOVEA_DEVICE std::int32_t order_of(bool a) { return a ? 1 : 0; }

/// What elements of one kind are bounded by.
struct IntBounds {
  using Range = IntRange;
  FOVEA_DEVICE Range of(Int value) { return value; }
  FOVEA_DEVICE Range of(RangeEntry entry) { return {entry.lo, entry.hi}; }
};
struct BoolBounds {
  using Range = Truth;
  FOVEA_DEVICE Range of(bool value) { return value; }
  FOVEA_DEVICE Range of(RangeEntry entry) { return {entry.hi != 0, entry.lo == 0}; }
  FOVEA_DEVICE Range any() { return any_bool(); }
};
struct FloatBounds {
  using Range = FloatRange;
  FOVEA_DEVICE Range of(float value) { return value; }
  FOVEA_DEVICE Range of(RangeEntry entry) {
    const float lo = float_of_order(entry.lo);
    const float hi = float_of_order(entry.hi);
    return is_nan(lo) || is_nan(hi) ? any_float() : FloatRange(lo, hi, false);
  }
  FOVEA_DEVICE Range any() { return any_float(); }
};

/// The same by dtype; any() is what a load may yield when nothing is known of the data.
template <class Element>
struct BoundsOf : IntBounds {  // i32, i64
  FOVEA_DEVICE IntRange any() { return any_int(); }
};
template <>
struct BoundsOf<std::uint8_t> : IntBounds {
  FOVEA_DEVICE IntRange any() { return {0, 255}; }
};
template <>
struct BoundsOf<std::int8_t> : IntBounds {
  FOVEA_DEVICE IntRange any() { return {-128, 127}; }
};
template <>
struct BoundsOf<Bool> : BoolBounds {};
template <>
struct BoundsOf<float> : FloatBounds {};
template <>
struct BoundsOf<F16> : FloatBounds {};
template <>
struct BoundsOf<Bf16> : FloatBounds {};

template <class Element>
using RangeOf = typename BoundsOf<Element>::Range;

// ---- look-up -----------------------------------------------------------------------------------

// Ranges of more elements, entries or lines than this are not looked at: the whole dtype is the answer.
inline constexpr std::int32_t kMaxElements = 8;
inline constexpr std::int32_t kMaxEntries = 16;
inline constexpr std::int32_t kMaxLines = 16;

inline constexpr std::int32_t kNoTable = -1;

/// A box of elements: what the indices of a load may be, limited to the tensor. `table_dim` alone may be long.
template <class Element, std::int32_t rank, std::int32_t table_dim>
struct Region {
  using Bounds = BoundsOf<Element>;
  using Range = RangeOf<Element>;

  const CapturedTensorParam& tensor;
  std::int32_t first[rank];
  std::int32_t last[rank];

  /// Elements, or lines where there is a table, one after the other.
  FOVEA_DEVICE_MEMBER bool is_small() const {
    std::int64_t count = 1;
    for (std::int32_t dim = 0; dim < rank; ++dim) {
      if (dim != table_dim && tensor.strides[dim] != 0) count *= last[dim] - first[dim] + 1;
      if (count > kMaxLines) return false;  // before it is more than an int holds
    }
    return true;
  }

  /// The hull over dimensions `dim` and on; `offset` and `line` are those of the dimensions before.
  template <std::int32_t dim>
  FOVEA_DEVICE_MEMBER Range hull_from(std::int64_t offset, std::int64_t line) const {
    if constexpr (dim == rank) {
      return line_range(offset, line);
    } else if constexpr (dim == table_dim) {
      return hull_from<dim + 1>(offset, line);
    } else {
      const std::int64_t stride = tensor.strides[dim];
      const std::int32_t extent = stride == 0 ? 1 : tensor.shape[dim];
      const std::int32_t end = stride == 0 ? first[dim] : last[dim];
      const auto at = [&](std::int32_t i) {
        return hull_from<dim + 1>(offset + i * stride, line * extent + (stride == 0 ? 0 : i));
      };
      Range range = at(first[dim]);
#pragma unroll 1
      for (std::int32_t i = first[dim] + 1; i <= end; ++i) range = hull(range, at(i));
      return range;
    }
  }

  FOVEA_DEVICE_MEMBER Range line_range(std::int64_t offset, std::int64_t line) const {
    if constexpr (table_dim == kNoTable) {
      return Bounds::of(element_at<Element>(tensor, offset));
    } else {
      return along_line(offset, line);
    }
  }

  FOVEA_DEVICE_MEMBER Range along_line(std::int64_t offset, std::int64_t line) const {
    const std::int64_t stride = tensor.strides[table_dim];
    const std::int32_t begin = first[table_dim];
    const std::int32_t end = stride == 0 ? begin : last[table_dim];
    if (end - begin < kMaxElements) {
      Range range = Bounds::of(element_at<Element>(tensor, offset + begin * stride));
#pragma unroll 1
      for (std::int32_t i = begin + 1; i <= end; ++i) {
        range = hull(range, Bounds::of(element_at<Element>(tensor, offset + i * stride)));
      }
      return range;
    }
    return from_table(line, begin, end);
  }

  /// From runs, else from groups of runs: both may reach beyond [begin, end], and are right for that.
  FOVEA_DEVICE_MEMBER Range from_table(std::int64_t line, std::int32_t begin,
                                       std::int32_t end) const {
    const auto* entries = static_cast<const RangeEntry*>(tensor.ranges);
    if (entries == nullptr) return BoundsOf<Element>::any();
    const std::int32_t num_runs = (tensor.shape[table_dim] - 1) / kPositionsPerRun + 1;
    const std::int32_t num_groups = (num_runs - 1) / kRunsPerGroup + 1;
    std::int64_t base = line * num_runs;
    std::int32_t first_entry = begin / kPositionsPerRun;
    std::int32_t last_entry = end / kPositionsPerRun;
    if (last_entry - first_entry >= kMaxEntries) {
      base = num_lines() * num_runs + line * num_groups;
      first_entry /= kRunsPerGroup;
      last_entry /= kRunsPerGroup;
    }
    if (last_entry - first_entry >= kMaxEntries) return BoundsOf<Element>::any();
    Range range = Bounds::of(ptx::ld_global_nc(entries + base + first_entry));
#pragma unroll 1
    for (std::int32_t i = first_entry + 1; i <= last_entry; ++i) {
      range = hull(range, Bounds::of(ptx::ld_global_nc(entries + base + i)));
    }
    return range;
  }

  FOVEA_DEVICE_MEMBER std::int64_t num_lines() const {
    std::int64_t count = 1;
    for (std::int32_t dim = 0; dim < rank; ++dim) {
      if (dim != table_dim && tensor.strides[dim] != 0) count *= tensor.shape[dim];
    }
    return count;
  }
};

FOVEA_DEVICE std::int32_t clamped_end(std::int64_t index, std::int32_t extent) {
  const std::int64_t last = extent - 1;
  return static_cast<std::int32_t>(index < 0 ? 0 : index > last ? last : index);
}

/// What tensor[indices...] may be. `table_dim` is the dimension whose table the host had built, or kNoTable.
template <std::int32_t slot, class Element, std::int32_t table_dim, class... Index>
FOVEA_DEVICE RangeOf<Element> load_range(const Captures& captures, Index... indices) {
  const CapturedTensorParam& tensor = captures.tensors[slot];
  constexpr auto rank = static_cast<std::int32_t>(sizeof...(Index));
  const IntRange ranges[rank] = {IntRange(indices)...};
  Region<Element, rank, table_dim> region{tensor, {}, {}};
  for (std::int32_t dim = 0; dim < rank; ++dim) {
    region.first[dim] = clamped_end(ranges[dim].lo, tensor.shape[dim]);
    region.last[dim] = clamped_end(ranges[dim].hi, tensor.shape[dim]);
  }
  return region.is_small() ? region.template hull_from<0>(0, 0) : BoundsOf<Element>::any();
}

}  // namespace fovea::cuda::program
