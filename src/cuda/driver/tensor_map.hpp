// Tensor maps: what TMA reads of a tensor, as 128 opaque bytes. Encoding is arithmetic on the host and
// takes about 50 ns, though the driver asks for a context; a new address alone is an 8-byte store into
// word 0 (measured, sm_90).
#pragma once

#include <array>
#include <cstdint>

#include "cuda/driver/context.hpp"

namespace fovea::cuda::driver {

/// The driver's numbers.
enum class TensorMapElement : int { u8 = 0, u16 = 1, u32 = 2, s32 = 3, f16 = 6, f32 = 7, bf16 = 9 };
enum class TensorMapSwizzle : int { none = 0, bytes_32 = 1, bytes_64 = 2, bytes_128 = 3 };
enum class TensorMapL2Promotion : int { none = 0, bytes_64 = 1, bytes_128 = 2, bytes_256 = 3 };

/// Dimensions innermost first. Elements outside the shape read as zero and are not written.
struct TensorMapSpec {
  static constexpr int kMaxRank = 5;
  TensorMapElement element = TensorMapElement::bf16;
  int rank = 0;
  std::array<std::uint64_t, kMaxRank> shape{};
  // [0] is the element's size and not read; others multiples of 16
  std::array<std::uint64_t, kMaxRank> stride_bytes{};
  std::array<std::uint32_t, kMaxRank> box{};  // elements of one copy, each at most 256
  TensorMapSwizzle swizzle = TensorMapSwizzle::bytes_128;
  TensorMapL2Promotion l2_promotion = TensorMapL2Promotion::bytes_256;
};

/// address: 16-byte aligned. Throws DeviceError where the driver refuses, Unsupported where it has no
/// tensor maps.
TensorMap encode_tiled(const DeviceContext& context, const TensorMapSpec& spec,
                       const void* address);

/// For many maps at once: the calling thread is in a ContextScope, or the driver refuses.
TensorMap encode_tiled(const Driver& driver, const TensorMapSpec& spec, const void* address);

}  // namespace fovea::cuda::driver
