// Q in eight bits, where a kernel before attention rounds it: what common/quantize_q.cuh takes and leaves, and what
// attention reads of it. What codes are: quantize_k.h.
#pragma once

#include "shared/quantize_k.h"
#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

/// Beside the codes of a row of Q. A row that is not rounded, since it holds NaN or infinity, has scale 0 and codes 0;
/// others have more than 0.
struct alignas(8) QuantizedRow {
  float scale;
  float of_mean;  // q · μ
};

/// Where they are, as attention reads them.
struct QuantizedRows {
  const QuantizedRow* rows;  // [batch, num_heads_q, seqlen_q], packed [num_heads_q, total_q]
  std::int64_t batch_stride, head_stride;
};

/// Beside QuantizeKParams, which say how rows of either lie.
struct QuantizeQParams {
  BshdParam q;  // [batch, seqlen_q, num_heads_q, head_dim]
  GivenScales scales;
  std::int32_t num_heads_q, group, seqlen_q;
  std::int32_t num_tiles;   // of kQuantizedTile rows: of a sequence and head; packed: of a head
  IndexParam cu_seqlens_q;  // packed: [num_sequences + 1]
  std::int64_t total_q;     // rows of all sequences, of one head
  // [batch, num_heads_q, seqlen_q, head_dim of the codes], packed [num_heads_q, total_q, head_dim]
  std::int8_t* codes;
  std::uint16_t* numbers;  // or these elements, in the same places
  QuantizedRows beside;    // of codes
};

/// Where rows share scales: the greatest magnitude of each row of a tile, then scales.
inline constexpr std::int32_t kQuantizeQSharedBytes = 2 * kQuantizedTile * 4;

}  // namespace fovea::cuda
