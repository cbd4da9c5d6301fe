// What score and mask programs read beside positions: captured tensors and run-time scalars, as kernel parameters.
// Which slot is which, and the dtype and rank of each, is printed into the program's text (expr/print_cuda.hpp).
#pragma once

#include "shared/types.h"

namespace fovea::cuda {

inline constexpr int kMaxCapturedTensors = 8;
inline constexpr int kMaxCapturedScalars = 8;
inline constexpr int kMaxCapturedRank = 6;

struct CapturedTensorParam {
  const void* data;
  // least and greatest value of each run of positions (range_table), null where nothing asks for it
  const void* ranges;
  std::int64_t strides[kMaxCapturedRank];  // in elements
  std::int32_t shape[kMaxCapturedRank];
};

/// int, float or bool by the slot; floats by their bits.
struct Captures {
  CapturedTensorParam tensors[kMaxCapturedTensors];
  std::int32_t scalars[kMaxCapturedScalars];
};

}  // namespace fovea::cuda
