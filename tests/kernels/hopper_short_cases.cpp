// Problems of sm90/attention_forward_short: one product and several, row tiles of one group and of two, cut tiles of
// both, and every refusal's nearest neighbour. See forward_cases.hpp.
#include <utility>
#include <vector>

#include "kernels/forward_cases.hpp"
#include "support/features.hpp"

namespace fovea::testing {
namespace {

/// Around row tiles of 64, kv tiles and the longest that is taken without a mask; some lack rows or keys. Trailing rows
/// hold NaN.
Case packed(const char* label, std::int64_t head_dim, std::vector<Lengths> sequences) {
  Case problem = short_case(label, {}, head_dim);
  problem.num_heads_q = problem.num_heads_kv = 1;
  problem.sequences = std::move(sequences);
  problem.trailing_rows = 3;
  return problem;
}

}  // namespace

std::vector<Case> hopper_short_cases() {
  Case one_step = short_case("wgmma_short_d64", {77, 77}, 64);
  one_step.batch = 2;
  one_step.wants_row_max = true;
  // Several row tiles a group, several kv tiles, of which the first rows see the first alone.
  Case several = short_case("wgmma_short_causal_d128", {193, 257}, 128);
  several.num_heads_q = several.num_heads_kv = 1;
  several.mask = causal(Align::top_left);
  several.has_sinks = true;
  several.softmax_scale = 3;  // maxima that leave those of the tiles before far below
  // Keys that nobody sees are NaN.
  Case window_f16 = short_case("wgmma_short_window_d32", {256, 272}, 32);
  window_f16.dtype = Dtype::f16;
  window_f16.mask = window(30, 10);
  Case padded = short_case("wgmma_short_padded", {65, 63}, 72);
  padded.head_dim_v = 40;
  padded.dtype = Dtype::f16;
  padded.softmax_scale = 0.25F;
  Case group = short_case("wgmma_short_group", {129, 127}, 80);
  group.num_heads_q = 6;
  group.num_heads_kv = 2;
  group.mask = causal();
  Case infinite = short_case("wgmma_short_infinite", {193, 197}, 64);
  infinite.mask = causal();
  infinite.has_infinite_values = true;
  // Three groups of two row tiles each, one behind the other in one buffer; keys that are asked for later.
  Case refilled = short_case("wgmma_short_refilled_d128", {257, 257}, 128);
  refilled.num_heads_q = refilled.num_heads_kv = 2;
  refilled.mask = causal();
  refilled.has_infinite_values = true;
  // Queries in registers: two groups of three row tiles, of which the last has rows of one warp alone; and three groups
  // of two, whose first rows see no keys.
  Case kept = short_case("wgmma_short_kept_d64", {325, 340}, 64);
  kept.num_heads_q = 4;
  kept.num_heads_kv = 2;
  kept.mask = causal(Align::top_left);
  kept.has_sinks = true;
  Case kept_padded = short_case("wgmma_short_kept_padded", {384, 333}, 72);
  kept_padded.num_heads_q = kept_padded.num_heads_kv = 2;
  kept_padded.dtype = Dtype::f16;
  kept_padded.mask = causal();
  kept_padded.softmax_scale = 2;
  kept_padded.wants_row_max = true;
  kept_padded.has_infinite_values = true;
  // The same, one after the other: sums of 128 columns.
  Case kept_wide = short_case("wgmma_short_kept_d128", {384, 384}, 128);
  kept_wide.num_heads_q = 4;
  kept_wide.num_heads_kv = 2;
  kept_wide.mask = causal();
  kept_wide.has_sinks = true;
  kept_wide.has_infinite_values = true;
  // Six tiles of keys through two buffers: CTAs of two row tiles, of one, and of rows that begin behind the first tile,
  // or see nothing of what others do.
  Case ring = short_case("wgmma_short_ring", {384, 384}, 80);
  ring.num_heads_q = 4;
  ring.num_heads_kv = 2;
  ring.mask = causal();
  ring.has_sinks = true;
  ring.has_infinite_values = true;
  Case ring_window = short_case("wgmma_short_ring_window", {325, 380}, 80);
  ring_window.num_heads_q = ring_window.num_heads_kv = 1;
  ring_window.head_dim_v = 72;
  ring_window.dtype = Dtype::f16;
  ring_window.mask = window(40, 10);
  ring_window.wants_row_max = true;
  ring_window.has_infinite_values = true;
  Case ring_top_left = short_case("wgmma_short_ring_top_left", {384, 330}, 80);
  ring_top_left.num_heads_q = ring_top_left.num_heads_kv = 1;
  ring_top_left.mask = causal(Align::top_left);
  ring_top_left.softmax_scale = 3;
  // Three row tiles of one product each, whose next queries are there; two warps of the last have no rows.
  Case next_queries = short_case("wgmma_short_next_queries", {150, 197}, 80);
  next_queries.num_heads_q = next_queries.num_heads_kv = 4;
  next_queries.has_infinite_values = true;
  Case next_queries_causal = short_case("wgmma_short_next_queries_causal", {193, 208}, 72);
  next_queries_causal.num_heads_q = next_queries_causal.num_heads_kv = 4;
  next_queries_causal.mask = causal();
  // A warp of its own for 5 rows behind three row tiles of one group, for 1 behind two, and for 16 that see nothing.
  Case last_rows = short_case("wgmma_short_last_rows", {197, 197}, 80);
  last_rows.num_heads_q = 4;
  last_rows.num_heads_kv = 2;
  last_rows.has_infinite_values = true;
  last_rows.wants_row_max = true;
  Case last_row = short_case("wgmma_short_last_row_padded", {129, 203}, 72);
  last_row.head_dim_v = 80;
  last_row.dtype = Dtype::f16;
  last_row.mask = causal();
  last_row.has_sinks = true;
  last_row.has_infinite_values = true;
  last_row.softmax_scale = 2;
  Case empty_last_rows = short_case("wgmma_short_last_rows_empty", {208, 150}, 72);
  empty_last_rows.mask = window(40, 3, Align::top_left);
  // They see the middle of the keys.
  Case last_rows_window = short_case("wgmma_short_last_rows_window", {140, 200}, 72);
  last_rows_window.mask = window(60, 0);
  last_rows_window.has_infinite_values = true;
  // Few heads: CTAs of 64 rows, of which one has nothing but the last.
  Case last_rows_alone = short_case("wgmma_short_last_rows_alone", {197, 180}, 80);
  last_rows_alone.num_heads_q = last_rows_alone.num_heads_kv = 1;
  last_rows_alone.mask = causal(Align::top_left);
  // Two and three rounds of persistent CTAs; 64 rows of a group, and 13 of another.
  Case persistent = short_case("wgmma_short_persistent_d128", {77, 77}, 128);
  persistent.batch = 3;
  persistent.num_heads_q = 3;
  persistent.num_heads_kv = 1;
  persistent.has_sinks = true;
  Case persistent_infinite = short_case("wgmma_short_persistent_infinite", {77, 77}, 80);
  persistent_infinite.batch = 5;
  persistent_infinite.num_heads_q = persistent_infinite.num_heads_kv = 2;
  persistent_infinite.mask = causal();
  persistent_infinite.has_infinite_values = true;
  Case sinks = packed("wgmma_short_packed_d64", 64,
                      {{0, 0},
                       {1, 1},
                       {63, 64},
                       {64, 63},
                       {65, 77},
                       {77, 1},
                       {5, 0},
                       {0, 70},
                       {127, 128},
                       {128, 129},
                       {129, 97},
                       {193, 208},
                       {1, 200}});
  sinks.has_sinks = true;
  sinks.cu_seqlens_dtype = Dtype::i64;
  Case packed_causal =
      packed("wgmma_short_packed_causal", 128, {{197, 193}, {64, 127}, {65, 1}, {70, 208}});
  packed_causal.mask = causal();
  return {one_step,
          several,
          window_f16,
          padded,
          group,
          infinite,
          refilled,
          kept,
          kept_padded,
          kept_wide,
          ring,
          ring_window,
          ring_top_left,
          next_queries,
          next_queries_causal,
          last_rows,
          last_row,
          empty_last_rows,
          last_rows_window,
          last_rows_alone,
          persistent,
          persistent_infinite,
          sinks,
          packed_causal,
          short_case("wgmma_short_no_keys", {40, 0}, 64)};
}

}  // namespace fovea::testing
