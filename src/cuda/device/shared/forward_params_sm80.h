// What sm80/attention_quantized takes at the launch, beside what every forward kernel does.
#pragma once

#include "shared/forward_params.h"
#include "shared/quantize_k.h"
#include "shared/quantize_q.h"
#include "shared/quantize_v.h"
#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

/// What was rounded, and what is beside the codes.
struct RoundedOperands {
  BshdParam q;            // [batch, seqlen_q, num_heads_q, head_dim]
  BshdParam k;            // [batch, seqlen_kv, num_heads_kv, head_dim]
  std::int32_t head_dim;  // of the problem
  QuantizedRows rows;
  QuantizedParams keys;
  // Where V is rounded too: [batch, num_heads_kv, tiles, head_dim of the codes, kQuantizedTile], packed without batch
  const std::uint8_t* value_codes;
  QuantizedValues values;
  float log2_p_max,
      reciprocal_of_p_max;  // of the greatest code of a probability, where exponentials are rounded
  std::uint32_t* notes;     // of rows that are lost (lost_rows.h)
};

struct Sm80QuantizedParams {
  ForwardParams common;  // q and k of it are codes, two of which are an element; so is head_dim_qk
  RoundedOperands rounded;
};

}  // namespace fovea::cuda
