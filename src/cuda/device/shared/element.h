// What inputs and outputs of kernels are made of.
#pragma once

#include "shared/types.h"

namespace fovea::cuda {

enum class Element : std::uint8_t { f32, f16, bf16 };

constexpr std::int32_t element_bytes(Element element) { return element == Element::f32 ? 4 : 2; }

/// What a cache holds in place of elements: codes of 8 bits, numbers by a scale.
enum class Codes : std::uint8_t { none, int8, e4m3 };

/// What memory and tensor cores make of the elements of an operand.
struct ElementTraits {
  std::int32_t bytes;
  std::int32_t of_chunk;  // 16 bytes: what a thread copies, and what a swizzle moves
  std::int32_t of_panel;  // 128 bytes: a row of a box of TMA, the span of its swizzle
  std::int32_t k_step;    // 32 bytes: the depth of one product of tensor cores
  bool can_be_mn_major;   // of wgmma; else both operands must be K-major
};

constexpr ElementTraits element_traits(Element element) {
  const std::int32_t bytes = element_bytes(element);
  return {bytes, 16 / bytes, 128 / bytes, 32 / bytes, bytes == 2};
}

}  // namespace fovea::cuda
