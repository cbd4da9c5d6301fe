// What common/sum_parts takes at the launch: tensors of one shape, and where their sum goes.
#pragma once

#include "shared/rows_param.h"
#include "shared/types.h"

namespace fovea::cuda {

inline constexpr std::int32_t kMostSummedParts = 32;
inline constexpr std::int32_t kSummedColumns = 1024;  // of a row, by one warp

/// What becomes of parts: NaN is the largest.
enum class Fold : std::uint8_t { sum, largest };

struct SumParams {
  RowsParam parts[kMostSummedParts];
  RowsParam sum;  // may be the first part's place
  /// [size of the first dimension] index of what is added there, -1: nothing; null: index for index.
  const std::int32_t* places[kMostSummedParts];
  std::int32_t num_parts;
  Fold fold;
  std::int32_t seqlen, num_heads, num_columns;
  std::int32_t num_pieces;  // of a row
  std::int64_t num_rows;    // of all heads and sequences
};

}  // namespace fovea::cuda
