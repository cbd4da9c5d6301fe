// Where rows of a tensor begin, as the lanes of a warp know it: each of one row, shuffled to the lanes that copy it.
#pragma once

#include "ptx/base.cuh"
#include "ptx/warp.cuh"

namespace fovea::cuda {

/// Where the rows of a warp begin in a tensor. Each lane knows it of the row of its own number, and shuffles it to the
/// others.
class RowAddresses {
 public:
  /// Of row lane_idx() of the warp's, or of any, where the warp has fewer.
  FOVEA_DEVICE_MEMBER RowAddresses(const char* mine, bool exists)
      : mine_(ptx::bit_cast<ptx::U32x2>(mine)), exist_(ptx::ballot(exists)) {}

  FOVEA_DEVICE_MEMBER bool exists(int row) const { return (exist_ >> row & 1U) != 0; }
  FOVEA_DEVICE_MEMBER char* at(int row) const {
    return ptx::bit_cast<char*>(
        ptx::U32x2{ptx::shfl_idx(mine_.x, row), ptx::shfl_idx(mine_.y, row)});
  }

 private:
  ptx::U32x2 mine_;
  std::uint32_t exist_;
};

}  // namespace fovea::cuda
