// What inputs and outputs of kernels are made of.
#pragma once

#include "shared/types.h"

namespace fovea::cuda {

enum class Element : std::uint8_t { f32, f16, bf16 };

constexpr std::int32_t element_bytes(Element element) { return element == Element::f32 ? 4 : 2; }

}  // namespace fovea::cuda
