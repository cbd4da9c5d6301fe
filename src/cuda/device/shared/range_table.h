// The table of least and greatest values that loads in masks are bounded by, and the parameters of the kernel that
// builds it. cuda/params/range_tables.hpp plans and launches, device/common/range_table.cuh builds and reads.
#pragma once

#include "shared/captures.h"
#include "shared/types.h"

namespace fovea::cuda {

inline constexpr std::int32_t kPositionsPerRun = 64;
inline constexpr std::int32_t kRunsPerGroup = 32;  // a warp for each run, a CTA for each group

enum class CapturedElement : std::uint8_t { boolean, u8, i8, i32, i64, f32, f16, bf16 };

/// Least and greatest of a run: ints, or floats as ints of the same order, where NaN lie beyond the infinities.
struct alignas(8) RangeEntry {
  std::int32_t lo, hi;
};

/// A table is [lines][runs], then [lines][groups]. Lines are what the tensor's other dimensions index, row-major; those
/// of stride 0 count once.
struct RangeTableParam {
  CapturedTensorParam tensor;
  RangeEntry* entries;
  std::int64_t num_lines;
  std::int32_t num_groups;  // of one line
  std::int32_t rank;
  std::int32_t dim;  // along which positions run
  CapturedElement element;
};

struct RangeTableParams {
  RangeTableParam tables[kMaxCapturedTensors];  // one for each blockIdx.y
};

}  // namespace fovea::cuda
