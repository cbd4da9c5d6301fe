#include "cuda/emulator/operand.hpp"

#include "cuda/emulator/tma.hpp"

namespace fovea::cuda::emulator {
namespace {

constexpr std::uint32_t kWindow = 0x3ffff, kField = 0x3fff, kChunk = 16;

std::uint32_t field(std::uint64_t descriptor, int bit) {
  return static_cast<std::uint32_t>(descriptor >> bit & kField) << 4;
}

}  // namespace

OperandLayout::OperandLayout(std::uint64_t descriptor, bool is_k_major)
    : start_(field(descriptor, 0)),
      leading_(field(descriptor, 16)),
      stride_(field(descriptor, 32)),
      base_offset_(static_cast<std::uint32_t>(descriptor >> 49 & 7)),
      swizzle_((4 - static_cast<std::uint32_t>(descriptor >> 62)) & 3),
      is_k_major_(is_k_major) {}

std::uint32_t OperandLayout::chunk_address(std::uint32_t index, std::uint32_t chunk) const {
  const std::uint32_t span = kChunk << swizzle_;
  const std::uint32_t block = index / 8, within = index % 8;
  std::uint32_t address = start_ + within * span;
  if (is_k_major_) {
    address += block * stride_ + (swizzle_ == 0 ? chunk * leading_ : chunk * kChunk);
  } else if (swizzle_ == 0) {
    address += block * leading_ + chunk * stride_;
  } else {
    const std::uint32_t per_panel = span / kChunk;
    address += block * stride_ + chunk / per_panel * leading_ + chunk % per_panel * kChunk;
  }
  return swizzled(address, swizzle_) & kWindow;
}

}  // namespace fovea::cuda::emulator
