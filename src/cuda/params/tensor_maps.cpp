#include "cuda/params/tensor_maps.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace fovea::cuda {
namespace {

/// TMA's strides are multiples of 16 bytes below 2^40, its dimensions have at most 2^32 elements
/// (cuTensorMapEncodeTiled).
constexpr std::int64_t kStrideBytes = 16;
constexpr std::int64_t kStrideEnd = std::int64_t{1} << 40;
constexpr std::int64_t kMostElements = std::int64_t{1} << 32;
/// What a swizzle of 128 bytes spans.
constexpr std::int64_t kPanelBytes = 128;

/// A multiple of so many elements is one of 16 bytes.
std::int64_t stride_elements(Dtype dtype) {
  return kStrideBytes / static_cast<std::int64_t>(size_bytes(dtype));
}

/// Why TMA cannot have a tensor of these strides; empty: it can.
std::string why_no_tensor_map(std::string_view label, const TensorSpec& spec) {
  const auto last = static_cast<std::size_t>(spec.rank) - 1;
  const std::int64_t step = stride_elements(spec.dtype);
  if (spec.shape[last] % step != 0) {
    return fmt::format("{} has head_dim {}; expected a multiple of {}", label, spec.shape[last],
                       step);
  }
  if (spec.strides[last] != 1) {
    return fmt::format("{} has stride {} along head_dim; expected 1", label, spec.strides[last]);
  }
  for (std::size_t dim = 0; dim < last; ++dim) {
    if (spec.shape[dim] > 1 && (spec.strides[dim] <= 0 || spec.strides[dim] % step != 0)) {
      return fmt::format("{} has stride {} in dimension {}; expected a positive multiple of {}",
                         label, spec.strides[dim], dim, step);
    }
    if (spec.shape[dim] > 1 && spec.strides[dim] >= kStrideEnd / kStrideBytes * step) {
      return fmt::format("{} has stride {} in dimension {}; expected less than 2^40 bytes", label,
                         spec.strides[dim], dim);
    }
    if (spec.shape[dim] > kMostElements)
      return fmt::format("{} has size {} in dimension {}; expected at most 2^32", label,
                         spec.shape[dim], dim);
  }
  return "";
}

}  // namespace

std::int64_t panels_of(std::int64_t head_dim) {
  return (head_dim + kPanelElements - 1) / kPanelElements * kPanelElements;
}

TensorMapEncoder encoder_of(const driver::Driver& driver) {
  return [&driver](const driver::TensorMapSpec& spec, const void* address) {
    const driver::TensorMap map = driver::encode_tiled(driver, spec, address);
    TensorMapParam param;
    static_assert(sizeof(param) == sizeof(map));
    std::memcpy(&param, &map, sizeof(param));
    return param;
  };
}

std::string why_no_tensor_maps(
    std::initializer_list<std::pair<std::string_view, const TensorSpec*>> tensors) {
  for (const auto& [label, spec] : tensors) {
    if (std::string why = why_no_tensor_map(label, *spec); !why.empty()) return why;
  }
  return "";
}

bool have_tensor_maps(std::initializer_list<const TensorView*> tensors) {
  constexpr std::uintptr_t kAlignedBytes = 16;
  return std::ranges::all_of(tensors, [](const TensorView* tensor) {
    return reinterpret_cast<std::uintptr_t>(tensor->data()) % kAlignedBytes == 0 &&
           why_no_tensor_map("", tensor->spec()).empty();
  });
}

std::int32_t rows_of_box(const ForwardSpec& spec, std::int32_t page_size) {
  return spec.is_paged ? std::gcd(spec.tile_kv, page_size) : spec.tile_kv;
}

