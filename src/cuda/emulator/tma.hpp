// How a box of a tensor map lies in global and in shared memory.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/emulator/function_ref.hpp"
#include "cuda/emulator/tensor_map.hpp"

namespace fovea::cuda::emulator {

inline constexpr std::uint64_t kTensorMapMark = 0x7e45'0a11'ab1e'f0eaU;

std::uint32_t bytes_of(driver::TensorMapElement element);

/// XORs the 16-byte chunk of an address with its 128-byte line, as a swizzle of 16 << `swizzle` bytes does.
inline std::uint32_t swizzled(std::uint32_t address, std::uint32_t swizzle) {
  return address ^ (address >> 7 & ((1U << swizzle) - 1)) << 4;
}

struct Box {
  TensorMapFields map;
  std::array<std::int32_t, 5> origin{};
  bool is_store = false;  // knows the end of the contiguous dimension to 16 bytes only (H200)

  std::uint32_t element_bytes() const {
    return bytes_of(static_cast<driver::TensorMapElement>(map.element));
  }
  std::uint32_t bytes() const;
  /// Visits the box in chunks of 16 bytes: where the chunk lies from the box's start in shared memory, before the
  /// swizzle; the global address of its first element; and how many of its elements, from which on, are inside the
  /// tensor.
  struct Chunk {
    std::uint32_t offset;
    std::uint64_t address;  // of the first inside
    std::uint32_t first_inside, inside;
  };
  void for_chunks(FunctionRef<void(const Chunk&)> visit) const;
};

}  // namespace fovea::cuda::emulator
