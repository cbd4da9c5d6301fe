#include "fovea/tensor.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>

#include "core/check.hpp"

namespace fovea {
namespace {

bool is_row_major(const TensorSpec& spec) {
  std::int64_t expected = 1;
  for (auto i = static_cast<std::size_t>(spec.rank); i-- > 0;) {
    if (spec.strides[i] != expected) return false;
    if (spec.shape[i] > 0 && __builtin_mul_overflow(expected, spec.shape[i], &expected))
      return i == 0;
  }
  return true;
}

}  // namespace

TensorSpec make_spec(Dtype dtype, std::span<const std::int64_t> shape,
                     std::span<const std::int64_t> strides) {
  if (shape.size() > kMaxRank) {
    invalid("", fmt::format("tensor rank is {}; expected at most {}", shape.size(), kMaxRank));
  }
  if (!strides.empty() && strides.size() != shape.size()) {
    invalid("", fmt::format("tensor has {} strides for {} dimensions; expected one each",
                            strides.size(), shape.size()));
  }
  TensorSpec spec{.dtype = dtype, .rank = static_cast<int>(shape.size())};
  std::int64_t row_major = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    if (shape[i] < 0) {
      invalid("", fmt::format("tensor dimension {} is {}; expected >= 0", i, shape[i]));
    }
    spec.shape[i] = shape[i];
    spec.strides[i] = strides.empty() ? row_major : strides[i];
    if (shape[i] > 0 && __builtin_mul_overflow(row_major, shape[i], &row_major)) {
      invalid("",
              fmt::format("tensor shape [{}] has more than 2^63 elements", fmt::join(shape, ", ")));
    }
  }
  return spec;
}

TensorSpec make_spec_within(std::size_t num_elements, Dtype dtype,
                            std::span<const std::int64_t> shape) {
  const TensorSpec spec = make_spec(dtype, shape);
  if (static_cast<std::uint64_t>(spec.num_elements()) > num_elements) {
    invalid("",
            fmt::format("tensor shape [{}] has {} elements; expected at most {}, those of the span",
                        fmt::join(shape, ", "), spec.num_elements(), num_elements));
  }
  return spec;
}

std::string to_string(Device device) {
  if (device.kind == Device::Kind::cpu) return "cpu";
  return fmt::format("{}:{}", device.kind == Device::Kind::cuda ? "cuda" : "rocm", device.index);
}

/// Of any spec, also one made by hand that no tensor can have: refusals show it.
std::string to_string(const TensorSpec& spec) {
  if (spec.rank < 0 || spec.rank > kMaxRank)
    return fmt::format("{} of rank {}", name(spec.dtype), spec.rank);
  const auto rank = static_cast<std::size_t>(spec.rank);
  const std::span shape(spec.shape.data(), rank);
  const std::span strides(spec.strides.data(), rank);
  std::string text = fmt::format("{} [{}]", name(spec.dtype), fmt::join(shape, ", "));
  if (!is_row_major(spec)) text += fmt::format(" strides [{}]", fmt::join(strides, ", "));
  return text;
}

void TensorView::refuse_rank(int rank) {
  invalid("", fmt::format("tensor rank is {}; expected 0 to {}", rank, kMaxRank));
}

TensorView TensorView::permuted(std::initializer_list<int> order) const {
  std::uint32_t seen = 0;
  for (const int dim : order) {
    if (dim < 0 || dim >= spec_.rank || (seen & (1U << dim)) != 0) {
      invalid("", fmt::format("permuted order is ({}); expected each of 0..{} once",
                              fmt::join(order, ", "), spec_.rank - 1));
    }
    seen |= 1U << dim;
  }
  if (static_cast<int>(order.size()) != spec_.rank) {
    invalid("",
            fmt::format("permuted order has {} dimensions; expected {}", order.size(), spec_.rank));
  }
  TensorView result = *this;
  std::size_t to = 0;
  for (const int from : order) {
    result.spec_.shape[to] = spec_.shape[static_cast<std::size_t>(from)];
    result.spec_.strides[to] = spec_.strides[static_cast<std::size_t>(from)];
    ++to;
  }
  return result;
}

TensorView as_words32(const TensorView& words) {
  static_assert(std::endian::native == std::endian::little);
  const TensorSpec& from = words.spec();
  if (from.dtype != Dtype::i64 || from.rank < 1 || from.rank >= kMaxRank) {
    invalid("", fmt::format("as_words32 of {}; expected i64 of rank 1 to {}",
                            words ? to_string(from) : "nothing", kMaxRank - 1));
  }
  TensorSpec spec = from;
  const auto last = static_cast<std::size_t>(spec.rank++);
  spec.dtype = Dtype::i32;
  for (std::size_t dim = 0; dim < last; ++dim) {
    if (__builtin_mul_overflow(from.strides[dim], 2, &spec.strides[dim])) {
      invalid("", fmt::format("as_words32 of {}; expected strides below 2^62", to_string(from)));
    }
  }
  spec.shape[last] = 2;
  spec.strides[last] = 1;
  if (words.is_mutable()) return {words.mutable_data(), spec};
  return {words.data(), spec};
}

}  // namespace fovea
