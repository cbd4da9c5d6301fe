#include "cuda/driver/tensor_map.hpp"

#include <fmt/format.h>

#include <string>

#include "fovea/error.hpp"

namespace fovea::cuda::driver {
namespace {

constexpr int kNoInterleave = 0;
constexpr int kFillWithZero = 0;

template <class Numbers>
std::string list(const Numbers& numbers, int rank) {
  std::string text;
  for (int i = 0; i < rank; ++i)
    text += fmt::format("{}{}", i == 0 ? "" : ", ", numbers[static_cast<std::size_t>(i)]);
  return "[" + text + "]";
}

std::string describe(const TensorMapSpec& spec, const void* address) {
  return fmt::format("address {}, shape {}, strides {} bytes, box {}, innermost first", address,
                     list(spec.shape, spec.rank), list(spec.stride_bytes, spec.rank),
                     list(spec.box, spec.rank));
}

}  // namespace

TensorMap encode_tiled(const Driver& driver, const TensorMapSpec& spec, const void* address) {
  const Api& api = driver.api();
  if (api.encode_tiled == nullptr)
    throw Unsupported("this driver has no tensor maps (cuTensorMapEncodeTiled); expected CUDA 12");
  constexpr std::array<std::uint32_t, TensorMapSpec::kMaxRank> kUnitSteps{1, 1, 1, 1, 1};
  TensorMap map{};
  const Result result = api.encode_tiled(
      &map, static_cast<int>(spec.element), static_cast<std::uint32_t>(spec.rank),
      const_cast<void*>(address), spec.shape.data(), spec.stride_bytes.data() + 1, spec.box.data(),
      kUnitSteps.data(), kNoInterleave, static_cast<int>(spec.swizzle),
      static_cast<int>(spec.l2_promotion), kFillWithZero);
  if (result != kSuccess) driver.check(result, "cuTensorMapEncodeTiled", describe(spec, address));
  return map;
}

TensorMap encode_tiled(const DeviceContext& context, const TensorMapSpec& spec,
                       const void* address) {
  const ContextScope scope(context);
  return encode_tiled(context.driver(), spec, address);
}

}  // namespace fovea::cuda::driver
