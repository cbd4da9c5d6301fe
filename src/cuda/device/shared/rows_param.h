// A tensor whose dtype is known when the kernel runs: of kernels that serve all of them.
#pragma once

#include "shared/element.h"
#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

/// [batch, seqlen, heads, head_dim].
struct RowsParam {
  BshdParam rows;
  Element element;
  std::int32_t is_aligned;  // rows are whole pieces of 16 bytes
};

}  // namespace fovea::cuda
