// 16 bytes of a row for shared memory, where cp.async cannot copy them.
#pragma once

#include "ptx/base.cuh"
#include "ptx/memory.cuh"

namespace fovea::cuda {

/// A chunk of a row in memory, element by element: any alignment, any stride. Zeros where the row does not exist and
/// beyond head_dim.
FOVEA_DEVICE void gather_chunk(ptx::SharedAddress to, const char* row, int chunk, bool exists,
                               int head_dim, std::int64_t col_stride) {
  constexpr int kChunkElements = 8;  // of 16 bits
#pragma unroll 1
  for (int i = 0; i < kChunkElements; ++i) {
    const int col = chunk * kChunkElements + i;
    std::uint16_t bits = 0;
    if (exists && col < head_dim)
      bits = ptx::ld_global_nc(reinterpret_cast<const std::uint16_t*>(row) + col * col_stride);
    ptx::st_shared(to + i * 2, bits);
  }
}

}  // namespace fovea::cuda
