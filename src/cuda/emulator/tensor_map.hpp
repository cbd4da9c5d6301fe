// Tensor maps of the emulator: the host side encodes what cuTensorMapEncodeTiled would take, TMA (tma.cpp) decodes it.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/driver/tensor_map.hpp"

namespace fovea::cuda::emulator {

/// The decoded form of the 128 bytes.
struct TensorMapFields {
  std::uint64_t mark;
  std::uint64_t address;
  std::array<std::uint64_t, 5> shape;
  std::array<std::uint64_t, 4> stride_bytes;  // of dimensions 1 to 4
  std::array<std::uint16_t, 5> box;
  std::uint8_t rank, element;  // driver::TensorMapElement
  std::uint8_t swizzle;        // log2 of the span / 16, 0: none
  std::uint8_t unused[27];
};
static_assert(sizeof(TensorMapFields) == 128, "a tensor map has 128 bytes");

/// Throws InvalidArgument where the driver would refuse. `Map` is ptx::TensorMap, or the driver's: 128 bytes aligned to
/// 64.
TensorMapFields encode_fields(const driver::TensorMapSpec& spec, const void* address);

template <class Map>
Map encode_tensor_map(const driver::TensorMapSpec& spec, const void* address) {
  return __builtin_bit_cast(Map, encode_fields(spec, address));
}

}  // namespace fovea::cuda::emulator