namespace {

/// Of 16 bits, or a code.
driver::TensorMapElement element_of_map(Dtype dtype) {
  if (size_bytes(dtype) == 1) return driver::TensorMapElement::u8;
  return dtype == Dtype::f16 ? driver::TensorMapElement::f16 : driver::TensorMapElement::bf16;
}

/// (head_dim, seqlen, heads, batch); or, where heads of a box are neighbours, (head_dim, heads, seqlen, batch).
driver::TensorMapSpec four_dimensions(const TensorView& t, bool has_neighbours = false) {
  driver::TensorMapSpec spec{.element = element_of_map(t.dtype()), .rank = 4};
  const int last = t.rank() - 1;
  const int row = last - 2, head = last - 1;
  const int order[] = {last, has_neighbours ? head : row, has_neighbours ? row : head, last - 3};
  for (std::size_t i = 0; i < 4; ++i) {
    const int dim = order[i];
    const std::int64_t size = dim >= 0 ? t.size(dim) : 1;
    // The stride of a dimension of one element is never walked, but must be one that TMA has.
    const std::int64_t stride = size > 1 ? t.stride(dim) : stride_elements(t.dtype());
    spec.shape[i] = static_cast<std::uint64_t>(size);
    spec.stride_bytes[i] = static_cast<std::uint64_t>(stride) * size_bytes(t.dtype());
  }
  return spec;
}

/// What L2 fetches where some bytes are asked for: 256 where a head's rows are as many or several times that, else 128,
/// of which fewer are a neighbour's.
driver::TensorMapL2Promotion promotion_of(const TensorView& t) {
  const std::int64_t row_bytes = t.size(t.rank() - 1) * size_bytes(t.dtype());
  return row_bytes % 256 == 0 ? driver::TensorMapL2Promotion::bytes_256
                              : driver::TensorMapL2Promotion::bytes_128;
}

}  // namespace

TensorMapParam tensor_map(const TensorMapEncoder& encode, const TensorView& t, std::int64_t rows,
                          std::int64_t panel) {
  driver::TensorMapSpec spec = four_dimensions(t);
  spec.box = {static_cast<std::uint32_t>(panel), static_cast<std::uint32_t>(rows), 1, 1};
  spec.swizzle = panel == kPanelElements ? driver::TensorMapSwizzle::bytes_128
                                         : driver::TensorMapSwizzle::bytes_64;
  spec.l2_promotion = promotion_of(t);
  return encode(spec, t.data());
}

TensorMapParam tensor_map_of_heads(const TensorMapEncoder& encode, const TensorView& t,
                                   std::int64_t rows, std::int64_t heads) {
  driver::TensorMapSpec spec = four_dimensions(t, true);
  spec.box = {static_cast<std::uint32_t>(kPanelElements), static_cast<std::uint32_t>(heads),
              static_cast<std::uint32_t>(rows), 1};
  return encode(spec, t.data());
}

TensorMapParam tensor_map_of_rows(const TensorMapEncoder& encode, const TensorView& t,
                                  const RowBoxes& boxes) {
  driver::TensorMapSpec spec = four_dimensions(t);
  spec.rank = 5;
  const std::uint64_t width = spec.shape[0];
  // Of codes a row may be narrower than a panel of theirs.
  const auto of_panel = kPanelBytes / static_cast<std::uint64_t>(size_bytes(t.dtype()));
  const bool is_narrow = size_bytes(t.dtype()) == 1 && width < of_panel;
  const std::uint64_t panel = is_narrow ? width : of_panel;
  const std::uint64_t panels = boxes.by_panels ? 1 : width / panel;
  spec.shape = {width / panels, spec.shape[1], panels, spec.shape[2], spec.shape[3]};
  spec.stride_bytes = {spec.stride_bytes[0], spec.stride_bytes[1], kPanelBytes,
                       spec.stride_bytes[2], spec.stride_bytes[3]};
  spec.box = {static_cast<std::uint32_t>(panel), static_cast<std::uint32_t>(boxes.rows),
              static_cast<std::uint32_t>(std::min<std::uint64_t>(panels, boxes.most_panels)), 1, 1};
  if (is_narrow) spec.swizzle = driver::TensorMapSwizzle::bytes_64;
  spec.l2_promotion = boxes.l2_promotion;
  return encode(spec, t.data());
}

}  // namespace fovea::cuda
