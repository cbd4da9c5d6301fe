#include "cuda/emulator/tensor_map.hpp"

#include <fmt/format.h>

#include "fovea/error.hpp"

#include "cuda/emulator/tma.hpp"

namespace fovea::cuda::emulator {
namespace {

constexpr std::uint64_t kAlignment = 16, kMostStride = std::uint64_t{1} << 40;
constexpr std::uint32_t kMostBox = 256;

void require(bool holds, const std::string& text) {
  if (!holds) throw InvalidArgument("encode_tensor_map: " + text);
}

}  // namespace

std::uint32_t bytes_of(driver::TensorMapElement element) {
  switch (element) {
    case driver::TensorMapElement::u8:
      return 1;
    case driver::TensorMapElement::u16:
    case driver::TensorMapElement::f16:
    case driver::TensorMapElement::bf16:
      return 2;
    case driver::TensorMapElement::u32:
    case driver::TensorMapElement::s32:
    case driver::TensorMapElement::f32:
      return 4;
  }
  return 0;
}

TensorMapFields encode_fields(const driver::TensorMapSpec& spec, const void* address) {
  require(spec.rank >= 1 && spec.rank <= 5, fmt::format("rank is {}; expected 1 to 5", spec.rank));
  const auto base = reinterpret_cast<std::uintptr_t>(address);
  require(base % kAlignment == 0, "the address is not a multiple of 16");
  TensorMapFields fields{};
  fields.mark = kTensorMapMark;
  fields.address = base;
  fields.rank = static_cast<std::uint8_t>(spec.rank);
  fields.element = static_cast<std::uint8_t>(spec.element);
  fields.swizzle = static_cast<std::uint8_t>(spec.swizzle);
  for (int i = 0; i < spec.rank; ++i) {
    const auto d = static_cast<std::size_t>(i);
    require(spec.box[d] >= 1 && spec.box[d] <= kMostBox,
            fmt::format("box[{}] is {}; expected 1 to 256", i, spec.box[d]));
    fields.shape[d] = spec.shape[d];
    fields.box[d] = static_cast<std::uint16_t>(spec.box[d]);
    if (i == 0) continue;
    require(spec.stride_bytes[d] % kAlignment == 0 && spec.stride_bytes[d] < kMostStride,
            fmt::format("stride_bytes[{}] is {}; expected a multiple of 16 below 2^40", i,
                        spec.stride_bytes[d]));
    fields.stride_bytes[d - 1] = spec.stride_bytes[d];
  }
  const std::uint32_t inner_bytes = spec.box[0] * bytes_of(spec.element);
  require(inner_bytes % kAlignment == 0,
          fmt::format("a row of the box has {} bytes; expected a multiple of 16", inner_bytes));
  const std::uint32_t span = 16U << fields.swizzle;
  require(fields.swizzle == 0 || inner_bytes <= span,
          fmt::format("a row of the box has {} bytes; the swizzle takes {}", inner_bytes, span));
  return fields;
}

}  // namespace fovea::cuda::emulator
