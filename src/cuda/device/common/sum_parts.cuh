// Adds tensors of one shape, of any dtypes and strides:
//
//   sum[t] = Σ_i parts_i[places_i[t]]
//
// or the largest of them, in f32, in the order of the parts, rounded once; t is the first dimension, and a part without
// places is added index for index. One part alone is a copy, in another dtype if need be; no part is zero. A warp for
// each kSummedColumns of a row, four columns a lane. What a lane writes it has read before, so the first part may be
// the sum's place, if it has no places.
//
// Bound: memory, every part once.
#pragma once

#include "common/columns.cuh"
#include "common/sequence.cuh"
#include "ptx/warp.cuh"
#include "shared/sum_params.h"

namespace fovea::cuda {

FOVEA_DEVICE float folded(Fold fold, float a, float b) {
  return fold == Fold::sum ? a + b : ptx::max_nan(a, b);
}

/// Where a part has what is added at index t; negative: nowhere.
FOVEA_DEVICE std::int32_t place_in(const SumParams& p, int part, std::int32_t t) {
  const std::int32_t* const places = p.places[part];
  return places == nullptr ? t : ptx::ld_global_nc(places + t);
}

FOVEA_DEVICE ptx::F32x4 sum_of_columns(const SumParams& p, std::int32_t batch, std::int32_t row,
                                       std::int32_t head, int col, int count) {
  constexpr int kAtOnce =
      4;  // parts whose columns are on their way; behind the last one it is read again
  ptx::F32x4 sum{0, 0, 0, 0};
  bool is_empty = true;
#pragma unroll 1
  for (int first = 0; first < p.num_parts; first += kAtOnce) {
    ptx::U32x4 bits[kAtOnce] = {};
    std::int32_t places[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int number = least(first + i, p.num_parts - 1);
      places[i] = place_in(p, number, batch);
      const RowsParam& part = p.parts[number];
      if (places[i] >= 0)
        bits[i] = load_columns(part, row_place(part, places[i], row, head), col, count);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= p.num_parts) break;
      if (places[i] < 0) continue;
      const ptx::F32x4 x = floats_of(bits[i], p.parts[first + i].element);
      // The first part is not added to 0: the sign of zero stays.
      sum = is_empty ? x
                     : ptx::F32x4{folded(p.fold, sum.x, x.x), folded(p.fold, sum.y, x.y),
                                  folded(p.fold, sum.z, x.z), folded(p.fold, sum.w, x.w)};
      is_empty = false;
    }
  }
  return sum;
}

/// block_dim.x / 32 pieces of rows of a CTA.
FOVEA_DEVICE void sum_parts(const SumParams& p) {
  const std::int64_t piece =
      std::int64_t{ptx::block_idx().x} * (ptx::block_dim().x / 32) + ptx::warp_idx();
  const std::int64_t number = piece / p.num_pieces;
  if (number >= p.num_rows) return;
  const auto head = static_cast<std::int32_t>(number % p.num_heads);
  const auto row = static_cast<std::int32_t>(number / p.num_heads % p.seqlen);
  const auto batch = static_cast<std::int32_t>(number / p.num_heads / p.seqlen);
  const auto begin = static_cast<std::int32_t>(piece % p.num_pieces) * kSummedColumns;
  const int end = least(begin + kSummedColumns, p.num_columns);
  for (int col = begin + 4 * ptx::lane_idx(); col < end; col += kColumnsOfWarp) {
    const int count = least(4, end - col);
    store_columns(p.sum, row_place(p.sum, batch, row, head), col, count,
                  sum_of_columns(p, batch, row, head, col, count));
  }
}

}  // namespace fovea::cuda
