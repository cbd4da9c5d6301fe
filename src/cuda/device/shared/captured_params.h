// What gradients of captured tensors take: the spec of their kernels, the call, sums, what is written.
#pragma once

#include "shared/backward_params.h"
#include "shared/backward_spec.h"
#include "shared/captures.h"
#include "shared/element.h"
#include "shared/types.h"

namespace fovea::cuda {

/// sm80/captured_gradients: a CTA has a tile of queries and meets tiles of keys.
struct CapturedSpec : OwnerSpec {
  bool multiplies_by_mma = true;  // else by plain f32 multiply-adds
  bool keeps_products =
      true;  // in shared memory, for walks along lines of the tile; else in registers

  bool operator==(const CapturedSpec&) const = default;
};

/// Rows lie first in its shared memory. Where their products begin: [tile_owned][tile_walked + 1] floats of S, then of
/// dP.
constexpr std::int32_t captured_scores_at(const CapturedSpec& spec) {
  if (spec.multiplies_by_mma) return sm80_backward_shared_bytes(Sm80BackwardSpec{spec});
  return 4 * (spec.tile_owned + spec.tile_walked) * (spec.head_dim_qk + 1 + spec.head_dim_v + 1);
}
/// Behind them log_sum, delta and origin of the queries.
constexpr std::int32_t captured_shared_bytes(const CapturedSpec& spec) {
  if (!spec.keeps_products) return captured_scores_at(spec);
  return captured_scores_at(spec) + 8 * spec.tile_owned * (spec.tile_walked + 1) +
         12 * spec.tile_owned;
}

/// The exact sum of any floats, whatever their order (common/exact_sum.cuh).
inline constexpr std::int32_t kExactDigits = 12;
struct ExactSum {
  std::uint64_t digits[kExactDigits];
  std::uint32_t not_finite;  // kinds of what was added besides
  std::uint32_t padding;
};

/// Every captured tensor and scalar may want a gradient.
inline constexpr std::int32_t kMaxCapturedGradients = kMaxCapturedTensors + kMaxCapturedScalars;
inline constexpr std::int32_t kExactSumThreads = 256;

/// A gradient each element of which belongs to one pair (q_idx, kv_idx): a dense bias. It is stored tile by tile.
struct DenseGradient {
  void* data;
  Element element;
  // Of its axes; 0: it has no such axis, and what differs in it is summed.
  std::int64_t batch_stride, head_stride, q_stride, kv_stride;
  std::int32_t num_batches, num_heads, num_q, num_kv;  // its extents
  // What is summed at a place of the first two axes.
  std::int32_t sequences_per_place, q_heads_per_place;
};

struct CapturedParams {
  /// rows.delta is that of common/backward_delta, or what captured_deltas writes in its place.
  BackwardParams call;
  ExactSum* sums;
  std::int64_t
      first_sum[kMaxCapturedGradients];  // of each gradient that is summed, in row-major order
  DenseGradient dense;
  /// Tiles of it that are computed again, where others have summed them; null: all are computed.
  RedoTiles dense_redo;
};

/// A gradient that is summed, as it is written.
struct SummedGradient {
  void* data;
  std::int64_t strides[kMaxCapturedRank];
  std::int32_t shape[kMaxCapturedRank];
  std::int32_t rank;
  Element element;
};

/// Of clear_sums and write_sums.
struct SumsParams {
  ExactSum* sums;
  std::int64_t num_sums;  // of all gradients
  std::int32_t num_gradients;
  std::int64_t first_sum[kMaxCapturedGradients];
  SummedGradient gradients[kMaxCapturedGradients];
};

}  // namespace fovea::cuda
