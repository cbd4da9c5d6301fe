// A small backward, right by itself and wrong on request: proof that gradient_compare.hpp has teeth.
// planted_attention.hpp is its forward twin.
#pragma once

#include <cstdint>
#include <string_view>

#include "fovea/backward.hpp"

namespace fovea::testing {

enum class BackwardFault : std::uint8_t {
  none,
  delta_missing,
  delta_of_dout_squared,  // rowsum(dO ∘ dO)
  delta_in_bf16,
  dlse_ignored,
  dlse_added,  // wrong sign in delta
  scale_missing_in_dk,
  scale_twice_in_dq,
  softcap_slope_missing,
  softcap_slope_at_raw_score,  // 1 - (s / c)², without tanh
  bias_gradient_scaled,
  bias_gradient_overwritten,  // the last batch instead of the sum
  dropout_missing_in_dp,
  dropout_missing_in_dv,
  dropout_transposed,
  dropout_not_rescaled_in_dv,
  gqa_head_modulo,
  gqa_last_head_wins,  // dk and dv of one head of the group instead of their sum
  causal_off_by_one,   // sees one key too many
  causal_top_left,
  last_query_missing_in_dk,
  last_key_missing_in_dq,
  sink_gradient_sign,
  sink_gradient_without_dlse,
  probability_without_sink,  // exp(s) / Σ exp(s) over keys alone
  batch_of_neighbour_in_dv,
  ds_in_bf16,
  weight_in_bf16,
  dq_sum_in_bf16,
  hidden_key_read,  // ds = p (dp - delta) with p = 0 and dp NaN
  blind_row_read,   // a row that sees nothing passes 0 · NaN to its keys
};
inline constexpr int kNumBackwardFaults = static_cast<int>(BackwardFault::blind_row_read) + 1;

/// The programs of the case in the planted kernel's own words: softcap, bias, causal bottom-right,
/// and a mask that hides the first keys.
struct PlantedBackwardFeatures {
  bool is_causal = false;
  std::int64_t num_hidden_keys = 0;
  float softcap = 0;  // 0: none; with bias, its gradient is dcaptured[1]
  TensorView bias{};  // [num_heads_q, seqlen_q, seqlen_kv] f32; its gradient is dcaptured[0]
};

/// Dense, f32 outputs, row-major; any dtype and strides of the inputs; reads out and lse.
void planted_attention_backward(const AttentionBackward& args,
                                const PlantedBackwardFeatures& features, BackwardFault fault);

}  // namespace fovea::testing
