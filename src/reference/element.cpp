#include "reference/element.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace fovea::reference {

namespace {

template <typename T>
T read(const TensorView& view, std::int64_t offset) {
  return static_cast<const T*>(view.data())[offset];
}

/// 2^(exponent - 7) (1 + mantissa / 8); exponent 0: 2^-6 mantissa / 8.
double of_e4m3(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15;
  const int mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits >= 128 ? -magnitude : magnitude;
}

double saturated(std::int64_t value) {
  using Int32 = std::numeric_limits<std::int32_t>;
  return static_cast<double>(std::clamp<std::int64_t>(value, Int32::min(), Int32::max()));
}

/// Elements of the sub-tensor that begins at `at`, whose dimensions before at.dim are chosen.
struct SubTensor {
  int dim = 0;
  std::int64_t offset = 0;
};
void append_elements(const TensorView& view, const SubTensor& at, std::vector<double>& values) {
  if (at.dim == view.rank()) return values.push_back(element(view, at.offset));
  for (std::int64_t i = 0; i < view.size(at.dim); ++i) {
    append_elements(view, {at.dim + 1, at.offset + i * view.stride(at.dim)}, values);
  }
}

}  // namespace

double element(const TensorView& view, std::int64_t offset) {
  switch (view.dtype()) {
    case Dtype::f32:
      return read<float>(view, offset);
    case Dtype::f16:
      return static_cast<float>(read<float16>(view, offset));
    case Dtype::bf16:
      return static_cast<float>(read<bfloat16>(view, offset));
    case Dtype::boolean:  // any non-zero byte is true, whatever wrote it
      return read<std::uint8_t>(view, offset) != 0 ? 1 : 0;
    case Dtype::u8:
      return read<std::uint8_t>(view, offset);
    case Dtype::i8:
      return read<std::int8_t>(view, offset);
    case Dtype::i32:
      return read<std::int32_t>(view, offset);
    case Dtype::i64:
      return saturated(read<std::int64_t>(view, offset));
    case Dtype::e4m3:
      return of_e4m3(read<std::uint8_t>(view, offset));
  }
  return 0;
}

std::vector<double> elements(const TensorView& view) {
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(view.spec().num_elements()));
  append_elements(view, {}, values);
  return values;
}

}  // namespace fovea::reference
