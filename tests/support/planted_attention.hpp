// A small tiled attention, right by itself and wrong on request: proof that the comparison of
// compare.hpp has teeth.
//
// It is what a kernel does (tiles of keys, online softmax, fp32) with its features written out by
// hand, so that each fault is one line that a tired person could have written.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "fovea/attention.hpp"

namespace fovea::testing {

enum class Fault : std::uint8_t {
  none,
  window_off_by_one,          // the leftmost key of the window is hidden
  top_left_for_bottom_right,  // the diagonal starts at the first key
  tail_key_unmasked,          // a zero-filled key after the last one takes part
  last_kv_tile_skipped,       // rounds the number of tiles down
  query_of_next_tile,         // the last row of a tile of 16 reads the query after it
  scale_applied_twice,
  scale_before_and_after_cap,  // the cap is scaled too
  softcap_after_mask,          // -inf becomes -cap
  bias_of_kv_head,             // the bias of the GQA group instead of the head's own
  bias_before_softcap,
  gqa_head_modulo,  // kv_head = q_head % num_heads_kv
  batch_ignored,    // dropout of batch 0 for all
  missing_rescale,  // the accumulator keeps the scale of the old maximum
  row_sum_missing_rescale,
  stale_max,  // the maximum of the first tile serves all tiles
  bf16_accumulator,
  bf16_row_sum,
  row_sum_of_rounded_weights,  // numerator exact, denominator of bf16 weights
  sink_counted_twice,
  sink_ignored_by_lse,
  sink_scaled,
  dropout_transposed,  // the decision of (kv_idx, q_idx)
  dropout_not_rescaled,
  dropout_before_row_sum,  // renormalised over what was kept
  lse_in_log2,
  lse_without_max,
  finite_mask,        // -1e30 instead of -inf: an empty row becomes the mean of v
  hidden_value_read,  // 0 * v where the key is hidden: NaN from padding
};
inline constexpr int kNumFaults = static_cast<int>(Fault::hidden_value_read) + 1;
std::string_view name(Fault fault);

/// The programs of the case in the planted kernel's own words; order as in the contract: softcap,
/// bias, mask.
struct PlantedFeatures {
  bool is_causal = false;                     // bottom-right
  std::optional<std::int64_t> window_left{};  // likewise
  float softcap = 0;                          // 0: none
  TensorView bias{};                          // [num_heads_q, seqlen_q, seqlen_kv] f32
};

/// Dense, any dtype and strides; reads sinks, dropout and softmax_scale of args, but not its
/// programs.
void planted_attention_forward(const AttentionForward& args, const PlantedFeatures& features,
                               Fault fault);

}  // namespace fovea::testing
