// What a pass (common/passes.cuh) makes of values in shared memory, and of elements of O that infinity reaches: 16
// bytes at a time, for kernels whose values lie there as TMA wrote them.
#pragma once

#include "common/passes.cuh"
#include "ptx/base.cuh"
#include "ptx/memory.cuh"
#include "shared/element.h"

namespace fovea::cuda::sm90 {

using ptx::SharedAddress;

/// Values as a pass wants them, wherever in `bytes` of a tile they lie: four chunks of 8 a lane at once, or two,
/// which nearly always are finite.
template <Element element, int bytes>
FOVEA_DEVICE void rewrite_values(SharedAddress begin, int lane, Pass pass) {
  constexpr int kStep = 16 * 32;
  constexpr int kAtOnce = bytes % (4 * kStep) == 0 ? 4 : 2;
  static_assert(bytes % (kAtOnce * kStep) == 0);
  if (pass == Pass::low) pass = Pass::finite;
#pragma unroll 1
  for (SharedAddress at = begin + 16 * lane; at < begin + bytes; at += kAtOnce * kStep) {
    bool is_redo = false;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      is_redo |= has_nonfinite<element>(ptx::ld_shared<ptx::U32x4>(at + i * kStep));
    if (is_redo) {
#pragma unroll 1
      for (int i = 0; i < 4 * kAtOnce; ++i) {
        const SharedAddress pair = at + i / 4 * kStep + i % 4 * 4;
        ptx::st_shared(pair, values_of_pass<element>(ptx::ld_shared<std::uint32_t>(pair), pass));
      }
    } else if (is_indicator(pass)) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) ptx::st_shared(at + i * kStep, ptx::U32x4{});
    }
  }
}

/// An element of O, and the infinity that reaches it where the indicators' sum is not 0: their sum. Bits.
template <Element element>
FOVEA_DEVICE std::uint32_t with_infinity(std::uint32_t bits, std::uint32_t indicator, Pass pass) {
  const std::uint32_t reached = kInfinityBits<element> | (pass == Pass::positive ? 0 : 0x8000U);
  if (indicator == 0) return bits;
  const bool is_finite = (bits & 0x7fffU) < kInfinityBits<element>;
  return is_finite || bits == reached ? reached : 0x7fffU;
}

/// Of 8. Each round handles the pair that is in front, and puts it behind the others: short code.
template <Element element>
FOVEA_DEVICE ptx::U32x4 with_infinities(ptx::U32x4 sums, ptx::U32x4 indicators, Pass pass) {
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t pair =
        with_infinity<element>(sums.x & 0xffffU, indicators.x & 0xffffU, pass) |
        with_infinity<element>(sums.x >> 16U, indicators.x >> 16U, pass) << 16U;
    sums = {sums.y, sums.z, sums.w, pair};
    indicators = {indicators.y, indicators.z, indicators.w, 0};
  }
  return sums;
}

}  // namespace fovea::cuda::sm90
