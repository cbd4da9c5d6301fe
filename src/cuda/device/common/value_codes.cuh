// Codes of values that are not finite, in a row tile that is computed again: common/passes.cuh has the idea.
#pragma once

#include "common/passes.cuh"
#include "shared/quantize_v.h"

namespace fovea::cuda {

/// Four neighbouring codes of a channel, as this pass wants them; given(i): the bits of the element that code i of them
/// stands for, since one code is of all that is not finite. Whatever is finite has no part in a pass of indicators.
template <Element element, class Given>
FOVEA_DEVICE std::uint32_t codes_of_pass(std::uint32_t codes, Pass pass, Given&& given) {
  std::uint32_t rewritten = 0;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    std::uint32_t code = codes >> 8 * i & 0xffU;
    if (code == kNanCode)
      code = value_of_pass<element>(given(i), pass) != 0 ? kOneCode : 0;
    else if (is_indicator(pass))
      code = 0;
    rewritten |= code << 8 * i;
  }
  return rewritten;
}

}  // namespace fovea::cuda
