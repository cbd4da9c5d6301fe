// Numbers as codes of eight bits: int8, -127 to 127, by a scale that rows or keys share. All arithmetic that decides a
// code is f32, each operation rounded to nearest even, as src/reference/quantized.cpp has it: codes and scales have
// defined bits. Rows of Q become codes in sm90/forward/query_codes.cuh and quantize_q.cuh, keys in
// quantize_k.cuh.
#pragma once

#include "common/codes.cuh"
#include "common/element_pair.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "shared/element.h"
#include "shared/quantize_k.h"

namespace fovea::cuda {

/// Of 16 bytes of a row.
using EightNumbers = float[8];

template <Element element>
FOVEA_DEVICE void unpack(const ptx::U32x4& chunk, EightNumbers& x) {
  const std::uint32_t pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = low_of<element>(pairs[i]);
    x[2 * i + 1] = high_of<element>(pairs[i]);
  }
}

FOVEA_DEVICE float greatest_of(const EightNumbers& x) {
  float greatest = 0;
#pragma unroll
  for (int d = 0; d < 8; ++d) greatest = ptx::max_ftz(greatest, ptx::abs(x[d]));
  return greatest;
}

/// Its reciprocal is finite: zeros are no case of their own.
FOVEA_DEVICE float scale_of_codes(float greatest) {
  constexpr float kLeast = 0x1p-126F;
  const float scale = ptx::div_rn(greatest, 127.0F);
  return scale > kLeast ? scale : kLeast;
}

FOVEA_DEVICE float given_scale(const GivenScales& scales, std::int32_t sequence,
                               std::int32_t kv_head) {
  return ptx::ld_global(scales.data + sequence * scales.sequence_stride +
                        kv_head * scales.head_stride);
}

/// `reciprocal`: of a scale; of int8 one of which all of them are at most 127, so that none is rounded to -128. e4m3
/// saturates.
template <Codes codes = Codes::int8>
FOVEA_DEVICE ptx::U32x2 codes_of(const EightNumbers& x, float reciprocal) {
  const auto four = [&](int d) -> std::uint32_t {
    const float a = ptx::mul_rn(x[d], reciprocal), b = ptx::mul_rn(x[d + 1], reciprocal);
    const float c = ptx::mul_rn(x[d + 2], reciprocal), e = ptx::mul_rn(x[d + 3], reciprocal);
    if constexpr (codes == Codes::e4m3) return ptx::cvt_e4m3x2(a, b) | ptx::cvt_e4m3x2(c, e) << 16U;
    return ptx::cvt_s8x4(a, b, c, e);
  };
  return {four(0), four(4)};
}

/// Rounded.
template <Element element>
FOVEA_DEVICE ptx::U32x4 elements_of(const EightNumbers& x) {
  return {pair_of<element>(x[0], x[1]), pair_of<element>(x[2], x[3]), pair_of<element>(x[4], x[5]),
          pair_of<element>(x[6], x[7])};
}

/// At most the greatest element of f16: an infinity would be no rounding of a number. bf16 has the range of f32.
template <Element element>
FOVEA_DEVICE float limited(float x) {
  constexpr float kGreatest = 65504;
  if constexpr (element == Element::bf16) return x;
  return ptx::min_ftz(ptx::max_ftz(x, -kGreatest), kGreatest);
}

/// The numbers that codes stand for.
FOVEA_DEVICE void unpack_codes(ptx::U32x2 codes, float scale, EightNumbers& x) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const FourNumbers four = numbers_of_int8(half == 0 ? codes.x : codes.y, scale);
#pragma unroll
    for (int d = 0; d < 4; ++d) x[4 * half + d] = four.x[d];
  }
}

/// Those with what was subtracted before, as elements: one rounding to f32, and theirs.
template <Element element>
FOVEA_DEVICE ptx::U32x4 elements_of_codes(ptx::U32x2 codes, float scale, const EightNumbers& mean) {
  EightNumbers x;
  unpack_codes(codes, 1.0F, x);
#pragma unroll
  for (int d = 0; d < 8; ++d) x[d] = limited<element>(ptx::fma_rn(x[d], scale, mean[d]));
  return elements_of<element>(x);
}

}  // namespace fovea::cuda
