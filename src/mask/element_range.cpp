#include "mask/element_range.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace fovea::mask {
namespace {

using expr::Interval;

template <typename T>
const T* at(const TensorView& view, const ElementSpan& span) {
  return static_cast<const T*>(view.data()) + span.offset;
}

template <typename T>
Interval range_of_ints(const T* first, std::int64_t count, std::int64_t stride) {
  T lo = *first;
  T hi = *first;
  if (stride == 1) {  // the compiler makes vector code of this loop only
    for (std::int64_t i = 1; i < count; ++i) {
      lo = std::min(lo, first[i]);
      hi = std::max(hi, first[i]);
    }
  } else {
    for (std::int64_t i = 1; i < count; ++i) {
      lo = std::min(lo, first[i * stride]);
      hi = std::max(hi, first[i * stride]);
    }
  }
  constexpr double kLeast = std::numeric_limits<std::int32_t>::min();
  constexpr double kGreatest = std::numeric_limits<std::int32_t>::max();
  return {.lo = std::clamp(static_cast<double>(lo), kLeast, kGreatest),
          .hi = std::clamp(static_cast<double>(hi), kLeast, kGreatest)};
}

Interval range_of_bools(const std::uint8_t* first, std::int64_t count, std::int64_t stride) {
  const Interval bytes = range_of_ints(first, count, stride);
  return {.lo = bytes.lo > 0 ? 1.0 : 0.0, .hi = bytes.hi > 0 ? 1.0 : 0.0};
}

template <typename T>
Interval range_of_floats(const T* first, std::int64_t count, std::int64_t stride) {
  float lo = std::numeric_limits<float>::infinity();
  float hi = -lo;
  bool has_nan = false;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>(first[i * stride]);
    has_nan = has_nan || std::isnan(value);
    lo = value < lo ? value : lo;
    hi = value > hi ? value : hi;
  }
  if (lo > hi) return Interval::whole();  // NaN only
  return {.lo = lo, .hi = hi, .may_be_nan = has_nan};
}

}  // namespace

Interval range_of_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::boolean:
      return {.lo = 0, .hi = 1};
    case Dtype::u8:
      return {.lo = 0, .hi = 255};
    case Dtype::i8:
      return {.lo = -128, .hi = 127};
    case Dtype::i32:
    case Dtype::i64:
      return {.lo = std::numeric_limits<std::int32_t>::min(),
              .hi = std::numeric_limits<std::int32_t>::max()};
    case Dtype::f32:
    case Dtype::f16:
    case Dtype::bf16:
    case Dtype::e4m3:
      break;
  }
  return Interval::whole();
}

Interval hull(const Interval& a, const Interval& b) {
  return {.lo = std::min(a.lo, b.lo),
          .hi = std::max(a.hi, b.hi),
          .may_be_nan = a.may_be_nan || b.may_be_nan};
}

Interval range_of_elements(const TensorView& view, const ElementSpan& span) {
  const std::int64_t count = span.stride == 0 ? 1 : span.count;
  switch (view.dtype()) {
    case Dtype::boolean:
      return range_of_bools(at<std::uint8_t>(view, span), count, span.stride);
    case Dtype::u8:
      return range_of_ints(at<std::uint8_t>(view, span), count, span.stride);
    case Dtype::i8:
      return range_of_ints(at<std::int8_t>(view, span), count, span.stride);
    case Dtype::i32:
      return range_of_ints(at<std::int32_t>(view, span), count, span.stride);
    case Dtype::i64:
      return range_of_ints(at<std::int64_t>(view, span), count, span.stride);
    case Dtype::f32:
      return range_of_floats(at<float>(view, span), count, span.stride);
    case Dtype::f16:
      return range_of_floats(at<float16>(view, span), count, span.stride);
    case Dtype::bf16:
      return range_of_floats(at<bfloat16>(view, span), count, span.stride);
    case Dtype::e4m3:  // refused where it is captured
      break;
  }
  return Interval::whole();
}

Interval range_of_bool_rows(const BoolRows& rows) {
  constexpr std::uint64_t kOnes = 0x0101010101010101U;
  constexpr std::uint64_t kHighBits = 0x8080808080808080U;
  constexpr std::int64_t kWord = sizeof(std::uint64_t);
  std::uint64_t any = 0;
  std::uint64_t zeros = 0;  // kHighBits of a word that has a byte of zeros
  for (std::int64_t row = 0; row < rows.num_rows; ++row) {
    const std::uint8_t* bytes = rows.first + row * rows.row_stride;
    std::int64_t i = 0;
    for (; i + kWord <= rows.num_cols; i += kWord) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes + i, sizeof(word));
      any |= word;
      zeros |= (word - kOnes) & ~word & kHighBits;
    }
    for (; i < rows.num_cols; ++i) {
      any |= bytes[i];
      if (bytes[i] == 0) zeros = kHighBits;
    }
    if (any != 0 && zeros != 0) break;
  }
  return {.lo = zeros != 0 ? 0.0 : 1.0, .hi = any != 0 ? 1.0 : 0.0};
}

}  // namespace fovea::mask
